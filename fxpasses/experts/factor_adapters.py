"""Apply an adapter of experts to the rows, and not to the weights.

Before, LoRA on the weights of experts makes them all, and backward makes the gradient of each, before it is multiplied
down to the adapter's rank:

    weights: "f32[8, 96, 64]" = baddbmm(w, b, a, alpha = 2.0)                  # b: [8, 96, 4], a: [8, 4, 64]
    y: "f32[192, 96]" = fxpasses.grouped_mm(rows, weights, offsets, None, True)

After:

    low: "f32[192, 4]" = fxpasses.grouped_mm(rows, a, offsets, None, True)
    y = fxpasses.grouped_mm(rows, w, offsets, None, True)
    y = y.add(fxpasses.grouped_mm(low, b, offsets, None, True), alpha = 2.0)

*Find* sums of a weight and a product that only products of rows read, *check* that the weight is frozen (its gradient
would be the same product again) and the rank small, and *replace*. Sums are rounded otherwise: hence the option
`fastpack.adapters`. The idea is LoRA's own (Hu et al., 2021, https://arxiv.org/abs/2106.09685).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fxpasses.experts.runtime.grouped_linear  # noqa: F401 - defines the operators
from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.calls import OperatorCall, operator_of
from fxpasses.graph.modes import autocast_regions
from fxpasses.graph.provenance import where
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region
from fxpasses.passes.pipeline import Context
from fxpasses.report import Reason, Report

_GROUPED, _COVERING = torch.ops.fxpasses.grouped_mm.default, torch.ops.fxpasses.grouped_mm_covering.default
_ARGUMENTS: dict[Any, int] = {_GROUPED: 5, _COVERING: 4}  # the last one says whether weights are transposed


class FactorAdapters:
    """The pass."""

    name = "factor_adapters"
    exact = False  # sums are rounded otherwise

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        if context.options.adapters == "merged":
            return report
        saved = 0
        for region in Region(gm).walk():
            for node in [each for each in region.gm.graph.nodes if operator_of(each) == "baddbmm"]:
                try:
                    adapter = _found(node)
                    context.check_may_change(node)
                    _replace(region, adapter, context)
                except Refused as refused:
                    report.refusals.append(refused.of(node))
                    continue
                example = node.meta["example_value"]
                saved += example.numel() * example.element_size()
                sizes = [int(size) for size in example.shape]
                report.changes.append(f"an adapter of {sizes} at {where(node)} → of the rows, at rank {adapter.rank}")
                report.changed = True
        if report.changed:
            count = len(report.changes)
            report.figures = {"adapters": count, "weight_bytes": saved}
            report.summary = f"{count} adapter{'s' * (count > 1)} of experts applied to the rows"
        return report


@dataclass(frozen=True)
class _Adapter:
    """`weight + scale * left @ right`: [E, A, B], [E, A, r] and [E, r, B]. products: those of rows that read it."""

    node: Node
    weight: Node
    left: Node
    right: Node
    scale: Any
    products: list[Node]

    @property
    def rank(self) -> int:
        return int(self.left.meta["example_value"].shape[-1])


def _found(node: Node) -> _Adapter:
    """The adapter that a `baddbmm` is; raises `Refused`."""
    call = OperatorCall.of(node)
    weight, left, right = (call.argument(name) for name in ("input", "batch1", "batch2"))
    beta, scale = call.argument("beta", 1), call.argument("alpha", 1)
    if not call.has_only("input", "batch1", "batch2", "beta", "alpha") or beta != 1 or isinstance(scale, Node):
        raise Refused(Reason.UNKNOWN_OPERATOR, "it is scaled otherwise")
    products = list(node.users)
    for user in products:
        is_product = len(user.args) == _ARGUMENTS.get(user.target) and user.args[1] is node and not user.kwargs
        if not is_product or user.args.count(node) != 1:
            raise Refused(Reason.WEIGHTS_USED, f"`{operator_of(user)}` reads the adapted weights")
    sizes = [node.meta["example_value"].shape, *(each.meta["example_value"].shape for each in (weight, left))]
    if any(not isinstance(size, int) for shape in sizes for size in shape) or sizes[0] != sizes[1]:
        raise Refused(Reason.UNKNOWN_SIZE)
    if weight.meta["example_value"].requires_grad:
        raise Refused(Reason.NO_GAIN, "the weights are trained as well")
    _, first, second = sizes[0]
    rank = sizes[2][-1]
    if 3 * rank * (first + second) > first * second:  # three further products, for that of the weights' gradient
        raise Refused(Reason.NO_GAIN, f"rank {rank} of {first} × {second}")
    return _Adapter(node, weight, left, right, scale, products)


def _replace(region: Region, adapter: _Adapter, context: Context) -> None:
    graph = region.gm.graph
    regions = autocast_regions(graph, region.autocast)
    for product in adapter.products:
        emit = NodeBuilder(graph, context.fake_mode, product, autocast=regions[product])
        rows, _, offsets, *rest = product.args
        without_bias = (None, rest[-1]) if product.target is _GROUPED else (rest[-1],)
        down, up = (adapter.right, adapter.left) if rest[-1] else (adapter.left, adapter.right)
        with emit.before(product):
            whole = emit(product.target, (rows, adapter.weight, offsets, *rest))
            low = emit(product.target, (rows, down, offsets, *without_bias))
            added = emit(product.target, (low, up, offsets, *without_bias))
            found = emit("add", (whole, added), {"alpha": adapter.scale})
        product.replace_all_uses_with(found)
        graph.erase_node(product)
    graph.erase_node(adapter.node)
    region.gm.recompile()
