"""How many rows were computed: `fxpasses.row_stats()`."""

from __future__ import annotations

from dataclasses import dataclass

from fxpasses.counts import taken


@dataclass
class RowStats:
    """Counts since the process began, or since the last reset.

    steps: forward passes of graphs whose rows are counted. live: the part of the rows that could reach the loss, each
    weighted by its share of the products, summed over the steps.
    """

    steps: int = 0
    live: float = 0.0

    def __str__(self) -> str:
        """`rows: 41 % can reach the loss`; "" if no graph counts its rows."""
        return f"rows: {100 * self.live / self.steps:.0f} % can reach the loss" if self.steps else ""


_now = RowStats()


def row_stats(reset: bool = False) -> RowStats:
    """A copy of the counts; with `reset` they restart from 0."""
    return taken(_now, reset)


def count(live: float) -> None:
    _now.steps += 1
    _now.live += live
