"""Offload: activations that forward saves leave the device, and return before backward needs them.

The pass works on the two graphs of AOTAutograd's partitioner, which show what is saved and where backward needs it.
First it finds the tensors that may move and decides on each, as plain data; then it marks the chosen ones; then it
inserts the operators. docs/offload_activations.md has the details.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.fx import Node

from fxpasses.base.units import duration, size
from fxpasses.fold.outlining import WHOLE, Place
from fxpasses.graph.provenance import where
from fxpasses.offload.candidates import candidates_of, limits_of, step_of
from fxpasses.offload.choose import Candidate, Choice, Decision, choose
from fxpasses.offload.insert import insert, mark
from fxpasses.offload.runtime import stats
from fxpasses.offload.runtime.calibration import Rates, rates
from fxpasses.offload.saved import Group, Partition, groups
from fxpasses.offload.transfers import transfers
from fxpasses.options import Offload
from fxpasses.report import Reason, Refusal, Report

NAME = "offload_activations"


class OffloadActivations:
    """Rewrites a partition in place, and reports on every saved tensor that forward computes.

    replayed: whether CUDA graphs will replay the two graphs; then nothing leaves a CUDA device. place: of
    the graphs in their step. planned: the names of the saved tensors that are to move, if that is decided already.
    """

    name = NAME

    def __init__(
        self,
        options: Offload,
        measure: Callable[[str, str, torch.device], Rates] = rates,
        replayed: bool = False,
        place: Place = WHOLE,
        planned: Collection[str] | None = None,
        fused: bool = False,
    ) -> None:
        self.options, self.measure, self.replayed, self.place = options, measure, replayed, place
        self.planned, self.fused = planned, fused

    def __call__(self, partition: Partition) -> Report:
        report = Report(self.name)
        found, refused = groups(partition, self.options.tier, self.replayed)
        candidates: list[Candidate] = []
        movable: list[Group] = []
        for group, known in zip(found, candidates_of(found, partition), strict=True):
            if known is None:
                refused.append((group.lead, Reason.UNKNOWN_SIZE, ""))
            else:
                candidates.append(known)
                movable.append(group)
        choice = self._choose(partition, candidates, movable)
        if not movable:
            _warn_of_devices(refused)
        mark(movable, {c.name for c in choice.moved})
        insert(partition, movable, self.options, self.place.calls > 0, self.fused)
        self._describe(report, choice, refused)
        report.transfers = list(transfers(partition, self.options.tier))
        return report

    def _choose(self, partition: Partition, candidates: list[Candidate], movable: list[Group]) -> Choice:
        options = self.options
        if not candidates:
            return Choice([])
        device = movable[0].lead.meta["val"].device
        step = step_of(partition, movable, self.measure(options.tier, options.directory, device))
        planned = self.planned
        if planned is not None:
            planned = {group.lead.name for group in movable if all(node.name in planned for node in group.saved)}
        return choose(candidates, limits_of(options, self.place), step, planned)

    def _describe(self, report: Report, choice: Choice, refused: list[tuple[Node, Reason, str]]) -> None:
        kept = [decision for decision in choice.decisions if not decision.move]
        moved_bytes = sum(c.bytes for c in choice.moved)
        kept_bytes = sum(decision.candidate.bytes for decision in kept)
        report.changed = bool(choice.moved)
        if report.changed:
            report.summary = (
                f"{len(choice.moved)} activations, {size(moved_bytes)}, wait for backward on the {self.options.tier}; "
                f"{size(kept_bytes)} stay; {duration(choice.exposed_seconds)} of copies are predicted not to hide"
            )
        report.figures = {
            "tensors_moved": len(choice.moved),
            "bytes_moved": moved_bytes,
            "tensors_kept": len(kept),
            "bytes_kept": kept_bytes,
            "exposed_microseconds": round(1e6 * choice.exposed_seconds),
            "peak_bytes_before": choice.peak_before,
            "peak_bytes_after": choice.peak_after,
        }
        report.changes = [_change(decision) for decision in choice.decisions if decision.move]
        budget = self.options.device_budget
        if budget is not None and choice.peak_after > budget:
            stays = f"the predicted peak stays at {size(choice.peak_after)}"
            report.changes.append(f"fastpack.offload.device_budget is {size(budget)}, and {stays}")
        report.refusals = [_refusal(decision) for decision in kept]
        computed = [(node, reason, text) for node, reason, text in refused if node.op == "call_function"]
        report.refusals += [Refusal(node.name, reason, text, where(node)) for node, reason, text in computed]
        report.figures["inputs_saved"] = len(refused) - len(computed)


def _change(decision: Decision) -> str:
    c = decision.candidate
    kind = "a checkpoint begins with it" if c.boundary else "large"
    return f"{c.name}{_place(c)}: {size(c.bytes)} moved; {kind}"


def _refusal(decision: Decision) -> Refusal:
    c = decision.candidate
    assert decision.reason is not None
    text = f"{size(c.bytes)}{_place(c)}" + (f"; {decision.text}" if decision.text else "")
    return Refusal(c.name, decision.reason, text, c.where)


def _place(c: Candidate) -> str:
    return f" in {c.layer}" if c.layer else ""


def _warn_of_devices(refused: list[tuple[Node, Reason, str]]) -> None:
    """Warn once if nothing can leave the device; the report has the reason for each tensor."""
    for reason, name in ((Reason.WRONG_DEVICE, "wrong_device"), (Reason.REPLAYED, "cuda_graphs")):
        texts = [text for _, given, text in refused if given is reason]
        if texts:
            stats.fell_back(name, f"activations are not moved: {reason.value} ({texts[0]})")
