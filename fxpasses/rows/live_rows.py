"""Compute only the tokens of a batch that can reach the loss.

Before, padding and prompts go through every product, though no loss reads them:

    h: "f32[8, 384, 512]" = embedding(ids, table)
    a = scaled_dot_product_attention(q, k, v, attn_mask = mask)
    loss = cross_entropy(logits.view(-1, 32000), target, ignore_index = -100)

After, the batch is one sequence of the needed rows, which the prologue finds from the mask and the labels:

    rows = fxpasses.live_rows(target != -100);  seen = fxpasses.live_rows(attended_rows(target != -100, [mask]))
    h: "f32[1, u0, 512]" = embedding(ids.view(-1)[seen][None], table)
    a = fxpasses.sparse_attention(q, k, v, None, plan_of_rows(mask, seen, seen))
    loss = cross_entropy(logits.view(u1, 32000), target[rows], ignore_index = -100)

*Find* the dimensions that are rows (`layout.py`), *demand* rows backwards from the exits (`demand.py`), *rewrite*.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch.fx import GraphModule, Node

from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.calls import operator_of
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region
from fxpasses.graph.values import Tensor
from fxpasses.metadata.closure import find_closure
from fxpasses.metadata.mask_indices import index_by_positions
from fxpasses.options import Options
from fxpasses.passes.pipeline import Context
from fxpasses.report import Reason, Refusal, Report
from fxpasses.rows import choice
from fxpasses.rows.layout import Layout, find_layout
from fxpasses.rows.rewrite import Rewrite


class LiveRows:
    """The pass. biases: whether additive masks have other values than 0 and the least, as ALiBi's."""

    name = "live_rows"
    exact = False

    def __init__(self, biases: bool = False) -> None:
        self.biases = biases

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        if context.options.rows == "all":
            return report
        main = Region(gm)
        _simplify(main, context.fake_mode)
        banned = {node: Refusal(node.name, Reason.INPUT_WRITTEN) for node in context.shared_inputs}
        closure = find_closure(main, context.fake_mode, banned)
        if index_by_positions(main, closure, context.fake_mode, lambda _: True):
            closure = find_closure(main, context.fake_mode, banned)
        values = closure.values
        known = {node for node, value in values.items() if isinstance(value, Tensor)}
        try:
            may_drop = context.options.lowering == "inductor" and not inductor_config.fallback_random
            layout = find_layout(main, known.__contains__, may_drop, self.biases)
            if layout is None:
                return report
            _check_devices(layout, context.options)
            for node, whole in layout.takes_all.items():
                report.refusals.append(whole.why.of(node))
            rewrite = Rewrite(main, layout, values, context.fake_mode)
            if not 1 - choice.MOST_LIVE <= rewrite.part > 0:
                return report
            context.check_may_change(next(iter(layout.exits)))
            rewrite.run()
        except Refused as refused:
            report.refusals.append(refused.of(refused.node or next(iter(gm.graph.nodes))))
            return report
        report.changed = True
        sets, attentions = len(rewrite.packings), len(layout.attentions)
        report.figures = {"sets": sets, "attentions": attentions}
        report.summary = f"only rows that can reach the loss, in {sets} set{'s' * (sets > 1)}"
        report.changes = [report.summary]
        return report


def _check_devices(layout: Layout, options: Options) -> None:
    """Raise `Refused` if tokens are on a device where packing is not wanted, or would be recorded in a CUDA graph."""
    for space in layout.spaces.values():
        ids = space.root.ids
        if ids is not None and ids.meta["example_value"].device.type != "cpu":
            if options.rows != "live":
                device = ids.meta["example_value"].device
                raise Refused(Reason.NOT_MEASURED, f'on {device} only with "fastpack.rows": "live"', ids)
            if options.takes_whole_graphs:  # these would record one for each number of rows
                raise Refused(Reason.WHOLE_GRAPH, "", ids)


def _simplify(main: Region, fake_mode: Any) -> None:
    """Respell calls that depend on less than they name: `mask.type_as(x)`, `mask.expand_as(x)`, `cat([empty, x])`."""
    for region in main.walk():
        for node in list(region.gm.graph.nodes):
            if node.op.startswith("call") and isinstance(node.meta.get("example_value"), torch.Tensor):
                with region.gm.graph.inserting_before(node):
                    simpler = _simpler(node, NodeBuilder(region.gm.graph, fake_mode, node))
                if simpler is not None:
                    node.replace_all_uses_with(simpler)
                    region.gm.graph.erase_node(node)


def _is_empty(node: Node) -> bool:
    """Whether a tensor is known to be empty. Does not ask about symbols, which would add guards."""
    return any(isinstance(size, int) and size == 0 for size in node.meta["example_value"].shape)


def _simpler(node: Node, emit: NodeBuilder) -> Node | None:
    name, example, first = operator_of(node), node.meta["example_value"], node.args[0] if node.args else None
    if name == "type_as" and isinstance(first, Node):
        return emit("to", (first, example.dtype))
    if name == "expand_as" and isinstance(first, Node) and all(isinstance(size, int) for size in example.shape):
        return emit("expand", (first, *example.shape))
    if name == "cat" and isinstance(first, (tuple, list)) and all(isinstance(part, Node) for part in first):
        full = [part for part in first if not _is_empty(part)]  # without a cache that is still empty
        if len(full) == 1 and full[0].meta["example_value"].dtype is example.dtype:
            return emit("clone", (full[0],))
    return None
