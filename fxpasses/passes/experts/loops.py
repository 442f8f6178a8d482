"""Find loops over experts by where their branches end: E results that are merged into one tensor.

out.index_add_(0, tok_e, y_e)        E writes into one buffer, or a chain of E values
out[tok_e] += y_e                    three nodes a branch: getitem, iadd, setitem
y[mask_e] = y_e                      or y[start_e:stop_e] = y_e
out = out + zeros.masked_scatter(mask_e, y_e)
torch.cat([y_0, y_1, ...])           or several lists, one of each thing that a branch gives
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpasses.graph.calls import argument, operator_of
from fxpasses.graph.effects import leaves
from fxpasses.graph.reachability import reached
from fxpasses.graph.symbols import is_unbacked

_FUNCTIONAL = ("index_add", "scatter_add", "scatter_reduce", "index_put", "masked_add")
_ADDING = frozenset(name + end for name in _FUNCTIONAL[:-1] for end in ("", "_"))
_IN_PLACE_ADD = ("add", "add_")
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})


@dataclass(frozen=True)
class Merge:
    """The end of one branch: `node` merges `values`. parts: what belongs to it, the `getitem` and `iadd` of a `+=`.

    Of lists, `node` is the first that is concatenated, and `values` are the branch's parts of all lists.
    """

    node: Node
    values: tuple[Any, ...]
    parts: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Loop:
    """kind: "index_add" (the operator of the merges), "setadd", "assign", "masked_add", "masked_add_" or "cat".

    buffer: what is merged into, before the first. lists: the `torch.cat` of each list.
    """

    kind: str
    merges: tuple[Merge, ...]
    buffer: Node | None
    lists: tuple[Node, ...] = ()

    @property
    def ends(self) -> tuple[Node, ...]:
        return self.lists or tuple(merge.node for merge in self.merges)

    @property
    def is_functional(self) -> bool:
        """Whether each merge gives a new sum, and leaves the one before as it was."""
        return self.kind in _FUNCTIONAL

    def rounds(self) -> Iterator[list[Loop]]:
        """The whole loop, then the loop as two rounds of a loop, as three, ..."""
        yield [self]
        if self.kind != "cat" and not self.is_functional:
            for number in range(2, len(self.merges) // 2 + 1):
                size, rest = divmod(len(self.merges), number)
                if not rest:
                    starts = range(0, len(self.merges), size)
                    yield [Loop(self.kind, self.merges[start : start + size], self.buffer) for start in starts]


def find_loops(graph: Graph) -> Iterator[Loop]:
    """Candidates, those with two branches or more."""
    buffers: defaultdict[Any, list[Merge]] = defaultdict(list)
    lists: list[Node] = []
    roots: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        name = operator_of(node)
        if name == "cat" and node.args and isinstance(node.args[0], (list, tuple)):
            parts = node.args[0]
            along = argument(node, "dim", 0)
            if len(parts) > 1 and along == 0 and all(isinstance(p, Node) and has_rows(p) for p in parts):
                lists.append(node)
        elif name in _ADDING and isinstance(node.args[0], Node):
            if any(isinstance(a, Node) and has_rows(a) for a in node.all_input_nodes[1:]):
                buffers[_root_of_chain(node, name), name].append(Merge(node, (node.args[1:], node.kwargs)))
        elif name in _IN_PLACE_ADD and (merge := _masked_addition(node)) is not None:
            kind = "masked_add" if name == "add" else "masked_add_"
            roots[node] = roots.get(node.args[0], (node.args[0], kind))
            if roots[node][1] == kind:
                buffers[roots[node]].append(merge)
        elif name == "setitem":
            merge = _assignment(node)
            if merge is not None:
                kind = "setadd" if merge.parts else "assign"
                buffers[node.args[0], kind].append(merge)
    found = [Loop(name, tuple(merges), buffer) for (buffer, name), merges in buffers.items() if len(merges) > 1]
    for group in _made_together(lists):
        branches: Any = zip(*(node.args[0] for node in group), strict=True)
        found.append(Loop("cat", tuple(Merge(group[0], values) for values in branches), None, tuple(group)))
    yield from filter(_merges_numbers, found)


def _merges_numbers(loop: Loop) -> bool:
    """Whether a branch gives floating-point numbers, as experts do; what builds a mask part by part does not."""
    values = (leaf for merge in loop.merges for leaf in leaves(merge.values) if isinstance(leaf, Node))
    examples = (value.meta.get("example_value") for value in values)
    return any(isinstance(example, torch.Tensor) and example.dtype.is_floating_point for example in examples)


def _made_together(lists: list[Node]) -> list[list[Node]]:
    """Lists of as many parts, of which the first ones are made of the same rows: the results of one loop."""
    groups: list[tuple[int, set[Node], list[Node]]] = []
    for node in lists:
        parts: Any = node.args[0]
        rows, members = _rows_behind(parts[0]), [node]
        for group in [group for group in groups if group[0] == len(parts) and group[1] & rows]:
            groups.remove(group)
            rows, members = rows | group[1], [*group[2], *members]
        groups.append((len(parts), rows, members))
    return [sorted(members, key=lists.index) for _, _, members in groups]


def _rows_behind(part: Node) -> set[Node]:
    """What holds rows and leads to a part of a list; not what another loop has given."""

    def rows(nodes: list[Node]) -> list[Node]:
        return [node for node in nodes if operator_of(node) != "cat" and has_rows(node)]

    return set(reached(rows([part]), lambda node: rows(node.all_input_nodes)))


def has_rows(node: Node) -> bool:
    """Whether some size of a node's tensor, or of one of its tensors, is known by the batch alone."""
    example = node.meta.get("example_value")
    return any(
        isinstance(part, torch.Tensor) and any(isinstance(s, torch.SymInt) and is_unbacked(s) for s in part.shape)
        for part in (example if isinstance(example, (tuple, list)) else (example,))
    )


def _root_of_chain(node: Node, name: str) -> Node:
    """What `out = out.index_add(...)`, again and again, started from; in place, every link is the same memory."""
    current = node.args[0]
    while isinstance(current, Node):
        target = operator_of(current)
        if target != name or (not name.endswith("_") and len(current.users) != 1):
            break
        current = current.args[0]
    assert isinstance(current, Node)
    return current


def _assignment(node: Node) -> Merge | None:
    """`out[key] = value`, and `out[key] += y`, which reads `out[key]` first."""
    buffer, key, value = node.args
    keys = key if isinstance(key, tuple) else (key,)
    if not isinstance(buffer, Node) or not any(_names_rows(k) for k in keys):
        return None
    if isinstance(value, Node) and value.op.startswith("call") and len(value.args) == 2:
        name = operator_of(value)
        read, added = value.args
        if isinstance(read, Node) and read.target is operator.getitem and read.args[0] is buffer:
            others = {user for user in read.users if user.target is not torch.ops.aten.sym_size.int}
            if name not in _IN_PLACE_ADD or read.args[1] != key or others != {value}:
                return None
            if set(value.users) != {node}:
                return None
            return Merge(node, (key, added), (read, value))
    return Merge(node, (key, value))


def _masked_addition(node: Node) -> Merge | None:
    """`out + zeros.masked_scatter(mask, y)`."""
    if len(node.args) != 2 or node.kwargs:
        return None
    out, addend = node.args
    if not isinstance(out, Node) or not isinstance(addend, Node) or operator_of(addend) != "masked_scatter":
        return None
    if len(addend.args) != 3 or addend.kwargs or set(addend.users) != {node}:
        return None
    zeros, mask, source = addend.args
    known = isinstance(zeros, Node) and operator_of(zeros) in _ZEROS and isinstance(source, Node) and has_rows(source)
    return Merge(node, (zeros, mask, source), (addend,)) if known else None


def _names_rows(key: Any) -> bool:
    """Whether a part of a key depends on the batch: places, a mask, a slice with a bound that was read."""
    if isinstance(key, slice):
        return any(
            isinstance(bound, Node) and is_unbacked(bound.meta["example_value"]) for bound in (key.start, key.stop)
        )
    return isinstance(key, Node) and has_rows_or_mask(key)


def has_rows_or_mask(node: Node) -> bool:
    example = node.meta.get("example_value")
    return has_rows(node) or (isinstance(example, torch.Tensor) and example.dtype is torch.bool)
