"""Which saved tensors to move: a decision for each, on plain data."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fxpasses.offload.schedule import Life, exposed_time, peak
from fxpasses.report import Reason


@dataclass(frozen=True)
class Candidate:
    """A saved tensor that may move. Moments count the nodes of the forward graph, then those of the backward graph.

    bytes: the size of its copy. made, released: when forward computes it, and when its copy may start. needed, done:
    when backward first and last uses it. boundary: a checkpoint begins with it, so nothing else of its layer is saved.
    given: it is an input of the graph, which the caller holds to the end of forward. layer, where: for reports.
    """

    name: str
    bytes: int
    made: int
    released: int
    needed: int
    done: int
    boundary: bool = False
    given: bool = False
    layer: str = ""
    where: str = ""


@dataclass(frozen=True)
class Decision:
    """Move a tensor or keep it. reason: why it is kept; None if it moves. text: details of the reason."""

    candidate: Candidate
    move: bool
    reason: Reason | None = None
    text: str = ""


@dataclass(frozen=True)
class Limits:
    """Limits as in `fxpasses.options.Offload`, in bytes; None means no limit.

    keeps_given: whether `keep_last` also counts inputs of the graph, because no graph follows it.
    """

    min_bytes: int = 0
    keep_last: int = 0
    buffers: int = 2
    device_budget: int | None = None
    host_budget: int | None = None
    keeps_given: bool = False


@dataclass(frozen=True)
class Step:
    """The step around the candidates. seconds[m]: compute time of moment m. forward: the number of forward's moments.

    fixed: memory that is live besides the candidates. out_rate, in_rate: the rates of copies, in bytes per second.
    """

    seconds: Sequence[float]
    forward: int
    fixed: Sequence[Life] = ()
    out_rate: float = 1e9
    in_rate: float = 1e9


@dataclass
class Choice:
    """A decision for each candidate, in the order given, and the prediction for the step."""

    decisions: list[Decision]
    exposed_seconds: float = 0.0
    peak_before: int = 0
    peak_after: int = 0
    moved: list[Candidate] = field(default_factory=list)


def choose(
    candidates: Sequence[Candidate], limits: Limits, step: Step, planned: Collection[str] | None = None
) -> Choice:
    """Decide. Without a device budget, all candidates that may move do; with one, those that meet it at least cost.

    planned: the names of those that are to move, if that is decided already.
    """
    free, kept = admitted(candidates, limits)
    model = Model(step, limits.buffers, candidates)
    why = "fastpack.memory has room for it"
    if planned is not None:
        moved = [candidate for candidate in free if candidate.name in planned]
    else:
        why = f"fastpack.offload.device_budget is {limits.device_budget}"
        moved = free if limits.device_budget is None else model.cheapest(free, limits.device_budget)
    for candidate in free:
        if candidate not in moved:
            kept[candidate.name] = (Reason.WITHIN_BUDGET, why)
    if limits.host_budget is not None:
        moved, beyond = within(moved, limits.host_budget)
        for candidate in beyond:
            kept[candidate.name] = (Reason.HOST_BUDGET, f"fastpack.offload.host_budget is {limits.host_budget}")
    decisions = [Decision(c, c.name not in kept, *kept.get(c.name, (None, ""))) for c in candidates]
    return Choice(decisions, model.exposed(moved), model.peak([]), model.peak(moved), _by_need(moved))


def admitted(candidates: Sequence[Candidate], limits: Limits) -> tuple[list[Candidate], dict[str, tuple[Reason, str]]]:
    """The candidates that may move, those first that should rather than others, and why the rest may not."""
    kept: dict[str, tuple[Reason, str]] = {}
    for candidate in candidates:
        # Inductor may leave out the move of a tensor without elements, which would wait for the copy before.
        if candidate.bytes < max(limits.min_bytes, 1):
            kept[candidate.name] = (Reason.SMALL, f"{candidate.bytes} of {limits.min_bytes} bytes")
    # Backward needs a graph's input only after the graphs that follow: blocks may be compiled one by one.
    large = [c for c in candidates if c.name not in kept]
    for candidate in _by_need([c for c in large if limits.keeps_given or not c.given])[: limits.keep_last]:
        kept[candidate.name] = (Reason.NEEDED_SOON, f"fastpack.offload.keep_last is {limits.keep_last}")
    # Checkpoint boundaries come first, then larger tensors, then those that backward needs later.
    free = [c for c in large if c.name not in kept]
    free.sort(key=lambda c: (not c.boundary, -c.bytes, -c.needed))
    return free, kept


def _by_need(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: c.needed)


def within(candidates: Sequence[Candidate], budget: int) -> tuple[list[Candidate], list[Candidate]]:
    """The candidates that fit into a budget, taken in order, and the rest."""
    fits: list[Candidate] = []
    for candidate in candidates:
        if candidate.bytes <= budget - sum(other.bytes for other in fits):
            fits.append(candidate)
    return fits, [candidate for candidate in candidates if candidate not in fits]


class Model:
    """Peak memory and exposed time of a step in which some candidates move."""

    def __init__(self, step: Step, buffers: int, candidates: Sequence[Candidate]) -> None:
        self.step, self.buffers, self.all = step, buffers, candidates
        self.elapsed = [0.0]
        for seconds in step.seconds:
            self.elapsed.append(self.elapsed[-1] + seconds)

    def _between(self, begin: int, end: int) -> float:
        """Seconds of compute from one moment up to another."""
        return self.elapsed[max(begin, end)] - self.elapsed[begin]

    def exposed(self, moved: Sequence[Candidate]) -> float:
        if not moved:
            return 0.0
        forward = sorted(moved, key=lambda c: c.released)
        backward = _by_need(moved)
        marks = [0, *(c.released + 1 for c in forward), self.step.forward]
        starts = [*(c.needed for c in backward), len(self.step.seconds)]
        return exposed_time(
            [c.bytes / self.step.out_rate for c in forward],
            [self._between(a, b) for a, b in itertools.pairwise(marks)],
            [c.bytes / self.step.in_rate for c in backward],
            [self._between(a, b) for a, b in itertools.pairwise(starts)],
            self.buffers,
        )

    def peak(self, moved: Sequence[Candidate]) -> int:
        names = {c.name for c in moved}
        lives = [*self.step.fixed, *(Life(c.bytes, c.made, c.done) for c in self.all if c.name not in names)]
        ahead = self.buffers - 1
        forward = sorted(moved, key=lambda c: c.released)
        for number, candidate in enumerate(forward):
            waits = number + ahead  # the copy with this number starts after the candidate's has ended
            freed = self.step.forward - 1
            if waits < len(forward) and not candidate.given:
                freed = forward[waits].released
            lives.append(Life(candidate.bytes, candidate.made, freed))
        backward = _by_need(moved)
        for number, candidate in enumerate(backward):
            read = backward[max(0, number - ahead)].needed if ahead else candidate.needed
            lives.append(Life(candidate.bytes, read, candidate.done))
        return peak(lives, len(self.step.seconds))

    def cheapest(self, free: Sequence[Candidate], budget: int) -> list[Candidate]:
        """The candidates to move for a peak of at most `budget`, at the least exposed time found; else all of them.

        Greedy: each step chooses the candidate with the least exposed time per byte of peak saved. At the end,
        candidates that are not needed are dropped.
        """
        moved: list[Candidate] = []
        rest = list(free)
        while rest and self.peak(moved) > budget:
            now_peak, now_exposed = self.peak(moved), self.exposed(moved)

            def cost(candidate: Candidate) -> tuple[float, float]:
                tried = [*moved, candidate]
                lower = now_peak - self.peak(tried)  # noqa: B023
                longer = self.exposed(tried) - now_exposed  # noqa: B023
                return (longer / lower if lower > 0 else float("inf"), -candidate.bytes)

            best = min(rest, key=cost)
            moved.append(best)
            rest.remove(best)
        for candidate in sorted(moved, key=lambda c: c.bytes):
            without = [other for other in moved if other is not candidate]
            if self.peak(without) <= budget and self.exposed(without) <= self.exposed(moved):
                moved = without
        return [candidate for candidate in free if candidate in moved]
