"""Reachability in a graph, without recursion because graphs are deep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def reached(start: Iterable[T], step: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """Everything reachable from `start` by `step`, the start included."""
    waiting, found = list(start), dict[T, None]()
    while waiting:
        current = waiting.pop()
        if current not in found:
            found[current] = None
            waiting += step(current)
    return found
