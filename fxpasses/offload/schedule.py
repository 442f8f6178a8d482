"""A model of overlapped copies and compute, and of live memory: pure functions on plain numbers.

Times are in seconds, sizes in bytes. One channel in each direction carries one copy at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def backward_time(copies: Sequence[float], computes: Sequence[float], buffers: int) -> float:
    """The time of a backward pass, in which copy i has to end before compute i.

    With one buffer, copy i starts when it is needed. With more, copy i + buffers - 1 starts when copy i has ended and
    compute i begins. For L equal layers these take L·(c + g) and c + (L-1)·max(c, g) + g, respectively.
    """
    clock = channel = 0.0
    ready: list[float] = []

    def start(number: int) -> None:
        nonlocal channel
        channel = max(channel, clock) + copies[number]
        ready.append(channel)

    for number, compute in enumerate(computes):
        if len(ready) == number:
            start(number)
        clock = max(clock, ready[number])
        while len(ready) < min(number + buffers, len(copies)):
            start(len(ready))
        clock += compute
    return clock


def forward_time(copies: Sequence[float], computes: Sequence[float], buffers: int) -> float:
    """The time of a forward pass, in which copy i moves the result of compute i.

    Copy i starts after copy i - buffers + 1 has ended; with one buffer, compute i + 1 starts after copy i has ended.
    One more compute than copies follows the last copy; at the end, the pass waits for all copies.
    """
    clock = channel = 0.0
    ended: list[float] = []
    for number, copy in enumerate(copies):
        clock += computes[number]
        if number - buffers + 1 >= 0 and buffers > 1:
            clock = max(clock, ended[number - buffers + 1])
        channel = max(channel, clock) + copy
        ended.append(channel)
        if buffers == 1:
            clock = channel
    return max(clock + sum(computes[len(copies) :]), channel)


def exposed_time(
    out: Sequence[float],
    between_out: Sequence[float],
    back: Sequence[float],
    between_back: Sequence[float],
    buffers: int,
) -> float:
    """The time for which a step waits for copies, in forward and backward.

    out, back: times of the copies, in the order of each pass. between_out: compute before each copy, and after the
    last. between_back: compute from each tensor's first use to the next tensor's, or to the end.
    """
    forward = forward_time(out, between_out, buffers) - sum(between_out)
    return forward + backward_time(back, between_back, buffers) - sum(between_back)


@dataclass(frozen=True)
class Life:
    """Memory that is live from moment `start` to moment `end`, inclusive."""

    bytes: int
    start: int
    end: int


def peak(lives: Iterable[Life], moments: int) -> int:
    """The maximum of live bytes over `moments` moments."""
    change = [0] * (moments + 1)
    for life in lives:
        if life.end >= life.start:
            change[life.start] += life.bytes
            change[life.end + 1] -= life.bytes
    live = most = 0
    for step in change:
        live += step
        most = max(most, live)
    return most
