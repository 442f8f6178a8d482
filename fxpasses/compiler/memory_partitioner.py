"""Partitions joint graphs so that the step fits into the bytes that the user gives (`fastpack.memory`).

The pieces that a step runs once are partitioned first, as PyTorch does it; what they need is not up to choice. Layers
follow: of PyTorch's partitions, from all saved to nearly all recomputed, the first takes least time, and the first that
fits is taken. A layer that runs n times is partitioned once, and saves n times.

With `fastpack.offload`, of all partitions and of what may move of each, those that fit in the least time are taken.
Pieces that run once keep everything, until a try at the step has shown that it does not fit: then all of it moves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from fxpasses.base.containment import contained
from fxpasses.base.units import duration, many, size
from fxpasses.compiler.partitioner import replayed
from fxpasses.fold.outlining import Place
from fxpasses.memory.footprint import Footprint, footprint_of
from fxpasses.memory.joint import Option, Plan, least_time
from fxpasses.memory.movable import Movable
from fxpasses.memory.recompute import (
    RATIOS,
    Recomputed,
    effort,
    least_recomputing,
    partitions,
    recomputed,
    saving_more,
)
from fxpasses.memory.step import Step, TooLarge
from fxpasses.memory.wrapper_code import NotRead, WrapperCode, code_of
from fxpasses.offload.inputs import movable, operands_of, results_of
from fxpasses.offload.saved import Partition
from fxpasses.options import Options
from fxpasses.report import Report
from fxpasses.version import code_digest

NAME = "memory"
_AIM = 0.97  # of the budget, where the compiler decides what becomes of a graph
log = logging.getLogger(__name__)


Graphs = tuple[GraphModule, GraphModule]


class MemoryPartitioner(CustomPartitionerFn):
    """Partitions one piece of a step.

    step: what is known of the others. activations: see `Partitioner`. moving: the names of the saved values that are to
    move; None if there is no plan. reports: on each partition that was chosen.
    """

    def __init__(self, options: Options, step: Step, place: Place, activations: frozenset[int] = frozenset()) -> None:
        self.options, self.step, self.place, self.activations = options, step, place, activations
        self.fused = options.lowering == "inductor"
        self.moving: frozenset[str] | None = None
        self.reports: list[Report] = []
        self._code: dict[bool, WrapperCode] = {}  # by whether it is backward's

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        outputs = kwargs["num_fwd_outputs"]

        def partition(joint: GraphModule) -> Graphs:
            return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)

        found, is_too_large = None, False
        with contained("planning memory", "The graph is partitioned without a budget.", self.options.strict):
            inputs = movable(gm, self.activations, outputs)
            positions = operands_of(gm), results_of(gm, outputs)

            def footprint(found: Graphs, moved: frozenset[str] = frozenset()) -> Footprint:
                ahead = self.options.offload.buffers - 1
                partition = Partition(*found, outputs, inputs)
                return footprint_of(partition, self.fused, moved, positions, ahead, self.place.calls > 0)

            def movable_of(found: Graphs) -> Movable:
                return Movable(Partition(*found, outputs, inputs), self.options.offload, self.place, replayed())

            undo = self.options.memory.checkpoints == "free" and self.place.calls != 1
            found = self._plan(partitions(gm, partition, undo), len(gm.graph.nodes), footprint, movable_of)
            could_shrink = self.step.could_tile or self.step.could_move
            exceeds = self.step.peak(larger=self.step.headroom) > self.step.budget
            is_too_large = self.step.more_tiles and could_shrink and exceeds
        if found is None:
            self.step.has_failed = True
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

    def _plan(
        self,
        at: Callable[[float], Graphs | None],
        nodes: int,
        footprint: Callable[..., Footprint],
        movable_of: Callable[[Graphs], Movable],
    ) -> Graphs:
        if self.place.calls == 1:
            return self._run_once(at, footprint, movable_of)
        name = self.place.name
        known: dict[tuple[Graphs, frozenset[str]], Footprint] = {}  # a partition is its own identity
        movable: dict[Graphs, Movable] = {}

        def peak(tried: Graphs, moved: frozenset[str] = frozenset()) -> int:
            key = tried, moved
            if key not in known:
                known[key] = footprint(tried, moved)
            return self.step.peak({name: known[key]}, self.step.headroom)

        def option(tried: Graphs) -> Option:
            each = movable[tried] = movable_of(tried)
            return Option(
                each.recomputing, each.free, each.exposed, lambda moved: peak(tried, each.names(moved)), each.required
            )

        most = round(_AIM * self.step.target) if self.fused else self.step.target
        limit = effort(nodes)
        moved: frozenset[str] = frozenset()
        plan: Plan | None = None
        if self.options.offloads:
            plan = least_time(at, option, most, limit.ratios, limit.peaks)
            ratio, found = plan.ratio, plan.partition
            moved = movable[found].names(plan.moved)
            could_save_less = ratio > limit.ratios[-1] or len(plan.moved) < len(movable[found].free)
        else:
            ratio, found, larger = least_recomputing(at, peak, most, limit.ratios)
            plain = found
            if ratio < 1 and peak(found) <= most:
                left = limit.partitions - len(known)
                found = saving_more(at, lambda tried: peak(tried) <= most, ratio, found, larger, left)
            could_save_less = ratio > limit.ratios[-1] or found is not plain
        self.step.footprints[name] = known[found, moved]
        # A plan that does not fit is the lowest of all.
        self.step.may_shrink |= could_save_less and peak(found, moved) <= self.step.target
        everything = self.step.saving_all[name] = next(iter(known.values()))  # the first that was tried saves most
        self._report(ratio, known[found, moved], everything, recomputed(found), plan)
        self.moving = moved
        return found

    def _run_once(
        self,
        at: Callable[[float], Graphs | None],
        footprint: Callable[..., Footprint],
        movable_of: Callable[[Graphs], Movable],
    ) -> Graphs:
        found: Any = at(RATIOS[0])
        if not self.options.offloads:
            self.step.footprints[self.place.name] = footprint(found)
            return found
        movable = movable_of(found)
        chosen = movable.required.union(movable.free) if self.step.all_move else movable.required
        moved = movable.names(chosen)
        self.step.footprints[self.place.name] = footprint(found, moved)
        self.step.could_move |= len(chosen) < len(movable.free)
        self.moving = moved
        return found

    def _report(
        self, ratio: float, footprint: Footprint, everything: Footprint, again: Recomputed, plan: Plan | None
    ) -> None:
        report = Report(NAME, changed=ratio < 1)  # the peak follows when all is planned: `Step.describe`
        report.figures = {"bytes_saved": footprint.saved, "sizes_unknown": footprint.unknown}
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
        if plan is not None:
            report.figures |= {
                "values_moved": len(plan.moved),
                "bytes_moved": sum(value.bytes for value in plan.moved),
                "recomputing_microseconds": round(1e6 * plan.recomputing),
                "exposed_microseconds": round(1e6 * plan.copying),
            }
        if plan is not None and plan.moved:
            moves = f"{many(len(plan.moved), 'value')}, {size(report.figures['bytes_moved'])}, of each call"
            moves += f" wait for backward on the {self.options.offload.tier}"
            report.changed, report.summary = True, "; ".join(filter(None, (report.summary, moves)))
            report.changes.append(
                f"in each call, recomputation is predicted to take {duration(plan.recomputing)}, and copies that do "
                f"not hide {duration(plan.copying)}"
            )
        if self.step.tiled:
            report.changed = True
            report.figures["tiles"] = self.step.tiles
            report.changes.append(f"what is computed row by row is computed in {self.step.tiles} tiles of rows")
        self.reports.append(report)
        self.step.reports.append(report)

    def __getstate__(self) -> dict[str, Any]:
        """Inductor pickles its settings for the keys of its cache; what is planned is in the graphs."""
        return {"key": self.uuid()}  # a name of no method: copies have it

    def uuid(self) -> Any:
        """The key in Inductor's cache, whose graphs are those that this has made."""
        return "fxpasses", code_digest(), NAME
