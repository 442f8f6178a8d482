"""Split the top-k of few long rows into two stages.

Before, over all scores of an image's queries and classes:

    values, indices = torch.topk(scores, 100)                              # [2, 81900]

After:

    values, indices = torch.ops.fxpasses.split_topk(scores, 100, -1, True, True)

*Find* the calls of `topk`, *check* that the operator computes the same, and that it would be faster for the sizes at
hand (`topk/blocks.py` checks this again for the sizes of each call), and *replace*. PyTorch does not promise which of
equal values wins, and here another may win; hence the option `fastpack.topk`.
"""

from __future__ import annotations

import math
import operator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.calls import OperatorCall, operator_of
from fxpasses.graph.provenance import where
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import hint_of, is_symbolic, is_unbacked, sizes_of
from fxpasses.passes.pipeline import Context
from fxpasses.report import Reason, Report
from fxpasses.topk.blocks import DEVICES, DTYPES, block_length, lies_along

_SPLIT = torch.ops.fxpasses.split_topk.default
_PARAMETERS = ("input", "k", "dim", "largest", "sorted")


class SplitTopk:
    """The pass."""

    name = "split_topk"
    exact = False  # equal values may have other indices

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        if context.options.topk == "off":
            return report
        regions = list(Region(gm).walk())
        transformed = any(_enters_transform(node) for region in regions for node in region.gm.graph.nodes)
        for region in regions:
            for node in list(region.gm.graph.nodes):
                if operator_of(node) != "topk":
                    continue
                try:
                    if transformed:
                        raise Refused(Reason.HIGHER_ORDER, "the graph has function transforms, such as vmap")
                    sizes = _check(node)
                    context.check_may_change(node)
                    place = where(node)
                    _replace(region, node, context)
                except Refused as refused:
                    report.refusals.append(refused.of(node))
                    continue
                report.changes.append(f"top-k of {sizes} at {place} → in two stages")
                report.changed = True
        if report.changed:
            count = len(report.changes)
            report.figures = {"topk": count}
            report.summary = f"{count} top-k{'s' * (count > 1)} of long rows in two stages"
        return report


def _enters_transform(node: Node) -> bool:
    return getattr(node.target, "__name__", "").endswith("increment_nesting")


def _check(node: Node) -> list[int]:
    """The operand's traced sizes; raises `Refused` if the operator is not known to do the same, or to be faster."""
    call = OperatorCall.of(node)
    if not call.has_only(*_PARAMETERS) or any(user.target is not operator.getitem for user in node.users):
        raise Refused(Reason.UNKNOWN_OPERATOR, "it has further arguments, or is used as a whole")
    tensor = call.argument("input")
    fake = tensor.meta.get("example_value") if isinstance(tensor, Node) else None
    if type(fake) is not FakeTensor:
        raise Refused(Reason.UNSUPPORTED_VALUE, "it is no plain tensor")
    if fake.device.type not in DEVICES:
        raise Refused(Reason.NOT_MEASURED, f"on {fake.device.type}")
    if fake.dtype not in DTYPES:
        raise Refused(Reason.NOT_MEASURED, f"for {fake.dtype}")
    k = call.argument("k")
    k = k.meta["example_value"] if isinstance(k, Node) else k
    dim = call.argument("dim", -1)
    sizes = sizes_of(fake)
    if sizes is None or (is_symbolic(k) and is_unbacked(k)):
        raise Refused(Reason.UNKNOWN_SIZE)
    if not sizes or not isinstance(dim, int) or not sizes[dim]:
        raise Refused(Reason.SMALL)
    columns, largest = sizes[dim], bool(call.argument("largest", True))
    faster = block_length(math.prod(sizes) // columns, columns, hint_of(k), fake.dtype, largest)
    if not faster or not lies_along(fake, dim):
        raise Refused(Reason.NO_GAIN, f"top {hint_of(k)} of {sizes} along {dim}")
    return sizes


def _replace(region: Region, node: Node, context: Context) -> None:
    call = OperatorCall.of(node)
    defaults = {"dim": -1, "largest": True, "sorted": True}
    arguments = tuple(call.argument(name, defaults.get(name)) for name in _PARAMETERS)
    build = NodeBuilder(region.gm.graph, context.fake_mode, node)
    with build.before(node):
        split = build(_SPLIT, arguments)
    node.replace_all_uses_with(split)
    region.gm.graph.erase_node(node)
