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

In eager mode the recomputation repeats the write. In compiled code the recomputation begins with the input of before,
to which the end of the forward pass has written by then, and backward raises "modified by an inplace operation".
A write that gives the same result when repeated can as well be made once, before the checkpoint, whose input is then
the written value. *Find* the writes to inputs of the graph in checkpoints, *check* that the write is idempotent, that
its checkpoint reads nothing of that memory before, and that nobody else writes to it in another way, and *move* it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from fxpasses.graph.aliases import storages, written_operands
from fxpasses.graph.calls import is_in_place, operator_of
from fxpasses.graph.provenance import where
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import CHECKPOINT, Region
from fxpasses.pipeline import Context
from fxpasses.report import Reason, Report

# f(f(x)) = f(x), with constants for all other arguments.
_IDEMPOTENT = frozenset(
    {"abs_", "ceil_", "clamp_", "clamp_max_", "clamp_min_", "fill_", "floor_", "nan_to_num_", "relu_", "sign_",
     "tril_", "triu_", "trunc_", "zero_"}
)  # fmt: skip
_SAME_MEMORY = ("_get_data_attr", "data", "detach")  # the first is what Dynamo makes of `.data`


@dataclass(eq=False)
class _Write:
    """A write to an input of the graph in a checkpoint.

    views: the nodes from the written tensor to the placeholder, exclusive.
    """

    region: Region
    node: Node
    views: list[Node]
    placeholder: Node

    @property
    def effect(self) -> tuple[Any, ...]:
        return operator_of(self.node), self.node.args[1:], dict(self.node.kwargs)


class HoistWrites:
    """The pass."""

    name = "hoist_writes"
    exact = True

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        regions = list(Region(gm).walk())
        for region in regions:  # innermost first: what leaves one checkpoint may leave the next
            for write in list(_writes_to_inputs(region)):
                try:
                    _check(write, regions)
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
        if not is_in_place(operator_of(node)) or not node.args or not isinstance(node.args[0], Node):
            continue
        views, written = [], node.args[0]
        while operator_of(written) in _SAME_MEMORY and isinstance(written.args[0], Node):
            views.append(written)
            written = written.args[0]
        operand = region.operands.get(written)
        if isinstance(operand, Node) and operand.op in ("placeholder", "get_attr"):
            yield _Write(region, node, views, written)


def _check(write: _Write, regions: Sequence[Region]) -> None:
    """Raise `Refused` unless nobody can tell the write from one before the checkpoint."""
    region, node, placeholder = write.region, write.node, write.placeholder
    if operator_of(node) not in _IDEMPOTENT or len(node.all_input_nodes) > 1:
        raise Refused(Reason.UNKNOWN_OPERATOR, f"`{operator_of(node)}` is not known to be idempotent")
    fake = placeholder.meta.get("example_value")
    if type(fake) is not FakeTensor and not isinstance(fake, torch.nn.Parameter):
        raise Refused(Reason.UNSUPPORTED_VALUE, "it is no plain tensor")
    if not write.views and fake.requires_grad and not _is_without_gradients(node):
        raise Refused(Reason.ACTIVATION, "autograd may record the write")
    memory = set(storages(placeholder))
    if not memory or any(memory.intersection(storages(p)) for p in region.placeholders() if p is not placeholder):
        raise Refused(Reason.SHARED_MEMORY)
    own = {*write.views, node}
    for earlier in region.gm.graph.nodes:
        if earlier is node:
            break
        if earlier not in own and any(memory.intersection(storages(operand)) for operand in earlier.all_input_nodes):
            raise Refused(Reason.READ_BEFORE_WRITE, f"by `{earlier.name}`")
    for other in regions:
        for writer in other.gm.graph.nodes:
            if writer.target is not CHECKPOINT and writer is not node and _writes(writer, other, memory):
                if not _has_effect(writer, write.effect):
                    raise Refused(Reason.WRITTEN_BY_LAYER, f"`{writer.name}` writes to it as well", writer)


def _writes(node: Node, region: Region, memory: set[int]) -> bool:
    return any(memory.intersection(storages(operand)) for operand in written_operands(node, region.gm))


def _has_effect(node: Node, effect: tuple[Any, ...]) -> bool:
    return (operator_of(node), node.args[1:], dict(node.kwargs)) == effect


def _is_without_gradients(node: Node) -> bool:
    """Whether the body has switched gradients off before the node."""
    modes = (earlier for earlier in _before(node) if operator_of(earlier) == "_set_grad_enabled")
    return next((not earlier.args[0] for earlier in modes), False)


def _before(node: Node) -> Iterator[Node]:
    while node.prev.op != "root":
        node = node.prev
        yield node


def _move(write: _Write) -> None:
    region, node = write.region, write.node
    assert region.parent is not None and region.call is not None
    outer = region.parent.gm.graph
    with outer.inserting_before(region.call):
        made = region.operands[write.placeholder]
        if not write.views and made.meta["example_value"].requires_grad:
            fake = made.meta["example_value"].detach()
            made = outer.call_method("detach", (made,))  # for the gradients that the body has switched off
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
