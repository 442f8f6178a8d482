"""What can be reached in a graph, step by step; without recursion, because graphs are deep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def reached(start: Iterable[T], step: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """All that steps lead to, the start included."""
    waiting, found = list(start), dict[T, None]()
    while waiting:
        current = waiting.pop()
        if current not in found:
            found[current] = None
            waiting += step(current)
    return found
