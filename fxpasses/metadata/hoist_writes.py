"""Move idempotent writes to inputs out of checkpoints.

Before, as Gemma 3n clamps a weight in each layer:

    def body(w, x):
        w.data.clamp_(-1, 1)
        return torch.tanh(x @ w)

    y = tag_activation_checkpoint(body, w, x)

After:

    def body(w, x):
        return torch.tanh(x @ w)

    w.data.clamp_(-1, 1)
    y = tag_activation_checkpoint(body, w, x)

In eager mode the recomputation repeats the write. In compiled code the recomputation begins with the original input, to
which the end of the forward pass has written by then, and backward raises "modified by an inplace operation".
A write that gives the same result when repeated can also be made once, before the checkpoint, whose input is then the
written value. *Find* the writes to inputs of the graph in checkpoints; *check* that the write is idempotent, that no
checkpoint reads the memory before it, and that the graph, which has to be the whole program given to `torch.compile`,
does not write to the memory in another way; and *move* the write. If other code writes to the memory between forward
and backward, the recomputation does not see it: it has the values of forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from fxpasses.graph.aliases import AliasAnalysis, storages
from fxpasses.graph.calls import argument, is_in_place, operator_of
from fxpasses.graph.provenance import where
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import CHECKPOINT, Region
from fxpasses.metadata.checkpoint_writes import is_idempotent
from fxpasses.passes.pipeline import Context
from fxpasses.report import Reason, Report

_SAME_MEMORY = ("_get_data_attr", "data", "detach")  # the first is Dynamo's operator for `.data`


@dataclass(eq=False)
class _Write:
    """A write to an input of the graph in a checkpoint.

    views: the nodes from the written tensor to the placeholder, exclusive.
    """

    region: Region
    node: Node
    views: list[Node]
    placeholder: Node


class HoistWrites:
    """The pass."""

    name = "hoist_writes"
    exact = True

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        regions = list(Region(gm).walk())  # innermost first: a write that leaves one checkpoint may leave the next
        if not any(True for region in regions for _ in _writes_to_inputs(region)):
            return report
        analyses = {region: context.aliases(region.gm.graph, region.autocast) for region in regions}
        for region in regions:
            for write in list(_writes_to_inputs(region)):
                try:
                    if not context.is_whole:
                        raise Refused(Reason.INPUT_WRITTEN, "and the graph is not known to be all of the program")
                    _check(write, analyses)
                    context.check_may_change(write.node)
                except Refused as refused:
                    report.refusals.append(refused.of(write.node))
                    continue
                report.changes.append(f"`{write.node.name}` at {where(write.node)} → before its checkpoint")
                report.changed = True
                _move(write)
        if report.changed:
            count = len(report.changes)
            report.figures = {"writes": count}
            report.summary = f"{count} idempotent write{'s' * (count > 1)} before {'their' if count > 1 else 'its'} "
            report.summary += f"checkpoint{'s' * (count > 1)}"
        return report


def _writes_to_inputs(region: Region) -> Iterator[_Write]:
    for node in region.gm.graph.nodes if region.parent is not None else ():
        if is_in_place(operator_of(node)) and (write := _write(region, node)) is not None:
            operand = region.operands[write.placeholder]
            if isinstance(operand, Node) and operand.op in ("placeholder", "get_attr"):
                yield write


def _write(region: Region, node: Node) -> _Write | None:
    """A node as a write to the whole of a placeholder; None if it is not such a write."""
    views: list[Node] = []
    written = node.args[0] if node.args else None
    while isinstance(written, Node) and operator_of(written) in _SAME_MEMORY:
        views.append(written)
        written = argument(written, "input", written.args[0] if written.args else None)
    is_input = isinstance(written, Node) and written.op == "placeholder"
    return _Write(region, node, views, written) if is_input else None  # type: ignore[arg-type]


def _check(write: _Write, analyses: Mapping[Region, AliasAnalysis]) -> None:
    """Raise `Refused` unless a write before the checkpoint would make no visible difference."""
    region, node, placeholder = write.region, write.node, write.placeholder
    if not is_idempotent(node):
        raise Refused(Reason.INPUT_WRITTEN, f"and `{operator_of(node)}` is not known to be idempotent")
    fake = placeholder.meta.get("example_value")
    if type(fake) is not FakeTensor and not isinstance(fake, torch.nn.Parameter):
        raise Refused(Reason.INPUT_WRITTEN, "and it is no plain tensor")
    if not write.views and fake.requires_grad and not _is_without_gradients(node):
        raise Refused(Reason.INPUT_WRITTEN, "and autograd may record the write")
    memory = storages(placeholder)
    if any(set(memory).intersection(storages(p)) for p in region.placeholders() if p is not placeholder):
        raise Refused(Reason.INPUT_WRITTEN, "and another operand of the checkpoint shares its memory")
    for earlier in _users(region, analyses[region], _sets(memory, analyses[region])):
        if earlier is node:
            break
        if earlier not in write.views:
            raise Refused(Reason.READ_BEFORE_WRITE, f"by `{earlier.name}`")
    for other, analysis in analyses.items():
        held = _sets(memory, analysis)
        users = [user for user in _users(other, analysis, held) if user is not node and user.target is not CHECKPOINT]
        for user in users:
            if analysis.written_by(user) & held and not _is_same(_write(other, user), write):
                raise Refused(Reason.WRITTEN_BY_LAYER, f"`{user.name}` writes to it as well", user)
        if users and _is_recomputed_before(other, write):
            raise Refused(Reason.READ_BEFORE_WRITE, f"by `{users[0].name}`, in another checkpoint", users[0])


def _sets(memory: list[int], analysis: AliasAnalysis) -> set[int]:
    return {analysis.sets.number(storage) for storage in memory}


def _users(region: Region, analysis: AliasAnalysis, held: set[int]) -> list[Node]:
    """The nodes of a graph with operands in the alias sets `held`, in order."""
    nodes = region.gm.graph.nodes
    return [node for node in nodes if any(analysis.sets.of(operand) & held for operand in node.all_input_nodes)]


def _is_same(other: _Write | None, write: _Write) -> bool:
    """Whether another write does the same to the same elements."""
    return other is not None and _effect(other) == _effect(write)


def _effect(write: _Write) -> tuple[Any, ...]:
    node, fake = write.node, write.placeholder.meta["example_value"]
    layout = fake.dtype, fake.shape, fake.stride(), fake.storage_offset()
    return operator_of(node), node.args[1:], dict(node.kwargs), layout


def _is_recomputed_before(other: Region, write: _Write) -> bool:
    """Whether a checkpoint that uses the memory may run before the memory has the written value.

    In eager mode its recomputation reads the written value; here it would read the old one.
    """
    above, below = _path(other), _path(write.region)
    if len(above) == 1 or above[: len(below)] == below or below[: len(above)] == above:
        return False  # it is the graph itself, or one is inside the other
    root, call, own = above[0], above[1].call, below[1].call
    nodes = list(root.gm.graph.nodes)
    if nodes.index(call) > nodes.index(own):
        return False
    memory = storages(write.placeholder)
    earlier = [node for node in nodes[: nodes.index(call)] if set(memory).intersection(storages(node))]
    return not any(_is_same(_write(root, node), write) for node in earlier)


def _path(region: Region) -> list[Region]:
    """The regions around a region, outermost first, and itself."""
    return [*(_path(region.parent) if region.parent is not None else ()), region]


def _is_without_gradients(node: Node) -> bool:
    """Whether the body has switched gradients off before the node."""
    while node.op != "root" and operator_of(node) != "_set_grad_enabled":
        node = node.prev
    return node.op != "root" and not node.args[0]


def _move(write: _Write) -> None:
    region, node = write.region, write.node
    assert region.parent is not None and region.call is not None
    outer = region.parent.gm.graph
    with outer.inserting_before(region.call):
        made = region.operands[write.placeholder]
        if not write.views and made.meta["example_value"].requires_grad:
            fake = made.meta["example_value"].detach()
            made = outer.call_method("detach", (made,))  # because the body has switched gradients off
            made.meta["example_value"] = fake
        for copied in (*reversed(write.views), node):
            made = outer.node_copy(copied, dict.fromkeys(copied.all_input_nodes, made).__getitem__)
    written = node.args[0]
    assert isinstance(written, Node)
    node.replace_all_uses_with(written)
    for unused in (node, *write.views):
        if not unused.users:
            region.gm.graph.erase_node(unused)
    region.gm.recompile()
