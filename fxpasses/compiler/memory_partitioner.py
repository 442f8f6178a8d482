"""Partitions joint graphs so that the step fits into the bytes that the user gives (`fastpack.memory`).

The pieces that a step runs once are partitioned first, as PyTorch does it; what they need is not up to choice. Layers
follow: of PyTorch's partitions, from all saved to nearly all recomputed, the first takes least time, and the first that
fits is taken. A layer that runs n times is partitioned once, and saves n times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from fxpasses.base.containment import contained
from fxpasses.base.units import many, size
from fxpasses.fold.outlining import Place
from fxpasses.memory.footprint import Footprint, footprint_of
from fxpasses.memory.recompute import RATIOS, Recomputed, least_recomputing, partitions, recomputed, saving_more
from fxpasses.memory.step import Step, TooLarge
from fxpasses.memory.wrapper_code import NotRead, WrapperCode, code_of
from fxpasses.offload.candidates import moved_bytes
from fxpasses.offload.inputs import movable, operands_of, results_of
from fxpasses.offload.saved import Partition, groups
from fxpasses.options import Options
from fxpasses.report import Report
from fxpasses.version import code_digest

NAME = "memory"
_AIM = 0.97  # of the budget, where the compiler decides what becomes of a graph
log = logging.getLogger(__name__)


Graphs = tuple[GraphModule, GraphModule]


class MemoryPartitioner(CustomPartitionerFn):
    """Partitions one piece of a step.

    step: what is known of the others. activations: see `Partitioner`. reports: on each partition that was chosen.
    """

    def __init__(self, options: Options, step: Step, place: Place, activations: frozenset[int] = frozenset()) -> None:
        self.options, self.step, self.place, self.activations = options, step, place, activations
        self.fused = options.lowering == "inductor"
        self.reports: list[Report] = []
        self._code: dict[bool, WrapperCode] = {}  # by whether it is backward's

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        outputs = kwargs["num_fwd_outputs"]
        inputs = movable(gm, self.activations, outputs)

        positions = operands_of(gm), results_of(gm, outputs)

        def footprint(found: Graphs) -> Footprint:
            partition = Partition(*found, outputs, inputs)
            return footprint_of(partition, self.fused, _moved(partition, self.options), positions)

        def partition(joint: GraphModule) -> Graphs:
            return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)

        found, is_too_large = None, False
        with contained("planning memory", "The graph is partitioned without a budget.", self.options.strict):
            undo = self.options.memory.checkpoints == "free" and self.place.calls != 1
            found = self._plan(partitions(gm, partition, undo), footprint)
            is_too_large = self.step.more_tiles and self.step.could_tile and self.step.is_too_large(self.step.headroom)
        if found is None:
            return partition(gm)
        if self.place.calls != 1 and is_too_large:
            raise TooLarge(self.place.name)
        return found

    def note_code(self, gm: GraphModule, source: str, is_backward: bool) -> None:
        """Read Inductor's code for forward or backward, `gm`."""
        try:
            self._code[is_backward] = code_of(gm, source)
        except NotRead as error:
            log.debug("the code of %s is not read: %s", self.place.name, error)

    def take_code_into_account(self) -> None:
        """Replace the piece's predicted footprint by that of its code."""
        found = self.step.footprints.get(self.place.name)
        if found is not None and found.as_compiled is not None and self._code:
            self.step.planned = self.step.peak()
            self.step.footprints[self.place.name] = found.as_compiled(self._code.get(False), self._code.get(True))
            for report in self.reports:
                report.figures["peak_bytes"] = self.step.peak()

    def _plan(self, at: Callable[[float], Graphs | None], footprint: Callable[[Graphs], Footprint]) -> Graphs:
        name = self.place.name
        if self.place.calls == 1:
            found: Any = at(1.0)
            self.step.footprints[name] = footprint(found)
            return found
        known: dict[int, Footprint] = {}  # by the identity of a partition

        def peak(tried: Graphs) -> int:
            known[id(tried)] = footprint(tried)
            return self.step.peak({name: known[id(tried)]}, self.step.headroom)

        most = round(_AIM * self.step.target) if self.fused else self.step.target
        ratio, found, larger = least_recomputing(at, peak, most)
        if ratio < 1 and peak(found) <= most:
            found = saving_more(at, lambda tried: peak(tried) <= most, ratio, found, larger)
        self.step.footprints[name] = known[id(found)]
        self.step.may_shrink |= ratio > RATIOS[-1]
        everything = self.step.saving_all[name] = next(iter(known.values()))  # the first that was tried saves most
        self._report(ratio, known[id(found)], everything, recomputed(found))
        return found

    def _report(self, ratio: float, footprint: Footprint, everything: Footprint, again: Recomputed) -> None:
        peak = self.step.peak()
        report = Report(NAME, changed=ratio < 1)
        report.figures = {"peak_bytes": peak, "bytes_saved": footprint.saved, "sizes_unknown": footprint.unknown}
        if ratio < 1:
            share = round(100 * again.flops / max(again.forward, 1))
            report.summary = f"{size(footprint.saved)} of {size(everything.saved)} are saved for backward in each call"
            report.changes.append(
                f"{many(again.operators, 'operator')} of forward run again in backward, with {share} % of its FLOPs"
            )
            report.figures |= {
                "bytes_saved_without": everything.saved,
                "operators_recomputed": again.operators,
                "flops_recomputed": again.flops,
            }
        if self.step.tiled:
            report.changed = True
            report.figures["tiles"] = self.step.tiles
            report.changes.append(f"what is computed row by row is computed in {self.step.tiles} tiles of rows")
        fits = "fits into" if peak <= self.step.budget else "does not fit into"
        report.changes.append(f"the predicted peak of {size(peak)} {fits} {size(self.step.budget)}")
        self.reports.append(report)
        self.step.reports.append(report)

    def __getstate__(self) -> dict[str, Any]:
        """Inductor pickles its settings for the keys of its cache; what is planned is in the graphs."""
        return {"uuid": self.uuid()}

    def uuid(self) -> Any:
        """The key in Inductor's cache, whose graphs are those that this has made."""
        return "fxpasses", code_digest(), NAME


def _moved(partition: Partition, options: Options) -> frozenset[str]:
    """The names of the saved tensors that `offload_activations` will move, but for the few that it keeps."""
    if not options.offloads:
        return frozenset()
    found, _ = groups(partition, options.offload.tier)
    large = [group for group in found if (moved_bytes(group.lead) or 0) >= options.offload.min_bytes]
    return frozenset(node.name for group in large for node in group.saved)
