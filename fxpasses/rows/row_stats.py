"""How many rows were computed: `fxpasses.row_stats()`."""

from __future__ import annotations

from dataclasses import dataclass

from fxpasses.base.counts import taken


@dataclass
class RowStats:
    """Counts since the process began, or since the last reset.

    steps: forward passes of graphs whose rows are counted. live: the share of the rows that is computed, or would be if
    the batch were packed, weighted by their products, summed over the steps. dead: the share that nothing reads:
    padding, and documents without labels. The remaining rows are prompts, which other rows read.
    """

    steps: float = 0
    live: float = 0.0
    dead: float = 0.0

    def since(self, before: RowStats) -> RowStats:
        """The counts after `before`; all of them if they were reset in between."""
        if self.steps < before.steps:
            return self
        return RowStats(self.steps - before.steps, self.live - before.live, self.dead - before.dead)

    def __str__(self) -> str:
        """`rows: 41 % can reach the loss; 37 % padding, 22 % prompts`; "" if no graph counts its rows."""
        if not self.steps:
            return ""
        live, dead = (round(100 * part / self.steps) for part in (self.live, self.dead))
        return f"rows: {live} % can reach the loss; {dead} % padding, {max(0, 100 - live - dead)} % prompts"


_now = RowStats()


def row_stats(reset: bool = False) -> RowStats:
    """A copy of the counts; with `reset` they restart from 0."""
    return taken(_now, reset)


def count(live: float, dead: float) -> None:
    _now.steps += 1
    _now.live += live
    _now.dead += dead
