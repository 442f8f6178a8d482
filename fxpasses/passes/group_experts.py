"""Run a mixture of experts once on all tokens, sorted by expert, and not in a loop over the experts.

Before, for each expert (E queries, E small programs; the host waits for the device at each query):

    where_0 = torch.where(idx == 0);  tok_0 = where_0[0];  slot_0 = where_0[1]
    y_0 = silu(x[tok_0] @ w1[0]) @ w2[0];  out.index_add_(0, tok_0, y_0 * weights[tok_0, slot_0, None])

After, whatever E is:

    sorted, order = torch.sort(idx.flatten(), stable=True);  offsets = searchsorted(sorted, arange(E), right=True)
    tok = order // k;  slot = order % k
    y = grouped_mm(silu(grouped_mm(gather_rows(x, tok), w1, offsets)), w2, offsets)
    out.index_add_(0, tok, y * weights[tok, slot, None])

*Find* loops by their ends (`experts/loops.py`), *unify* the branches (`graph/anti_unification.py`), know what their
queries mean (`graph/routing.py`), and *lift* the common program to all rows (`experts/lifting.py`);
`experts/grouping.py` does so for one loop. Sums are taken in the order of the loop. A loop in which anything is not
understood keeps its branches, with the reason in the report; its queries become one sort and slices
(`experts/slicing.py`), where they are understood.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from fxpasses.graph.aliases import AliasAnalysis
from fxpasses.graph.checkpoints import save_routing
from fxpasses.graph.provenance import module_of, where
from fxpasses.graph.refusals import NotProved, Refused
from fxpasses.graph.regions import Region
from fxpasses.graph.speculation import SpeculatedBranch, branches_of
from fxpasses.passes.experts.grouping import Grouping
from fxpasses.passes.experts.loops import Loop, find_loops
from fxpasses.passes.experts.obligations import erase_answers, prove_idle, prove_numbers
from fxpasses.passes.experts.slicing import slice_queries
from fxpasses.pipeline import Context
from fxpasses.report import Reason, Refusal, Report

_NOT_GROUPED = {"auto": "the branches have no common end", "slices": "the option asks for slices"}


class GroupExperts:
    """The pass."""

    name = "group_experts"
    exact = True

    def __call__(self, gm: torch.fx.GraphModule, context: Context) -> Report:
        report = Report(self.name)
        level = context.options.experts
        if level == "off":
            return report
        counts = {"loops_grouped": 0, "loops_sliced": 0}
        for region in Region(gm).walk():
            erase_answers(region.gm.graph)
            memory = context.aliases(region.gm.graph)
            left: list[tuple[Loop, Refusal]] = []
            changes: list[str] = []
            if level != "slices":
                for loop, found in self._loops_of(region, memory, context, branches_of(gm)):
                    if isinstance(found, Refusal):
                        left.append((loop, found))
                    else:
                        counts["loops_grouped"] += len(found)
                        changes += found
            prove_idle(region.gm.graph, branches_of(gm), context.fake_mode, context.discharged)
            if level != "grouped":
                memory.refresh()
                sliced = slice_queries(region.gm.graph, memory, context, left, _NOT_GROUPED[level])
                counts["loops_sliced"] += len(sliced.changes)
                changes += sliced.changes
                report.refusals += sliced.refusals
            report.refusals += [refusal for _, refusal in left]
            report.changes += changes
            if changes:
                region.gm.recompile()
                around = region
                while around.parent is not None:
                    save_routing(around.gm)
                    around = around.parent
        context.discharged |= set(prove_numbers([region.gm.graph for region in Region(gm).walk()], branches_of(gm)))
        report.figures = {name: count for name, count in counts.items() if count}
        report.changed = bool(report.figures)
        report.summary = _summary(**counts)
        return report

    def _loops_of(
        self, region: Region, memory: AliasAnalysis, context: Context, skips: dict[int, SpeculatedBranch]
    ) -> Iterator[tuple[Loop, list[str] | Refusal]]:
        """What became of each loop. One may go on with another's sum, so they are looked for anew after each change."""
        tried: set[tuple[Node, ...]] = set()
        while True:
            loops = ((loop, loop.ends) for loop in find_loops(region.gm.graph))
            loop, key = next(((loop, key) for loop, key in loops if key not in tried), (None, ()))
            if loop is None:
                return
            tried.add(key)
            first = key[0]
            if context.may_change(first):
                memory.refresh()
                yield loop, self._group(region, loop, memory, context, skips)
            else:
                yield loop, Refusal(first.name, Reason.LEFT_OUT, "", where(first), module_of(first)[0])

    def _group(
        self, region: Region, loop: Loop, memory: AliasAnalysis, context: Context, skips: dict[int, SpeculatedBranch]
    ) -> list[str] | Refusal:
        """What became of a loop: of all of it, or of its rounds where it is a loop in a loop (over slots, say)."""
        refusal = None
        for rounds in loop.rounds():
            groupings = []
            try:
                groupings = [Grouping(region, inner, memory, context.fake_mode, skips) for inner in rounds]
                if len({grouping.experts() for grouping in groupings}) > 1:
                    raise NotProved("the rounds of the loop are of different experts")
                return self._run_all(groupings, context.discharged)
            except Refused as refused:
                refusal = refusal or refused.of(loop.merges[0].node)
        assert refusal is not None
        return refusal

    def _run_all(self, groupings: list[Grouping], discharged: set[int]) -> list[str]:
        changes: list[str] = []
        for grouping in groupings:
            try:
                changes.append(grouping.run())
                discharged |= grouping.proof.skips
            except Refused:
                if not changes:
                    raise
                break  # the rounds before stand for themselves
        return changes


def _summary(loops_grouped: int, loops_sliced: int) -> str:
    parts = []
    if loops_grouped:
        loops = "loops" if loops_grouped > 1 else "loop"
        parts.append(f"{loops_grouped} {loops} over experts became grouped programs")
    if loops_sliced:
        routings = "routings" if loops_sliced > 1 else "routing"
        parts.append(f"the queries of {loops_sliced} {routings} became one sort each")
    return "; ".join(parts)
