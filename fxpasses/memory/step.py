"""The memory of a training step whose graph is compiled in pieces, some of which run several times.

    forward    rest_0   layer_0  layer_0  layer_0   rest_1
    backward   rest_0   layer_0  layer_0  layer_0   rest_1      (from right to left)

What a call of forward saves for itself lives until its backward. What it returns lives until the last call that reads
it, and if calls save it, until the backward of the first of them; it is there once, however many save it. A parameter's
gradient lives from the backward of the last call that takes the parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from fxpasses.base.units import size
from fxpasses.memory.footprint import Footprint
from fxpasses.report import MemoryPlan, OnReport, Report

TOLERANCE = 1.05  # a prediction may be wrong by so much before a step is taken not to fit
NONE: Mapping[str, Footprint] = MappingProxyType({})


class TooLarge(Exception):
    """A layer for which the step does not fit, whatever is recomputed or moves."""


@dataclass(frozen=True)
class Call:
    """A call of a piece, with the names of the values that it takes and returns. is_layer: whether others are alike."""

    piece: str
    operands: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    is_layer: bool = False


@dataclass
class Step:
    """A step and what is known of its pieces.

    budget: the bytes that the process may use on the device. before: those that it uses before the step. has_gradients:
    whether gradients are among these, and backward adds to them. given: those of inputs that are made for the step,
    once per batch. headroom: how many times larger the batch may become for which it is planned. calls: in forward's
    order. returned: the values that the program returns. footprints: of the pieces that are partitioned; saving_all: of
    layers, if they saved all that backward needs. may_shrink: whether a piece could save less. target: the peak to plan
    for. planned: the one that was planned, before compiled code was known. tiles: in how many the rows of layers are
    computed. more_tiles: whether another try may follow, so that a step that does not fit need not be compiled. tiled:
    the regions that are. could_tile: whether there could be more of a layer's. all_move: whether all that may move away
    does, of pieces that run once; could_move: whether they keep some of it. compiled: the pieces that run once, which
    another try at this step need not compile again, with their footprints and reports. reports: on its plan.
    has_failed: whether an error has left a piece without a plan.
    """

    budget: int
    before: int
    has_gradients: bool = False
    given: int = 0
    headroom: float = 1.0
    calls: Sequence[Call] = (Call(""),)
    returned: frozenset[str] = frozenset()
    footprints: dict[str, Footprint] = field(default_factory=dict)
    saving_all: dict[str, Footprint] = field(default_factory=dict)
    may_shrink: bool = False
    target: int = 0
    planned: int = 0
    tiles: int = 1
    more_tiles: bool = False
    tiled: int = 0
    could_tile: bool = False
    all_move: bool = False
    could_move: bool = False
    compiled: dict[str, tuple[Any, Footprint | None, Sequence[Report]]] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    has_failed: bool = False

    def __post_init__(self) -> None:
        self.target = self.target or self.budget

    def peak(self, also: Mapping[str, Footprint] = NONE, larger: float = 1.0, has_gradients: bool | None = None) -> int:
        """The process's predicted peak. also: footprints of pieces not yet noted. larger: how many times the batch.

        Layers without a footprint are taken to be like the largest that has one; other pieces need nothing.
        """
        there = self.has_gradients if has_gradients is None else has_gradients
        calls = self._with_footprints({**self.footprints, **also})
        return self.before + max_of(self._needs(calls, there), larger)

    def _needs(self, calls: Calls, has_gradients: bool) -> list[Need]:
        there = self.given - _reserved(calls) + max((footprint.masks for _, footprint in calls), default=0)
        return [need._replace(of_batch=there + need.of_batch) for need in needs(calls, self.returned, has_gradients)]

    def keep(self, piece: str, compiled: Any, reports: Sequence[Report]) -> None:
        self.compiled[piece] = compiled, self.footprints.get(piece), reports

    def reuse(self, piece: str, on_report: OnReport) -> Any:
        compiled, footprint, reports = self.compiled[piece]
        if footprint is not None:
            self.footprints[piece] = footprint
        for report in reports:
            on_report(report)
        return compiled

    def _with_footprints(self, known: Mapping[str, Footprint]) -> list[tuple[Call, Footprint]]:
        layers = [known[call.piece] for call in self.calls if call.is_layer and call.piece in known]
        like = max(layers, key=lambda found: found.kept, default=Footprint())
        return [(call, known.get(call.piece, like if call.is_layer else Footprint())) for call in self.calls]

    def plan(self) -> MemoryPlan:
        """The course of the step, as planned and with everything saved."""

        def course(footprints: Mapping[str, Footprint]) -> list[int]:
            found = self._needs(self._with_footprints(footprints), self.has_gradients)
            return [self.before + each.of_batch + each.of_gradients for each in found]

        return MemoryPlan(self.budget, course({**self.footprints, **self.saving_all}), course(self.footprints))

    def describe(self) -> None:
        """Tell its reports what was planned in the end: other kinds of layers, and compiled code, came after them."""
        peak = self.peak()
        fits = "fits into" if peak <= self.budget else "does not fit into"
        for report in self.reports:
            report.figures["peak_bytes"] = peak
            report.changes.append(f"the predicted peak of {size(peak)} {fits} {size(self.budget)}")
        plan = self.plan()
        for report in self.reports:
            report.plan = plan

    def is_too_large(self) -> bool:
        """Whether it is sure not to fit."""
        return self.peak() > TOLERANCE * self.budget

    def again(self, **changes: Any) -> Step:
        """The step for another try, of which no layer is planned."""
        return replace(self, footprints={}, reports=[], may_shrink=False, tiled=0, **changes)

    def outlook(self) -> Outlook:
        """What is to be remembered of a plan."""
        calls = self._with_footprints(self.footprints)
        found = {there: tuple(self._needs(calls, there)) for there in (False, True)}
        return Outlook(self.budget, self.before, found[self.has_gradients], found[True])

    def in_words(self) -> str:
        """What the peak is made of, in words."""
        calls = self._with_footprints(self.footprints)
        kept = sum(footprint.kept for _, footprint in calls)
        return f"layers keep {size(kept)} for backward, and gradients take {size(gradients(calls))}"


@dataclass(frozen=True)
class Outlook:
    """A plan in numbers. needs: what the step was predicted to need; with_gradients: where gradients are there already.
    budget, before: see `Step`."""

    budget: int
    before: int
    needs: Sequence[Need]
    with_gradients: Sequence[Need]

    def peak(self, in_use: int, larger: float, has_gradients: bool) -> int:
        """The predicted peak of a step beside what is in use, for a batch that is so many times as large."""
        return in_use + max_of(self.with_gradients if has_gradients else self.needs, larger)


class Need(NamedTuple):
    """Bytes at one time of a step: those that grow with the batch, and those of gradients of parameters."""

    of_batch: int
    of_gradients: int


def max_of(needs: Iterable[Need], larger: float = 1.0) -> int:
    """The most bytes, for a batch that is so many times as large."""
    return max((round(larger * need.of_batch) + need.of_gradients for need in needs), default=0)


Calls = Sequence[tuple[Call, Footprint]]


def _operand(call: Call, at: int) -> str:
    return call.operands[at] if at < len(call.operands) else f"{call.piece} {at}"


def _reserved(calls: Calls) -> int:
    """The bytes of plans of attention that take no memory; layers share plans."""
    return sum({_operand(call, at): each for call, own in calls for at, each in own.reserved.items()}.values())


def _with_gradients(call: Call, footprint: Footprint) -> dict[int, str]:
    """The names of the operands that get a gradient, by position."""
    return {at: _operand(call, at) for at in footprint.gradients}


def gradients(calls: Calls) -> int:
    return sum(_gradients(calls).values())


def _gradients(calls: Calls) -> dict[str, int]:
    """The bytes of the gradients of values that no call returns, by name: one for all calls that take the value."""
    found: dict[str, int] = {}
    made = {name for call, _ in calls for name in call.results}
    for call, footprint in calls:
        for at, name in _with_gradients(call, footprint).items():
            if name not in made:
                found[name] = max(footprint.gradients[at], found.get(name, 0))
    return found


@dataclass
class _Value:
    """What a call returns. made: the call's number; used: the last call that reads it; held: those whose backward
    needs it. has_gradient: whether it gets one."""

    bytes: int
    made: int
    used: int
    is_returned: bool = False
    has_gradient: bool = False
    held: set[int] = field(default_factory=set)


def peak(calls: Calls, returned: frozenset[str] = frozenset(), has_gradients: bool = False) -> int:
    """The most bytes that a step adds: see `needs`."""
    return max_of(needs(calls, returned, has_gradients))


def needs(calls: Calls, returned: frozenset[str] = frozenset(), has_gradients: bool = False) -> list[Need]:
    """What a step adds, call by call, whose forward makes these calls, and whose backward makes them in reverse.

    has_gradients: whether gradients are added to ones that are there already. Then one that several calls make, as of
    tied weights, still waits for the others' until the last of them.
    """
    values, named = _values(calls, returned)
    found: list[Need] = []
    kept = 0
    for number, (_, footprint) in enumerate(calls):
        there = (v for v in values.values() if v.made < number and (v.used >= number or v.held or v.is_returned))
        found.append(Need(kept + sum(value.bytes for value in there) + footprint.forward, 0))
        kept += footprint.kept
    waiting = list(itertools.accumulate((each.early for _, each in calls), lambda last, own: own or last, initial=0))
    is_reading = False
    left: dict[str, int] = {}
    all_gradients = _gradients(calls)
    first: dict[str, int] = {}  # of each gradient: the call whose backward is the last to add to it
    for number, (call, footprint) in enumerate(calls):
        for name in _with_gradients(call, footprint).values():
            first.setdefault(name, number)
    for number, (call, footprint) in reversed([*enumerate(calls)]):
        kept -= footprint.kept
        others = {n for n, value in values.items() if value.is_returned or min(value.held, default=number) < number}
        live = sum(values[name].bytes for name in others)
        live += sum(v.bytes for v in values.values() if v.has_gradient and v.made < number < v.used)  # it waits
        own = footprint.backward_beside(
            frozenset(
                at
                for at in footprint.saved_operands
                if at >= len(call.operands) or (name := named(call.operands[at])) not in values or name in others
            ),
            frozenset(at for at in footprint.saved_results if not call.results or named(call.results[at]) in others),
            waiting[number] if is_reading or footprint.early else 0,
        )
        is_reading |= footprint.early > 0
        found.append(Need(kept + live + own, sum(left.values())))
        mine = _with_gradients(call, footprint).values()
        left |= {name: all_gradients[name] for name in mine if name in all_gradients}
        if has_gradients:
            left = {name: of for name, of in left.items() if first[name] < number}
    return found


def _values(calls: Calls, returned: frozenset[str]) -> tuple[dict[str, _Value], Callable[[str], str]]:
    """What the calls return, by name; and the name of what something is a view of, or its own."""
    found: dict[str, _Value] = {}
    views: dict[str, str] = {}

    def named(name: str) -> str:
        return views.get(name, name)

    for number, (call, footprint) in enumerate(calls):
        results = call.results or [f"{call.piece} {at}" for at in range(len(footprint.results))]
        for at, name in enumerate(results):
            of = footprint.views.get(at)
            if of is not None:
                views[name] = named(call.operands[of]) if of < len(call.operands) else ""
            elif at < len(footprint.results):
                found[name] = _Value(footprint.results[at], number, number, is_returned=not call.results)
            if (known := found.get(named(name))) is not None:
                known.is_returned |= name in returned
                if at in footprint.saved_results:
                    known.held.add(number)
        for at, name in enumerate(call.operands):
            if (known := found.get(named(name))) is not None:
                known.used = number
                known.has_gradient |= at in footprint.gradients
                if at in footprint.saved_operands:
                    known.held.add(number)
    return found, named
