"""Compute only the part of an attention that the batch's mask allows.

Before, in each layer, inside a checkpoint or not (with a mask of documents, most of the computed pairs are discarded):

    mask = (document[:, None] == document[None]) & causal
    out = scaled_dot_product_attention(q, k, v, attn_mask = mask)

After, with a plan that `hoist_metadata` computes once per batch, because it depends on metadata alone:

    plan = fxpasses.attention_plan(mask)
    out = fxpasses.sparse_attention(q, k, v, mask, plan, scale)

*Find* attention in every spelling (`attention/fused.py`, `attention/unfused.py`), *ask* the metadata analysis
(`metadata/closure.py`) whether its mask is the batch's, *check* legality, and *replace*. Only the batch determines how
much a plan saves: if it is little, the operator runs `scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

import fxpasses.attention.runtime.operators  # noqa: F401  registers the operators
from fxpasses.attention.building import AttentionBuilder
from fxpasses.attention.fused import fused_attention, is_fused_attention
from fxpasses.attention.heads import unrepeated
from fxpasses.attention.masks import check_mask, operand
from fxpasses.attention.match import Attention, Operand
from fxpasses.attention.products import without_permutations
from fxpasses.attention.spelling import same, shape_of
from fxpasses.attention.unfused import Unfused, is_softmax
from fxpasses.graph.aliases import AliasAnalysis
from fxpasses.graph.building import erase_unused
from fxpasses.graph.calls import operator_of
from fxpasses.graph.checkpoints import has_policy
from fxpasses.graph.modes import autocast_regions
from fxpasses.graph.provenance import where
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import CHECKPOINT, Region
from fxpasses.graph.symbols import hint_of, is_unbacked
from fxpasses.graph.traits import COPIES, VIEWS
from fxpasses.graph.values import Tensor
from fxpasses.metadata.analysis import Closure
from fxpasses.metadata.closure import find_closure
from fxpasses.passes.pipeline import Context
from fxpasses.report import Reason, Refusal, Report

# Attention of fewer pairs takes about 0.2 ms on a CPU core, and tiles would save little of it.
_SMALLEST = 256 * 256


class SparsifyAttention:
    """The pass."""

    name = "sparsify_attention"
    exact = False

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        if context.options.attention == "dense":
            return report
        main = Region(gm)
        sites = [site for site in _sites(main) if is_fused_attention(site.node) or is_softmax(site.node)]
        if not sites:
            return report
        banned = {node: Refusal(node.name, Reason.INPUT_WRITTEN) for node in context.shared_inputs}
        closure = find_closure(main, context.fake_mode, banned)
        masks: set[Any] = set()
        memories: dict[Region, AliasAnalysis] = {}
        for site in sites:
            if site.region not in memories:
                memories[site.region] = context.aliases(site.region.gm.graph, site.region.autocast)
            rewrite = _Rewrite(site, closure, memories[site.region], context)
            try:
                if (attention := rewrite.find()) is not None:
                    report.changes.append(rewrite.run(attention))
                    masks.add(_identity(closure, attention.mask.node))
            except Refused as refused:
                report.refusals.append(refused.of(site.node))
        for region in main.walk():
            region.gm.recompile()
        report.changed = bool(report.changes)
        if report.changed:
            report.figures = {"attentions": len(report.changes), "masks": len(masks)}
            report.summary = _summary(**report.figures)
        return report


@dataclass(frozen=True)
class _Site:
    """A node that may be an attention, or the softmax of one. autocast: the regions around it.

    transformed: whether it is inside a function transform such as vmap. selective: whether it is inside a checkpoint
    that keeps operators' results by a policy of the user.
    """

    region: Region
    node: Node
    autocast: tuple[Any, ...]
    transformed: bool
    selective: bool


def _sites(region: Region, levels: int = 0, selective: bool = False) -> Iterator[_Site]:
    """Every call of a graph and its checkpoint bodies, in program order."""
    for node, autocast in autocast_regions(region.gm.graph, region.autocast).items():
        name = getattr(node.target, "__name__", "")
        if name.endswith(("increment_nesting", "decrement_nesting")):
            levels += 1 if name.endswith("increment_nesting") else -1
        elif node.target is CHECKPOINT:
            body = region.bodies[node]
            yield from _sites(body, levels, selective or has_policy(body.gm))
        elif node.op in ("call_function", "call_method"):
            yield _Site(region, node, autocast, levels > 0, selective)


class _Rewrite:
    """Finds, checks and replaces one attention, or raises `Refused`."""

    def __init__(self, site: _Site, closure: Closure, memory: AliasAnalysis, context: Context) -> None:
        self.site, self.closure, self.memory, self.context = site, closure, memory, context
        self.graph = site.region.gm.graph

    def find(self) -> Attention | None:
        """The attention, if its mask is the batch's; None if there is no attention, or one without a mask."""
        node = self.site.node
        unfused = Unfused(node, self._check_metadata)
        attention = fused_attention(node) if is_fused_attention(node) else unfused.attention()
        if attention is None:
            return None
        if self.site.transformed:
            raise Refused(Reason.HIGHER_ORDER, "a function transform")
        self._check_metadata(attention.mask.node)
        check_mask(attention)
        self._check_sizes(attention)
        if self.site.selective:
            raise Refused(Reason.SELECTIVE)
        self._check_writes(attention)
        self.context.check_may_change(attention.node)
        return attention

    def run(self, attention: Attention) -> str:
        """Replace the attention; returns a description of the change."""
        node = attention.node
        emit = AttentionBuilder(self.graph, self.context.fake_mode, node, Reason.NOT_BY_HEADS, self.site.autocast)
        with emit.before(node):
            key_and_value = self._keys_and_values(attention)
            query, key, value = map(emit.by_heads, (attention.query, *key_and_value))
            mask = operand(emit, attention, self._source)
            heads = hint_of(shape_of(query)[1]) // (hint_of(shape_of(mask)[1]) if len(shape_of(mask)) == 4 else 1)
            rows = emit.length(attention.query)
            plan = emit(torch.ops.fxpasses.attention_plan.default, (mask, heads, rows))
            arguments = (query, key, value, mask, plan, attention.scale, _form(attention, key_and_value[0]))
            result = emit(torch.ops.fxpasses.sparse_attention.default, arguments)
            result = emit.as_before(result, attention)
        description = f"{attention.mask.node.name} {list(shape_of(result))} at {where(node)} → tiles"
        node.replace_all_uses_with(result)
        replaced = [node, *reversed(attention.inside)]
        erase_unused(replaced, lambda node: node in replaced or operator_of(node) in _ONLY_OPERANDS)
        return description

    def _check_metadata(self, node: Node) -> None:
        """Raise `Refused` unless a value is the batch's metadata."""
        if not isinstance(self.closure.values.get(node), Tensor):
            reason, text = self.closure.obstacles.get(node, (Reason.ACTIVATION, f"`{node.name}`"))
            raise Refused(reason, text, node)

    def _check_sizes(self, attention: Attention) -> None:
        query, key, value = map(_dimensions, (attention.query, attention.key, attention.value))
        (*_, queries, width), (*_, keys, other_width) = query, key
        fits = same(query[:-3], key[:-3]) and same(query[:-3], value[:-3])
        fits = fits and same(width, other_width) and same(keys, value[-2])
        for heads in (key[-3], value[-3]):
            groups = attention.grouped or (heads == 1 and not attention.fused)
            counts = isinstance(query[-3], int) and isinstance(heads, int)
            fits = fits and (same(query[-3], heads) or (groups and counts and query[-3] % heads == 0))
        if not fits:
            raise Refused(
                Reason.NOT_BY_HEADS, f"query {list(query)}, key {list(key)}, value {list(value)}", attention.node
            )
        if any(map(is_unbacked, (*query, *key, *value))):
            raise Refused(Reason.UNKNOWN_SIZE, "", attention.node)
        if hint_of(queries) * hint_of(keys) < _SMALLEST:
            raise Refused(Reason.SMALL, f"{queries} × {keys} pairs", attention.node)

    def _check_writes(self, attention: Attention) -> None:
        """Raise `Refused` if query or key is written to between its first read and the output, where it is now read."""
        for read in (attention.query, attention.key):
            writer = self.memory.writer(read.node, attention.started, attention.node)
            if writer is not None and attention.started is not attention.node:
                raise Refused(Reason.WRITTEN_BY_LAYER, f"by `{writer.name}`", writer)

    def _keys_and_values(self, attention: Attention) -> tuple[Operand, Operand]:
        """Key and value; if both had their heads repeated, the operands before that."""
        found = []
        for repeated in map(without_permutations, (attention.key, attention.value)):
            source = unrepeated(repeated.node, repeated.order[1]) if len(repeated.order) == 4 else None
            if source is None or self.memory.writer(source, repeated.node, attention.node) is not None:
                return attention.key, attention.value
            found.append(without_permutations(Operand(source, repeated.order)))
        key, value = found
        return (key, value) if same(_dimensions(key)[1], _dimensions(value)[1]) else (attention.key, attention.value)

    def _source(self, node: Node) -> Any:
        """The outer value of a placeholder of a checkpoint's body; any other node itself."""
        region, found = self.site.region, node
        while isinstance(found, Node) and found.op == "placeholder" and region.parent is not None:
            if found in region.operands:
                found = region.operands[found]
            region = region.parent
        return found


# Operators on a key or a value whose results may be unused once the attention is replaced.
_ONLY_OPERANDS = VIEWS | COPIES | {"flatten", "getattr", "repeat_interleave"}


def _form(attention: Attention, key: Operand) -> str:
    """The spelling that the operator replaces: its argument `form`."""
    if attention.fused:
        return "fused" if key is attention.key else "repeated"
    return "written" if attention.mask.fill is None else "filled"


def _dimensions(operand: Operand) -> tuple[Any, ...]:
    shape = shape_of(operand.node)
    return tuple(shape[axis] for axis in operand.order)


def _identity(closure: Closure, mask: Node) -> Any:
    value = closure.values[mask]
    assert isinstance(value, Tensor)
    return value.number, value.memory.version


def _summary(attentions: int, masks: int) -> str:
    plans = f"{masks} plans" if masks > 1 else "one plan"
    what = f"{attentions} attentions compute" if attentions > 1 else "1 attention computes"
    return f"{what} what the batch's mask allows, by {plans} per batch"
