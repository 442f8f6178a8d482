"""Compute only the tokens of a batch that can reach the loss.

Before, padding and prompts go through every product, though no loss reads them:

    h: "f32[8, 384, 512]" = embedding(ids, table)
    a = scaled_dot_product_attention(q, k, v, attn_mask = mask)
    loss = cross_entropy(logits.view(-1, 32000), target, ignore_index = -100)

After, the batch is one sequence of the rows that are needed, which the prologue knows from the mask and the labels:

    rows = fxpasses.live_rows(target != -100);  seen = fxpasses.live_rows(attended_rows(target != -100, [mask]))
    h: "f32[1, u0, 512]" = embedding(ids.view(-1)[seen][None], table)
    a = fxpasses.sparse_attention(q, k, v, None, plan_of_rows(mask, seen, seen))
    loss = cross_entropy(logits.view(u1, 32000), target[rows], ignore_index = -100)

*Find* the dimensions that are rows (`layout.py`), *demand* rows backwards from the exits (`demand.py`), *rewrite*.
"""

from __future__ import annotations

from torch.fx import GraphModule

from fxpasses.graph.closure import find_closure
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region
from fxpasses.graph.values import Tensor
from fxpasses.pipeline import Context
from fxpasses.report import Reason, Refusal, Report
from fxpasses.rows.layout import find_layout
from fxpasses.rows.rewrite import Rewrite


class LiveRows:
    """The pass."""

    name = "live_rows"
    exact = False

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        if context.options.rows == "all" or "hoist_metadata" not in context.options.passes:
            return report
        main = Region(gm)
        banned = {node: Refusal(node.name, Reason.INPUT_WRITTEN) for node in context.shared_inputs}
        values = find_closure(main, context.fake_mode, banned).values
        known = {node for node, value in values.items() if isinstance(value, Tensor)}
        try:
            layout = find_layout(main, known.__contains__, may_drop=context.options.lowering == "inductor")
            if layout is None or not layout.exits:
                return report
            context.check_may_change(next(iter(layout.exits)))
            rewrite = Rewrite(main, layout, values, context.fake_mode)
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
