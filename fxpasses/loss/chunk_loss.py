"""Compute a loss from its logits in chunks of rows, and their gradients with it.

Before, the logits, their copies and their gradient are the largest tensors of a step:

    logits: "f32[3072, 32000]" = linear(h, weight)
    loss = cross_entropy(logits.float(), target)

After, only a chunk of them exists at a time:

    losses = fxpasses.loss_of_rows(program, [h], [weight], [target], [], [counts], False)
    loss = losses[0]

*Find* products whose results are read row by row, until only a few numbers of each row are left (`region.py`,
`forms.py`), *write* the operators between as a program of rows, and *find* the weight of each of these numbers in the
loss (`tail.py`). If the weights are known in forward, the gradients are computed there, from logits that are then
discarded; otherwise backward computes the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxpasses.base.units import size
from fxpasses.graph.reachability import reached
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import batch_sizes_of
from fxpasses.loss.region import LossRegion, candidates, find_regions
from fxpasses.loss.rewrite import Rewrite
from fxpasses.loss.spelling import spell_out
from fxpasses.passes.pipeline import Context
from fxpasses.report import Reason, Report


class ChunkLoss:
    """The pass."""

    name = "chunk_loss"
    exact = False  # sums are added in another order

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        main = Region(gm)
        products = candidates(gm.graph)
        if not products or context.options.loss == "full":
            return report
        depending = reached(products, lambda node: node.users).keys()
        least = min(int(node.meta["example_value"].shape[-1]) for node in products)
        try:
            spell_out(main, context.fake_mode, depending, least)
        except Refused as refused:  # an unknown mode of the process, or a function transform
            report.refusals.append(refused.of(next(iter(products))))
            return report
        columns = rows = saved = 0
        for region in find_regions(main, products):
            first = region.products[0].node
            try:
                if region.trouble is not None:
                    raise region.trouble
                device = first.meta["example_value"].device
                if device.type != "cpu" and context.options.loss != "chunks":
                    raise Refused(Reason.NOT_MEASURED, f'on {device} only with "fastpack.loss": "chunks"', first)
                context.check_may_change(first)
                sizes = [batch_sizes_of(product.node.meta["example_value"]) for product in region.products]
                inductor = dict(context.options.inductor) if context.options.lowering == "inductor" else None
                rewrite = Rewrite(main, region, context.fake_mode, inductor)
                if rewrite.makes_logits_twice and context.options.loss != "chunks":
                    text = 'backward would compute logits again: only with "fastpack.loss": "chunks"'
                    raise Refused(Reason.NO_GAIN, text, first)
                rewrite.run()
            except Refused as refused:
                if not _is_of_features(region):
                    report.refusals.append(refused.of(first))
                continue
            report.changed = True
            own = int(first.meta["example_value"].shape[-1])
            count = len(region.products)
            report.changes.append(f"{count} product{'s' * (count > 1)} with {own:,} columns → in chunks of rows")
            columns = max(columns, own)
            if all(found is not None for found in sizes):
                rows += torch.Size(sizes[0][:-1]).numel()  # type: ignore[index]
                saved += sum(_bytes(region.products[at].node, found) for at, found in enumerate(sizes))
        if report.changed:
            report.figures = {"columns": columns, "rows": rows, "logits_bytes": saved}
            how_many = f"{rows:,} × {columns:,} logits ({size(saved)})" if rows else f"logits of {columns:,} columns"
            report.summary = f"{how_many} never stand in full"
        return report


def _bytes(node: Node, sizes: Any) -> int:
    return torch.Size(sizes).numel() * int(node.meta["example_value"].element_size())


def _is_of_features(region: LossRegion) -> bool:
    """Whether a region's product only makes features, such as those inside an MLP, and no logits."""
    return region.trouble is not None and not any(
        form.columns is None or form.columns < 64 for node, form in region.forms.items() if not isinstance(form, tuple)
    )
