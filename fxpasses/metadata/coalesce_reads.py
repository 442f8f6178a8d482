"""Coalesce a layer's host reads into one copy.

Before: `counts.tolist()` is one copy in eager mode, but Dynamo unrolls it, and the host waits at each element:

    count_0 = counts[0].item();  count_1 = counts[1].item();  total = sums[0].item()

After, in place of the first:

    host = torch.cat([counts.reshape(-1), sums.reshape(-1)]).to("cpu")
    count_0 = host[0].item();  count_1 = host[1].item();  total = host[2].item()

Each number keeps its node, and so the unbacked symbol that the node binds. A read joins an earlier copy if the few
integers that it depends on can be computed before that copy: an expert-parallel layer reads the splits of its
all-to-all, and after the all-to-all the rows of its own experts, which follow from the same counts. Otherwise the read
starts a new copy. Nothing else moves, in particular no collective. Two reads of an element, with no write in between,
become one number. Reads that depend on the batch alone are already gone: `hoist_metadata` runs first.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxpasses.graph import effects
from fxpasses.graph.aliases import AliasAnalysis
from fxpasses.graph.building import NodeBuilder, erase_unused
from fxpasses.graph.provenance import where
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import declare_equal
from fxpasses.metadata.element_reads import constant_index
from fxpasses.metadata.host_copies import is_copy_to_host
from fxpasses.passes.pipeline import Context
from fxpasses.report import Report

# Dtypes that fit into an int64, so one copy may hold elements of several tensors.
_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})
# A tensor may be computed earlier than in the program if it has at most so many elements: enough for counts, too few
# for tokens.
_MOST_MOVED = 4096


@dataclass(frozen=True)
class Read:
    """`node` is `.item()` of element `place`, in row-major order, of the value that `tensor` has at node `at`."""

    node: Node
    tensor: Node
    place: int
    at: Node


@dataclass
class Copy:
    """Reads that one copy serves, in program order; the nodes in `moved` move before the first of them."""

    reads: list[Read] = field(default_factory=list)
    moved: dict[Node, None] = field(default_factory=dict)

    @property
    def first(self) -> Node:
        return self.reads[0].node

    @property
    def waits(self) -> int:
        """How often the host waits for these numbers: once for each, but once for all those of an existing copy."""
        return len({read.at for read in self.reads})

    @property
    def tensors(self) -> list[Node]:
        return list(dict.fromkeys(read.tensor for read in self.reads))


class CoalesceReads:
    """The pass."""

    name = "coalesce_reads"
    exact = True

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        before = after = 0
        for region in Region(gm).walk():
            for copy in copies_of(region.gm.graph, context):
                waits, place = copy.waits, where(copy.first)
                elements = f"{len(copy.reads)} numbers of {', '.join(f'`{node.name}`' for node in copy.tensors)}"
                try:
                    context.check_may_change(copy.first)
                    coalesce(region.gm.graph, copy, context.fake_mode)
                    before, after = before + waits, after + 1
                    report.changes.append(f"{elements} at {place} → one copy")
                except Refused as refused:
                    report.refusals.append(refused.of(copy.first))
            region.gm.recompile()
        if report.changes:
            report.changed = True
            report.figures = {"host_reads_before": before, "host_reads_after": after}
            report.summary = f"{before} host reads became {after}"
        return report


def copies_of(graph: Graph, context: Context) -> list[Copy]:
    """The copies that save the host a wait."""
    items = graph.find_nodes(op="call_method", target="item")
    if len(items) < 2:
        return []
    memory = context.aliases(graph)
    copies: list[Copy] = []
    for read in (read for item in items if (read := _read(item, memory)) is not None):
        for copy in reversed(copies):
            if (moved := _fits(read, copy, memory, context.fake_mode)) is not None:
                copy.moved |= dict.fromkeys(moved)
                break
        else:
            copies.append(copy := Copy())
        copy.reads.append(read)
    return [copy for copy in copies if copy.waits > 1]


def _fits(read: Read, copy: Copy, memory: AliasAnalysis, fake_mode: Any) -> list[Node] | None:
    """The nodes to move for a copy to serve a later read as well; None if it cannot."""
    example, other = (node.meta["example_value"] for node in (read.tensor, copy.reads[0].tensor))
    if example.device != other.device:
        return None
    if read.tensor not in copy.tensors and not {example.dtype, other.dtype} <= _INTEGERS:
        return None
    between = sorted((read.at, copy.first), key=memory.positions.__getitem__)
    if memory.writer(read.tensor, *between) is not None:
        return None
    return _computed_after(copy.first, read.tensor, memory, fake_mode)


def _computed_after(first: Node, tensor: Node, memory: AliasAnalysis, fake_mode: Any) -> list[Node] | None:
    """The nodes after `first` on which `tensor` depends, in program order; None unless all can move before `first`."""
    found: set[Node] = set()
    waiting = [tensor]
    while waiting:
        node = waiting.pop()
        if node in found or memory.positions[node] < memory.positions[first]:
            continue
        if not _can_move(node, first, memory, fake_mode):
            return None
        found.add(node)
        waiting += node.all_input_nodes
    return sorted(found, key=memory.positions.__getitem__)


def _can_move(node: Node, first: Node, memory: AliasAnalysis, fake_mode: Any) -> bool:
    """Whether a node has the same value before `first`: it is pure, and its few integers are not written after it."""
    operands = node.all_input_nodes
    for tensor in (node, *operands):
        if not _is_dense(tensor) or tensor.meta["example_value"].dtype not in _INTEGERS | {torch.bool}:
            return False
    example = node.meta["example_value"]
    if example.numel() > _MOST_MOVED or any(example.device != n.meta["example_value"].device for n in operands):
        return False  # a copy between devices would add a wait
    is_written = any(memory.writer(operand, first, node) is not None for operand in operands)
    return not is_written and effects.impurity(node, fake_mode) is None


def _read(node: Node, memory: AliasAnalysis) -> Read | None:
    """The element that `.item()` reads, by constant indices, of a tensor of known size; None for any other read."""
    if not isinstance(node.meta.get("example_value"), (torch.SymInt, torch.SymFloat)) or len(node.args) != 1:
        return None
    places: list[int] = []
    current: Any = node.args[0]
    while (index := constant_index(current)) is not None:
        places = [*index, *places]
        current = current.args[0]
    if not _is_dense(current):
        return None
    at = node
    if is_copy_to_host(current):
        if not _keeps_dtype(current) or any(memory.writer(n, current, node) for n in (current, current.args[0])):
            return None  # the existing copy stays, with its one wait
        at, current = current, current.args[0]
    place: int = 0
    sizes = current.meta["example_value"].shape
    for size, chosen in zip(sizes, [*places, *[0] * (len(sizes) - len(places))], strict=True):
        place = place * size + chosen % size
    return Read(node, current, place, at)


def _keeps_dtype(copy: Node) -> bool:
    """Whether a copy to the host is of a dense tensor, and of the same dtype."""
    source: Any = copy.args[0]
    return _is_dense(source) and source.meta["example_value"].dtype == copy.meta["example_value"].dtype


def _is_dense(node: Any) -> bool:
    """Whether a node is a plain tensor of known size."""
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    if type(example) is not torch._subclasses.FakeTensor or example.layout is not torch.strided:
        return False
    return all(isinstance(size, int) and size > 0 for size in example.shape) and not example.dtype.is_complex


def coalesce(graph: Graph, copy: Copy, fake_mode: Any) -> None:
    """Insert the copy before its first read, and redirect all reads to it; raises `Refused` and changes no value."""
    emit = NodeBuilder(graph, fake_mode, copy.first)
    for node in copy.moved:
        if copy.first < node:  # it has not yet moved before an even earlier copy
            copy.first.prepend(node)
    elements: dict[int, Node] = {}
    with emit.before(copy.first):
        host, starts = _copied(emit, copy.tensors)
        for read in copy.reads:
            place = starts[read.tensor] + read.place
            if place not in elements:
                with graph.inserting_before(read.node):
                    elements[place] = emit(operator.getitem, (host, place))
    numbers: dict[int, Node] = {}
    for read in copy.reads:
        place, asked = starts[read.tensor] + read.place, read.node.all_input_nodes
        number = numbers.setdefault(place, read.node)
        if number is read.node:
            number.args = (elements[place],)
        else:
            declare_equal(number.meta["example_value"], read.node.meta["example_value"])
            read.node.replace_all_uses_with(number)
            graph.erase_node(read.node)
        erase_unused(asked, functools.partial(operator.is_not, read.tensor))


def _copied(emit: NodeBuilder, tensors: list[Node]) -> tuple[Node, dict[Node, int]]:
    """One tensor on the host with the elements of all tensors, and the place where each tensor's elements begin."""
    parts, starts, end = [], dict[Node, int](), 0
    several = len({node.meta["example_value"].dtype for node in tensors}) > 1
    for node in tensors:
        example = node.meta["example_value"]
        part = emit("detach", (node,)) if example.requires_grad else node
        if several and example.dtype is not torch.int64:
            part = emit("to", (part, torch.int64))
        parts.append(emit("reshape", (part, -1)) if example.ndim != 1 else part)
        starts[node], end = end, end + example.numel()
    joined = emit(torch.cat, (parts,)) if len(parts) > 1 else parts[0]
    return emit("to", (joined, "cpu")), starts
