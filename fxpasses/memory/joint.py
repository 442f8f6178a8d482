"""Which values a layer keeps for backward, recomputes or moves away, so that its step fits in the least predicted time.

    ratio of what is saved         1.0            0.9                    0.4
    saved values that move         a, gelu(a)     a                      none
    recomputation, microseconds    0              26                     243
    copies that show               246            131                    0
    the step fits                  yes            yes, and takes least   yes

For each partition the search begins with the fewest values that suffice, in the order of the seconds that each shows
for a byte and with the largest first, and with all of them. Then values stay, or change places with others, while the
step fits and that saves time. Partitions that recompute for longer than the best plan takes are not looked into.

The search is not exact. Of 2,000 random layers of up to 7 values, whose plans take up to some 50 microseconds, 14 would
take less time with other values: at worst half, and never less by more than 2.5 microseconds. In 20 small programs
there was no such case (`tests/memory/test_joint.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fxpasses.memory.recompute import PEAKS, RATIOS
from fxpasses.offload.choose import Candidate

Values = frozenset[Candidate]
_FEW = 32  # values of a layer; a graph that is planned as a whole may have hundreds


@dataclass(frozen=True)
class Option:
    """A partition of a layer's graph, and what may move of what it saves.

    recomputing: seconds of what backward computes again. free: the values that may move, those first that should rather
    than others. required: those that move in any case. exposed: the seconds in which a call waits for copies, if these
    values move. peak: the bytes that the step then takes.
    """

    recomputing: float
    free: Sequence[Candidate]
    exposed: Callable[[Values], float]
    peak: Callable[[Values], int]
    required: Values = frozenset()


@dataclass(frozen=True)
class Plan:
    """A ratio, its partition, what moves, and for one call the seconds that recomputation and exposed copies take.
    peak: of the step, in bytes."""

    ratio: float
    partition: Any
    moved: Values
    recomputing: float
    copying: float
    peak: int

    @property
    def seconds(self) -> float:
        return self.recomputing + self.copying


def least_time(
    at: Callable[[float], Any],
    option_of: Callable[[Any], Option],
    most: int,
    ratios: Sequence[float] = RATIOS,
    peaks: int = PEAKS,
) -> Plan:
    """The plan whose step has a peak of at most `most` bytes, in the least seconds found.

    If there is none, the one with the lowest peak. at: the partition at a ratio, or None. peaks: how many to predict
    for a partition; in large graphs each takes long.
    """
    best: Plan | None = None
    lowest: Plan | None = None
    for ratio in ratios:
        if (partition := at(ratio)) is None:
            continue
        option = option_of(partition)

        def plan(moved: Values) -> Plan:
            return Plan(ratio, partition, moved, option.recomputing, option.exposed(moved), option.peak(moved))  # noqa: B023

        if best is not None and option.recomputing >= best.seconds:
            break
        moved = _moving(option, most, peaks)
        if moved is not None:
            best = min((each for each in (best, plan(moved)) if each is not None), key=lambda each: each.seconds)
            if best.copying <= 0:
                break  # the less is saved, the more is recomputed
        elif best is None:
            both = (plan(option.required), plan(option.required.union(option.free)))
            lowest = min((each for each in (lowest, *both) if each is not None), key=lambda each: each.peak)
    found = best or lowest
    assert found is not None, "there is a partition at the first ratio"
    return found


def _moving(option: Option, most: int, tries: int) -> Values | None:
    """What moves so that the step fits, at the least exposed seconds found; None if it does not fit."""
    if option.peak(option.required) <= most:
        return option.required
    rest = [value for value in option.free if value not in option.required]
    if option.peak(option.required.union(rest)) > most:
        return None

    def fits(moved: Values) -> bool:
        nonlocal tries
        tries -= 1
        return tries >= 0 and option.peak(moved) <= most

    def alone(value: Candidate) -> float:
        return option.exposed(option.required | {value}) / max(value.bytes, 1)

    orders = (sorted(rest, key=alone), sorted(rest, key=lambda value: -value.bytes))  # stable: like `free` among equals
    begins = [_fewest(option.required, order, fits) for order in orders]
    if len(rest) <= _FEW:
        begins.append(option.required.union(rest))
    return min((_improved(begin, rest, option, fits) for begin in begins), key=option.exposed)


def _fewest(required: Values, order: Sequence[Candidate], fits: Callable[[Values], bool]) -> Values:
    """The values at the beginning of `order` that suffice; all of them do."""
    low, high = 0, len(order)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(required.union(order[:middle])) else (middle, high)
    return required.union(order[:high])


def _improved(moved: Values, rest: Sequence[Candidate], option: Option, fits: Callable[[Values], bool]) -> Values:
    """With fewer or other values that move, while the step fits and that saves time: what saves most first."""
    known: dict[Values, tuple[float, int]] = {}
    refused: set[Values] = set()

    def cost(tried: Values) -> tuple[float, int]:
        if tried not in known:
            known[tried] = option.exposed(tried), len(tried)
        return known[tried]

    while True:
        better = (tried for tried in _neighbours(moved, option.required, rest) if cost(tried) < cost(moved))
        for tried in sorted((tried for tried in better if tried not in refused), key=cost):
            if fits(tried):
                moved = tried
                break
            refused.add(tried)
        else:
            return moved


def _neighbours(moved: Values, required: Values, rest: Sequence[Candidate]) -> Iterable[Values]:
    """`moved` without one of its values, and with another value in the place of one."""
    movable = sorted(moved - required, key=lambda value: (-value.bytes, value.name))
    for value in movable:
        yield moved - {value}
    for value in movable if len(rest) <= _FEW else ():
        for other in rest:
            if other not in moved:
                yield moved - {value} | {other}
