"""Writes to rows in place, and new memory that is filled part by part. A packed value has memory of its own, so a write
is followed only if every name of the written memory is known.

| program | what it becomes |
|---|---|
| `x += y`, of a whole value that nothing else shares | `x + y` from there on |
| `new = x.new_empty(...); new[..., :8] = a; new[..., 8:] = b` | the same, of packed rows, if nobody reads it before |
| any other write to memory with rows | the graph is left alone |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch.fx import Node

from fxpasses.graph.aliases import storages, written_operands
from fxpasses.graph.calls import operator_of
from fxpasses.graph.traits import is_pointwise
from fxpasses.rows.nodes import first_of, is_tensor, refused, shape_of, unfollowed
from fxpasses.rows.spaces import Tags

MAKES_MEMORY = frozenset({"new_empty", "new_zeros", "new_ones", "empty_like", "full_like", "zeros_like", "ones_like"})
# Operators that write by an index; the rules determine whether they write into the same row.
WRITTEN_BY_INDEX = frozenset({"index_add", "scatter", "scatter_add"})
_NEW_PARTS = frozenset({"max", "min", "sort", "topk"})  # return tuples whose parts share no memory


class Found(Protocol):
    """The layout that is being made, as far as it is known (`rows/layout.py`)."""

    tags: dict[Node, Tags]
    written: dict[Node, Node]
    fills: dict[Node, Node]
    origins: dict[Node, Node]

    @property
    def exits(self) -> Mapping[Node, Any]: ...

    @property
    def scores(self) -> Mapping[Node, Any]: ...


class Writes:
    """Finds the writes, for a layout that is being made."""

    def __init__(self, layout: Found) -> None:
        self.layout, self.tags = layout, layout.tags
        self._memory: dict[Node, set[int]] = {}
        self._new: dict[Node, Node] = {}  # new memory that nobody has read, by itself and by the views that fill it

    def makes(self, node: Node, like: Node, tags: Tags) -> Tags:
        """The tags of `x.new_empty(sizes)`, `torch.zeros_like(x)`: x's rows, perhaps with other features."""
        sizes = list(zip(shape_of(node), shape_of(like), tags, strict=False))
        if len(shape_of(node)) != len(tags) or any(tag and own != other for own, other, tag in sizes):
            raise refused(node, "makes memory of other sizes")
        self._new[node] = node
        return tags

    def reads(self, node: Node) -> None:
        """Called for each node: new memory that it reads is no longer new."""
        fills = operator_of(node) in ("copy_", "setitem") or self._is_view_to_fill(node)
        for operand in node.all_input_nodes:
            if not fills or operand is not first_of(node):
                self._is_read(operand)
        if operator_of(node) == "getitem" and first_of(node) in self._new:
            self._new[node] = self._new[first_of(node)]

    def copies(self, node: Node) -> bool:
        """Whether a node is `copy_` into new memory, or into a view of it."""
        into = first_of(node)
        memory = self._new.get(into)
        if operator_of(node) != "copy_" or memory is None or memory not in (into, first_of(into)):
            return False
        self.layout.fills[node] = self._new[into]
        return True

    def sets(self, node: Node, part_of: Callable[[Node], Tags]) -> None:
        """Note `x[..., :8] = y`, where x is new memory. part_of: returns the tags of `x[..., :8]`. Raises `Refused`."""
        memory, _, value = node.args
        if not isinstance(memory, Node) or self._new.get(memory) is not memory:
            raise unfollowed(node, "writes to rows")
        part = part_of(memory)
        if isinstance(value, Node):
            tags = self.tags.get(value, ())
            own = (None,) * (len(part) - len(tags)) + tags
            if own != part or (is_tensor(value) and len(tags) != len(shape_of(value))):
                raise unfollowed(node, "writes other rows, or what is none, to rows")
        self.layout.fills[node] = memory

    def in_place(self, node: Node, name: str, broadcast: Callable[[Node], Tags]) -> Tags:
        """The tags of `x += y`. broadcast: returns the tags of `x + y`. Raises `Refused`."""
        written = first_of(node)
        if not is_tensor(written):
            raise unfollowed(node, "writes to several tensors")
        by_rows = is_pointwise(name[:-1]) or name[:-1] in WRITTEN_BY_INDEX
        if not by_rows or written not in self.tags or node.kwargs.get("out") is not None:
            raise unfollowed(node, "writes to rows")
        written = self.layout.written.get(written, written)
        others = self._sharing(node, (*self.tags.keys() - {written, _tuple_of(written)}, *self.layout.exits))
        if any(self.layout.written.get(other) is not written for other in others):
            raise unfollowed(node, "writes to rows that another value shares")
        if self.layout.origins.get(written) is not None or broadcast(node) != self.tags[written]:
            raise unfollowed(node, "writes to rows of another checkpoint")
        self.layout.written[node] = written
        return self.tags[written]

    def check(self, node: Node) -> None:
        """Called for each node once its effect is known: raise `Refused` if it writes to rows in another way, or by
        another name, as in `relu(x[:, 0], inplace=True)`."""
        if node in self.layout.written or node in self.layout.fills or node in self.layout.scores:
            return
        for operand in written_operands(node):
            if is_tensor(operand) and self._sharing(operand, self.tags):
                raise unfollowed(node, "writes to rows by another name")

    def keeps(self, node: Node, values: Iterable[Node]) -> None:
        """Raise `Refused` if a node that writes in place writes to one of these values."""
        written = first_of(node)
        if is_tensor(written) and self._sharing(written, values):
            raise unfollowed(node, "writes to what says where rows are")

    def _sharing(self, node: Node, values: Iterable[Node]) -> set[Node]:
        memory = self._memory_of(node)
        return {other for other in values if memory & self._memory_of(other)}

    def _memory_of(self, node: Node) -> set[int]:
        if node not in self._memory:
            self._memory[node] = set(storages(node))
        return self._memory[node]

    def _is_view_to_fill(self, node: Node) -> bool:
        """Whether a node is a view of new memory, which `copy_` writes to and nothing reads."""
        if operator_of(node) != "getitem" or self._new.get(first_of(node)) is not first_of(node):
            return False
        return bool(node.users) and all(operator_of(u) == "copy_" and first_of(u) is node for u in node.users)

    def _is_read(self, node: Node) -> None:
        memory = self._new.get(node)
        if memory is not None:
            self._new = {other: made for other, made in self._new.items() if made is not memory}


def _tuple_of(part: Node) -> Node | None:
    """The tuple that a value was taken from, and whose parts share no memory; None if there is none."""
    source = first_of(part) if operator_of(part) == "getitem" else None
    return source if isinstance(source, Node) and operator_of(source) in _NEW_PARTS else None
