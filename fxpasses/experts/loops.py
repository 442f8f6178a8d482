"""Find loops over experts by the ends of their branches: E results that are merged into one tensor.

out.index_add_(0, tok_e, y_e)        E writes into one buffer, or a chain of E values
out[tok_e] += y_e                    three nodes a branch: getitem, iadd, setitem
y[mask_e] = y_e                      or y[start_e:stop_e] = y_e
out = out + zeros.masked_scatter(mask_e, y_e)
torch.cat([y_0, y_1, ...])           or several lists, one for each result of a branch
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpasses.graph.calls import argument, operator_of
from fxpasses.graph.effects import leaves
from fxpasses.graph.reachability import reached
from fxpasses.graph.symbols import is_unbacked
from fxpasses.graph.traits import ZEROS

_FUNCTIONAL = ("index_add", "scatter_add", "scatter_reduce", "index_put", "masked_add")
_ADDING = frozenset(name + end for name in _FUNCTIONAL[:-1] for end in ("", "_"))
_IN_PLACE_ADD = ("add", "add_")


@dataclass(frozen=True)
class Merge:
    """The end of one branch: `node` merges `values`. parts: its other nodes, the `getitem` and `iadd` of a `+=`.

    For lists, `node` is the first `torch.cat`, and `values` are the branch's parts of all lists.
    """

    node: Node
    values: tuple[Any, ...]
    parts: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Loop:
    """kind: "index_add" (the operator of the merges), "setadd", "assign", "masked_add", "masked_add_" or "cat".

    buffer: the tensor before the first merge. lists: the `torch.cat` of each list.
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
        """Whether each merge returns a new sum instead of writing to the previous one."""
        return self.kind in _FUNCTIONAL

    @property
    def is_divisible(self) -> bool:
        """Whether some consecutive merges can be a loop by themselves, with the others unchanged."""
        return self.kind != "cat" and not self.is_functional

    def rounds(self) -> Iterator[list[Loop]]:
        """The whole loop, then the loop as two rounds of a loop, as three, ..."""
        yield [self]
        if self.is_divisible:
            for number in range(2, len(self.merges) // 2 + 1):
                size, rest = divmod(len(self.merges), number)
                if not rest:
                    starts = range(0, len(self.merges), size)
                    yield [Loop(self.kind, self.merges[start : start + size], self.buffer) for start in starts]

    def families(self, is_alike: Callable[[Merge, Merge], bool]) -> list[Loop]:
        """The loop as runs of like branches, such as ordinary experts, then experts that return their input."""
        runs = [[self.merges[0]]]
        for merge in self.merges[1:]:
            if is_alike(runs[-1][-1], merge):
                runs[-1].append(merge)
            else:
                runs.append([merge])
        return [Loop(self.kind, tuple(run), self.buffer) for run in runs]


def find_loops(graph: Graph) -> Iterator[Loop]:
    """The candidates: loops with two or more branches."""
    buffers: defaultdict[Any, list[Merge]] = defaultdict(list)
    lists: list[Node] = []
    roots: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        name = operator_of(node)
        if name == "cat" and node.args and isinstance(node.args[0], (list, tuple)) and "out" not in node.kwargs:
            parts = node.args[0]
            along = argument(node, "dim", 0)
            if len(parts) > 1 and along == 0 and all(isinstance(p, Node) and has_rows(p) for p in parts):
                lists.append(node)
        elif name in _ADDING and node.args and isinstance(node.args[0], Node):
            if any(isinstance(a, Node) and has_rows(a) for a in node.all_input_nodes[1:]):
                buffers[_root_of_chain(node, name), name].append(Merge(node, (node.args[1:], node.kwargs)))
        elif name in _IN_PLACE_ADD and (merge := _masked_addition(node)) is not None:
            kind = "masked_add" if name == "add" else "masked_add_"
            roots[node] = roots.get(node.args[0], (node.args[0], kind))
            if roots[node][1] == kind:
                buffers[roots[node]].append(merge)
        elif name == "setitem" and (merge := _assignment(node)) is not None:
            buffers[node.args[0], "setadd" if merge.parts else "assign"].append(merge)
    found = [Loop(name, tuple(merges), buffer) for (buffer, name), merges in buffers.items() if len(merges) > 1]
    for group in _made_together(lists):
        branches: Any = zip(*(node.args[0] for node in group), strict=True)
        found.append(Loop("cat", tuple(Merge(group[0], values) for values in branches), None, tuple(group)))
    yield from filter(_merges_numbers, found)


def _merges_numbers(loop: Loop) -> bool:
    """Whether a branch returns floating-point numbers, as experts do; a loop that builds a mask does not."""
    values = (leaf for merge in loop.merges for leaf in leaves(merge.values) if isinstance(leaf, Node))
    examples = (value.meta.get("example_value") for value in values)
    return any(isinstance(example, torch.Tensor) and example.dtype.is_floating_point for example in examples)


def _made_together(lists: list[Node]) -> list[list[Node]]:
    """Groups of lists of equal length whose first parts depend on the same rows: the results of one loop."""
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
    """The nodes with rows that a part of a list depends on, up to the results of other loops."""

    def rows(nodes: list[Node]) -> list[Node]:
        return [node for node in nodes if operator_of(node) != "cat" and has_rows(node)]

    return set(reached(rows([part]), lambda node: rows(node.all_input_nodes)))


def has_rows(node: Node) -> bool:
    """Whether some size of a node's tensor, or of one of its tensors, depends on the batch's values."""
    example = node.meta.get("example_value")
    parts = example if isinstance(example, (tuple, list)) else (example,)
    return any(isinstance(part, torch.Tensor) and any(map(is_unbacked, part.shape)) for part in parts)


def _root_of_chain(node: Node, name: str) -> Node:
    """The first buffer of a chain `out = out.index_add(...)`; in place, every link is the same memory."""
    current: Any = node.args[0]
    while operator_of(current) == name and (name.endswith("_") or len(current.users) == 1):
        current = current.args[0]
    assert isinstance(current, Node)
    return current


def _assignment(node: Node) -> Merge | None:
    """`out[key] = value`, and `out[key] += y`, which reads `out[key]` first."""
    buffer, key, value = node.args
    keys = key if isinstance(key, tuple) else (key,)
    if not isinstance(buffer, Node) or not any(map(_depends_on_batch, keys)):
        return None
    if isinstance(value, Node) and value.op.startswith("call") and len(value.args) == 2 and not value.kwargs:
        read, added = value.args
        if isinstance(read, Node) and read.target is operator.getitem and read.args[0] is buffer:
            others = {user for user in read.users if user.target is not torch.ops.aten.sym_size.int}
            is_sum = operator_of(value) in _IN_PLACE_ADD and read.args[1] == key
            is_own = others == {value} and set(value.users) == {node}
            return Merge(node, (key, added), (read, value)) if is_sum and is_own else None
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
    known = isinstance(zeros, Node) and operator_of(zeros) in ZEROS and isinstance(source, Node) and has_rows(source)
    return Merge(node, (zeros, mask, source), (addend,)) if known else None


def _depends_on_batch(key: Any) -> bool:
    """Whether a part of a key depends on the batch's values: places, a mask, a slice whose bound is a host read."""
    if isinstance(key, slice):
        bounds = [bound for bound in (key.start, key.stop) if isinstance(bound, Node)]
        return any(is_unbacked(bound.meta["example_value"]) for bound in bounds)
    is_mask = isinstance(key, Node) and getattr(key.meta.get("example_value"), "dtype", None) is torch.bool
    return is_mask or (isinstance(key, Node) and has_rows(key))
