"""Compile a layer that occurs L times only once.

Before, with the weights of each layer:

    h_1 = gelu(linear(h_0, w_0))
    h_2 = gelu(linear(h_1, w_1))
    ...

After, with the body `layer_0(h, w): return (gelu(linear(h, w)),)`:

    h_1 = call_layer(layer_0, h_0, w_0)[0]
    h_2 = call_layer(layer_0, h_1, w_1)[0]
    ...

*Find* the kinds of equal segments (`fold/repetition.py`), *check* that each can be compiled by itself, and *outline*
them. The lowering compiles each body once, and the nodes between the calls (`compiler/lowering_segments.py`). This pass
is the last one: other passes remove differences between layers, and do not look into the bodies.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxpasses.base.units import amount
from fxpasses.fold import policies
from fxpasses.fold.legality import Legality
from fxpasses.fold.outlining import call_layer, checked_here, outline
from fxpasses.fold.repetition import Kind, calls, kinds
from fxpasses.fold.segments import Segment, is_reference, with_bodies
from fxpasses.fold.unrolling import unrolled
from fxpasses.graph.calls import operator_of
from fxpasses.graph.collectives import communicates
from fxpasses.graph.flops import flops_of, has_formula
from fxpasses.graph.modes import Mode
from fxpasses.graph.provenance import where
from fxpasses.graph.refusals import Refused
from fxpasses.graph.symbols import batch_sizes_of
from fxpasses.graph.traits import VIEWS
from fxpasses.options import FOLD_LEAST, Options
from fxpasses.passes.pipeline import Context
from fxpasses.report import Reason, Report

_CALLS = ("call_function", "call_method", "call_module")
# A body that is one product, such as a projection to queries or keys, has no kernel to compile: nine such bodies made
# the step of a BERT of three layers 1.2 times as long (bench case `mlperf`). A residual MLP has six calls.
_LEAST_COMPUTED = 5
# A call of a body costs 0.1 to 0.5 ms, forward and backward, on the CPU that was measured, and host time on any. Steps
# took 1.12 times as long with residual blocks of 5e7 operations (a small MiniGo), 1.03 to 1.08 with layers of 2e8 (a
# mixture of hidden size 128), and 1.00 to 1.04 with layers of 4e8 (Llama and Qwen3 of hidden size 128). For devices the
# limit is the work of 0.1 ms at 100 Tflop/s; it was not measured.
_LEAST_FLOPS, _LEAST_FLOPS_ON_DEVICES = 700_000_000, 10_000_000_000


@dataclass(frozen=True)
class Body:
    """A body to compile once: a kind of segments, and the number of layers in each segment."""

    kind: Kind
    layers: int


class FoldLayers:
    """The pass."""

    name = "fold_layers"
    exact = True

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        options = context.options
        if not options.folds:
            return report
        least = FOLD_LEAST[options.fold]
        found = [kind for kind in kinds(gm, least) if _is_heavy(gm, kind[0])]
        report.refusals += policies.refusals(gm, least)
        if not found:
            _refuse_the_only_one(gm, options, report)
            return report
        try:
            _check_options(options)
            if communicates(gm):
                raise Refused(Reason.COLLECTIVE, "the graph communicates with other ranks")
            legality = Legality(gm, context)
            folded = _legal(gm, found, legality, context, report)
            legality.check_rest(body.kind for body in folded)
        except Refused as refused:
            report.refusals.append(refused.of(found[0][0].first))
            return report
        if folded:
            rewriter = _Rewriter(gm, legality.modes)
            for number, body in enumerate(folded):
                report.changes.append(_change(body))
                rewriter.fold(body.kind, f"layer_{number}")
            pieces = sum(len(body.kind) for body in folded)
            layers = sum(len(body.kind) * body.layers for body in folded)
            report.changed = True
            report.summary = f"{layers} layers are compiled as {sum(body.layers for body in folded)}"
            report.figures = {"layers": layers, "kinds": len(folded), "pieces": pieces}
        return report


def _refuse_the_only_one(gm: GraphModule, options: Options, report: Report) -> None:
    """Report why nothing is folded if the user asked for folding: each layer may be compiled by itself (FSDP2)."""
    heavy = next((node for node in calls(gm) if has_formula(node)), None)
    if options.fold == "on" and heavy is not None and not report.refusals:
        text = "no layers are equal; those that are compiled one by one have a graph each"
        report.refusals.append(Refused(Reason.STANDS_ONCE, text).of(heavy))


def _legal(gm: GraphModule, found: list[Kind], legality: Legality, context: Context, report: Report) -> list[Body]:
    """The bodies that may be folded; `report` gets the reasons against other segments."""
    folded = []
    members = {node: kind for kind in found for segment in kind for node in segment.nodes}
    for kind in found:
        try:
            others = {node for node, other in members.items() if other is not kind}
            sized, layers = _large_enough(gm, kind, context.options, others)
            legal = legality.legal(sized, report)
            if len(legal) >= FOLD_LEAST[context.options.fold]:
                context.check_may_change(legal[0].first)
                folded.append(Body(legal, layers))
        except Refused as refused:
            report.refusals.append(refused.of(kind[0].first))
    return folded


def _large_enough(gm: GraphModule, kind: Kind, options: Options, others: Collection[Node]) -> tuple[Kind, int]:
    """A kind, and the number of layers per segment: under "auto", enough for a call from Python to cost little.

    Raises `Refused` if there are too few layers for that, or if folding saves next to no compilation.
    """
    if options.fold != "auto":
        return kind, 1
    nodes = [node for node in with_bodies(gm, kind[0].nodes) if node.op in _CALLS]
    computed = sum(operator_of(node) not in VIEWS for node in nodes)
    if computed < _LEAST_COMPUTED:
        raise Refused(Reason.SMALL, f'{computed} calls that compute anything; "auto" folds from {_LEAST_COMPUTED} on')
    devices = {leaf.device.type for node in nodes for leaf in _results(node) if isinstance(leaf, torch.Tensor)}
    flops = [flops_of(node, _results(node), batch_sizes_of) for node in nodes if has_formula(node)]
    known, least = sum(filter(None, flops)), _least_flops(devices)
    if known >= least:
        return kind, 1
    several, layers = unrolled(gm, kind, math.ceil(least / max(known, 1)), FOLD_LEAST[options.fold], others)
    if not several:
        unknown = f", besides those of {flops.count(None)} calls that are not known" if None in flops else ""
        text = f"its forward takes {amount(known)} floating-point operations{unknown}; "
        raise Refused(Reason.SMALL, f'{text}"auto" folds from {amount(least)} on, as calls of small layers cost time')
    return several, layers


def _least_flops(devices: Collection[str]) -> int:
    """The operations of a body's forward at which a call from Python, with its backward, takes 2 % of the time."""
    return _LEAST_FLOPS if devices == {"cpu"} else _LEAST_FLOPS_ON_DEVICES


def _results(node: Node) -> list[Any]:
    return list(pytree.tree_leaves(node.meta.get("example_value")))


def _check_options(options: Options) -> None:
    """Raise `Refused` if "auto" does not fold on this torch, or if other options need the graph of all layers."""
    if options.fold == "auto" and not checked_here():
        raise Refused(Reason.UNCHECKED_TORCH, f'{torch.__version__}; fastpack.fold "on" folds nevertheless')
    moves = options.offloads
    if moves and options.offload.device_budget is not None:
        raise Refused(Reason.BUDGETED, f"fastpack.offload.device_budget is {options.offload.device_budget}")
    if options.takes_whole_graphs:
        raise Refused(Reason.WHOLE_GRAPH)


def _is_heavy(gm: GraphModule, segment: Segment) -> bool:
    """Whether a segment has matrix products or the like, compared with which a call from Python may be cheap."""
    nodes = with_bodies(gm, segment.nodes)
    return any(has_formula(node) or "fxpasses" in str(node.target) for node in nodes)


def _change(body: Body) -> str:
    segment = body.kind[0]
    several = f", {body.layers} layers each" if body.layers > 1 else ""
    text = f"{len(segment.nodes)} calls ×{len(body.kind)}{several}"
    return f"{segment.first.name} at {where(segment.first)}: {text} → one body"


class _Rewriter:
    """Replaces segments by calls of their kind's body."""

    def __init__(self, gm: GraphModule, modes_of: dict[Node, Mode]) -> None:
        self.gm, self.modes = gm, modes_of
        self.replaced: dict[Node, Node] = {}  # live-outs by the results of calls

    def fold(self, kind: Kind, name: str) -> None:
        first = kind[0]
        live = sorted({segment.nodes.index(node) for segment in kind for node in segment.live_outs})
        results = [first.nodes[place] for place in live]
        operands = [self._now(operand) for operand in first.operands]
        body = outline(self.gm, first.nodes, operands, results, self.modes[first.first], name)
        setattr(self.gm, name, body)
        with self.gm.graph.inserting_before(first.first):
            reference = self.gm.graph.get_attr(name)
        for segment in kind:
            self._replace(segment, reference, live)

    def _now(self, operand: Node) -> Node:
        return self.replaced.get(operand, operand)

    def _replace(self, segment: Segment, reference: Node, live: list[int]) -> None:
        graph = self.gm.graph
        results = [segment.nodes[place] for place in live]
        inside = set(segment.nodes)
        references = {o for node in inside for o in node.all_input_nodes if is_reference(self.gm, o)}
        with graph.inserting_before(segment.first):
            call = graph.call_function(call_layer, (reference, *map(self._now, segment.operands)))
            call.meta = {key: segment.first.meta[key] for key in _PROVENANCE if key in segment.first.meta}
            call.meta["example_value"] = tuple(node.meta.get("example_value") for node in results)
            for position, node in enumerate(results):
                if node in segment.live_outs:
                    result = self.replaced[node] = graph.call_function(operator.getitem, (call, position))
                    result.meta = dict(node.meta)
                    node.replace_all_uses_with(result, lambda user: user not in inside)
        for node in reversed(segment.nodes):
            graph.erase_node(node)
        for node in references:
            if not node.users:
                graph.erase_node(node)


_PROVENANCE = ("stack_trace", "nn_module_stack")
