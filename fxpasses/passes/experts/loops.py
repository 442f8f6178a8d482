"""Find loops over experts by where their branches end: E results that are merged into one tensor.

out.index_add_(0, tok_e, y_e)        E writes into one buffer, or a chain of E values
out[tok_e] += y_e                    three nodes a branch: getitem, iadd, setitem
y[mask_e] = y_e                      or y[start_e:stop_e] = y_e
torch.cat([y_0, y_1, ...])
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpasses.graph.families import operator_of
from fxpasses.graph.symbols import is_unbacked

_ADDING = frozenset({"index_add_", "index_add", "scatter_add_", "scatter_add", "index_put_", "index_put"})
_FUNCTIONAL = ("index_add", "scatter_add", "index_put")
_IN_PLACE_ADD = frozenset({"iadd", "add", "add_", "__iadd__"})


@dataclass(frozen=True)
class Merge:
    """The end of one branch: `node` merges `values`. parts: what belongs to it, the `getitem` and `iadd` of a `+=`."""

    node: Node
    values: tuple[Any, ...]
    parts: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Loop:
    """kind: "add" (the operator of the merges), "assign" or "cat". buffer: what is merged into, before the first."""

    kind: str
    merges: tuple[Merge, ...]
    buffer: Node | None

    def rounds(self) -> Iterator[list[Loop]]:
        """The whole loop, then the loop as two rounds of a loop, as three, ..."""
        yield [self]
        if self.kind not in ("cat", *_FUNCTIONAL):
            for number in range(2, len(self.merges) // 2 + 1):
                size, rest = divmod(len(self.merges), number)
                if not rest:
                    starts = range(0, len(self.merges), size)
                    yield [Loop(self.kind, self.merges[start : start + size], self.buffer) for start in starts]


def find_loops(graph: Graph) -> Iterator[Loop]:
    """Candidates, those with two branches or more."""
    buffers: defaultdict[Any, list[Merge]] = defaultdict(list)
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        name = operator_of(node)
        if name in ("cat", "concat", "concatenate") and node.args and isinstance(node.args[0], (list, tuple)):
            parts = node.args[0]
            along = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
            if len(parts) > 1 and along == 0 and all(isinstance(p, Node) and has_rows(p) for p in parts):
                yield Loop("cat", tuple(Merge(node, (part,)) for part in parts), None)
        elif name in _ADDING and isinstance(node.args[0], Node):
            if any(isinstance(a, Node) and has_rows(a) for a in node.all_input_nodes[1:]):
                buffers[_root_of_chain(node, name), name].append(Merge(node, (node.args[1:], node.kwargs)))
        elif name == "setitem":
            merge = _assignment(node)
            if merge is not None:
                kind = "setadd" if merge.parts else "assign"
                buffers[node.args[0], kind].append(merge)
    for (buffer, name), merges in buffers.items():
        if len(merges) > 1:
            yield Loop(name, tuple(merges), buffer)


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
