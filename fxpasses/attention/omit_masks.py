"""Omit masks that only their plans need.

Before, in the prologue and in each layer:

    mask = (document[:, None] == document) & causal        # T × T
    plan = fxpasses.attention_plan(mask)
    out = fxpasses.sparse_attention(q, k, v, mask, plan)

After: rows of the mask are computed in blocks, read, and discarded:

    plan = module_0(document, ...)
    out = fxpasses.sparse_attention(q, k, v, None, plan)

*Find* the large masks whose only users are plans and the attentions that follow those plans, *prove* that their
programs compute row by row (`attention/by_rows.py`), *check* that the prologue needs them for nothing else, and
*replace*. The decision is made at compile time and holds for every batch: such a plan is never dense.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.fx import GraphModule, Node

from fxpasses.attention.by_rows import by_rows
from fxpasses.attention.runtime import plan as plans
from fxpasses.attention.runtime.by_rows import PlanByRows
from fxpasses.graph.calls import OperatorCall, operator_of
from fxpasses.graph.provenance import where
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import elements_of, expression, is_unbacked
from fxpasses.graph.traits import VIEWS
from fxpasses.graph.values import Entry, Ref, ValueTable
from fxpasses.metadata.draft import Draft, Extra
from fxpasses.metadata.emission import slice_of
from fxpasses.passes.pipeline import Context
from fxpasses.report import Reason, Report

# 2048 × 2048 pairs take 4 MiB, and 16 MiB more if attention runs dense. Omitting smaller masks saves little, and dense
# plans, which compute bit for bit what ran before, are worth more.
LARGE = 1 << 22
_SMALL = 64  # an operand that is computed as a whole has at most 1/64 of the mask's elements

_PLAN = torch.ops.fxpasses.attention_plan.default
_ATTENTION = torch.ops.fxpasses.sparse_attention.default
_MASK, _PLANNED, _FORM = 3, 4, 6  # positions of the operator's arguments
_FORMS = ("fused", "repeated")  # other forms may need the mask for rows in which it hides all keys


class OmitMasks:
    """The pass. Rebuilds `context.program`, and takes masks from the graph's placeholders."""

    name = "omit_masks"
    exact = False

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        if context.draft is None:
            return report
        main = Region(gm)
        masks = []
        for mask in _masks(main, context.draft):
            try:
                mask.check(context.draft)
                context.check_may_change(mask.owner.node)
                masks.append(mask)
            except Refused as refused:
                report.refusals.append(refused.of(mask.owner.node))
        draft = _without(masks, context.draft)
        while needed := [mask for mask in masks if draft.needed() & {mask.version, mask.owner.number}]:
            report.refusals += [Refused(Reason.MASK_NEEDED, "in the prologue").of(mask.owner.node) for mask in needed]
            masks = [mask for mask in masks if mask not in needed]
            draft = _without(masks, context.draft)
        if not masks:
            return report
        _rewrite(main, masks, draft, context)
        context.draft, context.program = draft, draft.program()
        report.changed = True
        size = sum(elements_of(mask.owner.fake) or 0 for mask in masks)
        report.figures = {"masks": len(masks), "bytes": size}
        what = "the mask is not made: its plan is" if len(masks) == 1 else f"{len(masks)} masks are not made: plans are"
        report.summary = f"{what} computed in blocks of rows"
        report.changes = [f"{mask.name} at {where(mask.owner.node)} → not made" for mask in masks]
        return report


@dataclass(frozen=True)
class _Use:
    """A node that uses an input of the main graph; `value` is its operand: the input, a view or a placeholder."""

    region: Region
    node: Node
    value: Node


@dataclass(eq=False)
class _Plan:
    """position: the plan's, among the main graph's inputs from the prologue. extra: the plan by rows, once proved."""

    position: int
    entry: Entry
    placeholder: Node
    extra: Extra | None = None

    @property
    def mask(self) -> Ref:
        return self.entry.args[0]


@dataclass(eq=False)
class _Mask:
    """A large mask: the memory `owner` at `version`, an input of the main graph, and the plans that are made of it."""

    position: int
    owner: Entry
    version: int
    placeholder: Node
    main: Region
    plans: list[_Plan] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.owner.node.name} {list(self.owner.fake.shape)}"

    @property
    def attentions(self) -> list[_Use]:
        return list(_uses(self.main, self.placeholder))

    def check(self, draft: Draft) -> None:
        """Raise `Refused` unless plans and attentions are the mask's only users, and it is computed row by row."""
        table = draft.table
        if self.owner.fake.dtype is not torch.bool:
            raise Refused(Reason.NOT_BOOL, f"but {self.owner.fake.dtype}")
        behind = (table.entries[number].fake for number in slice_of(table, [plan.mask for plan in self.plans]))
        if any(isinstance(fake, torch.Tensor) and fake.device.type != "cpu" for fake in behind):
            raise Refused(Reason.NOT_ON_CPU)
        planned: dict[Node, _Plan] = {}
        for plan in self.plans:
            if is_unbacked(table.entries[plan.mask.number].fake):
                raise Refused(Reason.UNKNOWN_SIZE)
            planned |= {use.node: plan for use in _uses(self.main, plan.placeholder)}
        attentions = {use.node: use for use in self.attentions}
        for node in [*attentions, *planned]:
            followed, use = planned.get(node), attentions.get(node)
            if followed is None or use is None or not _follows(use, followed, table):
                raise Refused(Reason.MASK_NEEDED, f"`{node.name}`", node)
        for plan in self.plans:
            plan.extra = self._by_rows(plan, draft)

    def _by_rows(self, plan: _Plan, draft: Draft) -> Extra:
        """The plan, computed from blocks of the mask's rows; raises `Refused`."""
        mask = plans.four_dimensional(draft.table.entries[plan.mask.number].fake)
        rows = OperatorCall(_PLAN, plan.entry.args, plan.entry.kwargs).argument("rows")
        count = draft.table.entries[rows.number].fake if isinstance(rows, Ref) else rows
        if expression(count) != expression(mask.shape[2]):
            raise Refused(Reason.NOT_BY_ROWS, "one row stands for many")
        found = by_rows(draft.table, plan.mask, -2, (elements_of(self.owner.fake) or 0) // _SMALL)
        repeated = tuple(type(mask.stride(i)) is int and mask.stride(i) == 0 for i in (0, 1))
        batch, heads = (1 if one_for_all else mask.shape[i] for i, one_for_all in enumerate(repeated))
        made = plan.entry.fake.new_empty(plans.plan_size(batch, heads, mask.shape[2], mask.shape[3], in_blocks=True))
        arguments = (plan.entry.args[1], rows, repeated, *found.operands)
        return Extra(draft.table.computed_by(PlanByRows(found.module), arguments, made, plan.entry.node))


def _follows(use: _Use, plan: _Plan, table: ValueTable) -> bool:
    """Whether a use is an attention by the mask's plan; such an attention reads the mask only if the plan is dense."""
    node, mask = use.node, use.value
    if node.target is not _ATTENTION or node.kwargs or len(node.args) <= _FORM:
        return False
    others = [argument for i, argument in enumerate(node.args) if i != _MASK]
    shape = table.entries[plan.mask.number].fake.shape
    same = list(map(expression, mask.meta["example_value"].shape)) == list(map(expression, shape))
    return same and node.args[_MASK] is mask and mask not in others and node.args[_FORM] in _FORMS


def _masks(main: Region, draft: Draft) -> Iterator[_Mask]:
    """The large masks among the main graph's inputs, in their order."""
    entries = draft.table.entries
    taken = list(zip(draft.wanted, main.placeholders()[len(draft.inputs) :], strict=True))
    found: dict[int, list[_Plan]] = {}
    for position, (extra, placeholder) in enumerate(taken):
        entry = entries[extra.ref.number]
        if _is_plain(extra) and entry.node.target is _PLAN and entry.kind == "op":
            found.setdefault(entry.args[0].version, []).append(_Plan(position, entry, placeholder))
    for position, (extra, placeholder) in enumerate(taken):
        if not _is_plain(extra) or extra.ref.version not in found:
            continue
        owner = entries[extra.ref.number]
        if owner.kind in ("op", "item") and owner.base is None and (elements_of(owner.fake) or 0) >= LARGE:
            yield _Mask(position, owner, extra.ref.version, placeholder, main, found[extra.ref.version])


def _is_plain(extra: Extra) -> bool:
    return extra.dimension is None and extra.as_dtype is None and not extra.as_int


def _uses(region: Region, node: Node) -> Iterator[_Use]:
    """The uses of a value and of its views, in a graph and its checkpoint bodies."""
    for user in list(node.users):
        body = region.bodies.get(user)
        if body is not None:
            for inner in _inside(body, node):
                yield from _uses(body, inner)
        elif operator_of(user) in VIEWS and user.all_input_nodes[0] is node:
            yield from _uses(region, user)
        else:
            yield _Use(region, user, node)


def _inside(body: Region, node: Node) -> list[Node]:
    return [placeholder for placeholder, operand in body.operands.items() if operand is node]


def _without(masks: list[_Mask], draft: Draft) -> Draft:
    """The prologue with plans that are computed in blocks, and without the masks."""
    replaced = {plan.position: plan.extra for mask in masks for plan in mask.plans}
    omitted = {mask.position for mask in masks}
    wanted = [replaced.get(i) or extra for i, extra in enumerate(draft.wanted) if i not in omitted]
    return replace(draft, wanted=tuple(wanted))


def _rewrite(main: Region, masks: list[_Mask], draft: Draft, context: Context) -> None:
    positions = {node: position for position, node in enumerate(main.placeholders())}
    for mask in masks:
        for use in mask.attentions:
            use.node.update_arg(_MASK, None)
        for plan in mask.plans:
            assert plan.extra is not None
            made = draft.table.entries[plan.extra.ref.number].fake
            context.example_inputs[positions[plan.placeholder]] = made
            _set_example(main, plan.placeholder, made)
        _erase(main, mask.placeholder)
    for position in sorted((positions[mask.placeholder] for mask in masks), reverse=True):
        del context.example_inputs[position]
    for region in main.walk():
        region.gm.recompile()


def _set_example(region: Region, node: Node, example: torch.Tensor) -> None:
    node.meta["example_value"] = example
    for body in (region.bodies[user] for user in node.users if user in region.bodies):
        for inner in _inside(body, node):
            _set_example(body, inner, example)


def _erase(region: Region, node: Node) -> None:
    """Erase an input of the main graph, its views, and its placeholders in checkpoint bodies."""
    for user in list(node.users):
        body = region.bodies.get(user)
        for inner in _inside(body, node) if body is not None else [user]:
            _erase(body or region, inner)
    region.erase(node)
