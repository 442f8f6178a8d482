"""Run a mixture of experts once, on all tokens sorted by expert, instead of in a loop over the experts.

Before, for each expert (E queries, E small programs; the host waits for the device at each query):

    where_0 = torch.where(idx == 0);  tok_0 = where_0[0];  slot_0 = where_0[1]
    y_0 = silu(x[tok_0] @ w1[0]) @ w2[0];  out.index_add_(0, tok_0, y_0 * weights[tok_0, slot_0, None])

After, whatever E is:

    sorted, order = torch.sort(idx.flatten(), stable=True);  offsets = searchsorted(sorted, arange(E), right=True)
    tok = order // k;  slot = order % k
    y = grouped_mm(silu(grouped_mm(gather_rows(x, tok), w1, offsets)), w2, offsets)
    out.index_add_(0, tok, y * weights[tok, slot, None])

*Find* loops by their ends (`experts/loops.py`), *unify* the branches (`experts/anti_unification.py`), *analyse* their
queries (`experts/routing.py`), and *lift* the common program to all rows (`experts/lifting.py`); `experts/grouping.py`
takes one loop through these steps. Sums keep the order of the loop. A loop that cannot be proved keeps its branches,
with the reason in the report; its queries become one sort and slices (`experts/slicing.py`) if their routing is known.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from fxpasses.experts.anti_unification import Unifier
from fxpasses.experts.branches import Marked
from fxpasses.experts.grouping import Grouping
from fxpasses.experts.loops import Loop, Merge, find_loops
from fxpasses.experts.obligations import erase_answers, prove_idle, prove_numbers
from fxpasses.experts.row_partition import spans_of
from fxpasses.experts.slicing import slice_queries
from fxpasses.graph.aliases import AliasAnalysis
from fxpasses.graph.checkpoints import save_routing
from fxpasses.graph.refusals import NotProved, Refused
from fxpasses.graph.regions import Region
from fxpasses.passes.pipeline import Context
from fxpasses.report import Reason, Refusal, Report

_MOST_FAMILIES = 3  # ordinary experts, and experts that return their input, zeros or a constant
_NOT_GROUPED = {"auto": "the branches have no common end", "slices": "the option asks for slices"}


class GroupExperts:
    """The pass."""

    name = "group_experts"
    exact = False  # a weight that experts share is multiplied with all rows in one product

    def __call__(self, gm: torch.fx.GraphModule, context: Context) -> Report:
        report = Report(self.name)
        level = context.options.experts
        if level == "off":
            return report
        counts, branches = (
            {"loops_grouped": 0, "loops_sliced": 0},
            {branch.number: branch for branch in context.branches},
        )
        for region in Region(gm).walk():
            erase_answers(region.gm.graph)
            memory = context.aliases(region.gm.graph, region.autocast)
            # Dynamo calls a backend in the mode in which the graph begins.
            gradients = torch.is_grad_enabled() if region.parent is None else None
            marked = Marked(region.gm.graph, branches, gradients)
            left: list[tuple[Loop, Refusal]] = []
            changes: list[str] = []
            for loop, found in self._loops_of(region, memory, marked, context) if level != "slices" else ():
                if isinstance(found, Refusal):
                    left.append((loop, found))
                else:
                    changes += found
            counts["loops_grouped"] += len(changes)
            prove_idle(marked, context.fake_mode, context.discharged)
            if level != "grouped":
                memory.refresh()
                sliced, refusals = slice_queries(region.gm.graph, memory, context, left, _NOT_GROUPED[level])
                counts["loops_sliced"] += len(sliced)
                changes += sliced
                report.refusals += refusals
            report.refusals += [refusal for _, refusal in left]
            report.changes += changes
            if changes:
                region.gm.recompile()
                around = region
                while around.parent is not None:
                    save_routing(around.gm)
                    around = around.parent
        context.discharged |= set(prove_numbers([region.gm.graph for region in Region(gm).walk()], branches))
        report.figures = {name: count for name, count in counts.items() if count}
        report.changed = bool(report.figures)
        report.summary = _summary(**counts)
        return report

    def _loops_of(
        self,
        region: Region,
        memory: AliasAnalysis,
        marked: Marked,
        context: Context,
    ) -> Iterator[tuple[Loop, list[str] | Refusal]]:
        """Each loop, with its changes or refusal. A loop may extend another's sum, so a new search follows each."""
        tried: set[tuple[Node, ...]] = set()
        while True:
            loop = next((loop for loop in find_loops(region.gm.graph) if loop.ends not in tried), None)
            if loop is None:
                return
            tried.add(loop.ends)
            if context.may_change(loop.ends[0]):
                memory.refresh()
                yield loop, self._group(region, loop, memory, marked, context)
            else:
                yield loop, Refused(Reason.LEFT_OUT).of(loop.ends[0])

    def _group(
        self,
        region: Region,
        loop: Loop,
        memory: AliasAnalysis,
        marked: Marked,
        context: Context,
    ) -> list[str] | Refusal:
        """Group a loop as a whole; or else each of its rounds, if it is a nested loop (over slots, for example); or
        else each of its families, if some experts run another program than the others."""

        def groupings(loops: list[Loop]) -> list[Grouping]:
            return [Grouping(region, inner, memory, marked, context.fake_mode) for inner in loops]

        refusal = None
        for rounds in loop.rounds():
            try:
                found = groupings(rounds)
                if len({grouping.experts() for grouping in found}) > 1:
                    raise NotProved("the rounds of the loop have different experts")
                return self._run_all(found, context.discharged)
            except Refused as refused:
                refusal = refusal or refused.of(loop.merges[0].node)
        families = loop.families(_are_alike) if loop.is_divisible else []
        if 1 < len(families) <= _MOST_FAMILIES:
            try:
                found = groupings(families)
                # Each family runs on all rows, so that no size depends on the batch: two would double the work.
                if sum(grouping.multiplies for grouping in found) > 1:
                    raise NotProved("several kinds of experts compute products")
                return self._run_all(found, context.discharged)
            except Refused as refused:
                refusal = refusal or refused.of(loop.merges[0].node)
        assert refusal is not None
        return refusal

    def _run_all(self, groupings: list[Grouping], discharged: set[int]) -> list[str]:
        changes: list[str] = []
        for grouping in groupings:
            try:
                changes.append(grouping.run())
                discharged |= grouping.proof.discharged
            except Refused:
                if not changes:
                    raise
                break  # earlier rounds are already grouped
        return changes


def _are_alike(one: Merge, other: Merge) -> bool:
    """Whether two branches are one program."""
    try:
        Unifier(spans_of).unify([one.values, other.values])
    except NotProved:
        return False
    return True


def _summary(loops_grouped: int, loops_sliced: int) -> str:
    parts = []
    if loops_grouped:
        loops = "loops" if loops_grouped > 1 else "loop"
        parts.append(f"{loops_grouped} {loops} over experts became grouped programs")
    if loops_sliced:
        routings = "routings" if loops_sliced > 1 else "routing"
        parts.append(f"the queries of {loops_sliced} {routings} became one sort each")
    return "; ".join(parts)
