"""How much of attention is computed: `fxpasses.attention_stats()`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fxpasses.base.counts import taken
from fxpasses.base.units import amount


@dataclass
class AttentionStats:
    """Counts of forward attention on the CPU since the process began, or since the last reset.

    Each recomputation in a checkpoint counts. Plans on a device are never read, so they are not counted.

    calls: attentions with a plan. tiled: those that ran in tiles. pairs: all pairs of query and key, per head.
    pairs_computed: those that were computed. flops, flops_computed: the operations of their two products, two for each
    multiply-add.
    """

    calls: int = 0
    tiled: int = 0
    pairs: int = 0
    pairs_computed: int = 0
    flops: int = 0
    flops_computed: int = 0

    def since(self, before: AttentionStats) -> AttentionStats:
        """The counts after `before`; all of them if they were reset in between."""
        if any(getattr(self, field.name) < getattr(before, field.name) for field in fields(self)):
            return self
        return AttentionStats(*(getattr(self, field.name) - getattr(before, field.name) for field in fields(self)))

    def __str__(self) -> str:
        """`attention: 43 % of 4.2 M pairs of tokens, 46 M of 107 M FLOPs of forward`; "" if no attention had a plan."""
        if not self.pairs:
            return ""
        share = f"{100 * self.pairs_computed / self.pairs:.0f} % of {amount(self.pairs)} pairs of tokens"
        return f"attention: {share}, {amount(self.flops_computed)} of {amount(self.flops)} FLOPs of forward"


_now = AttentionStats()


def attention_stats(reset: bool = False) -> AttentionStats:
    """A copy of the counts; with `reset` they restart from 0, to be read once per step."""
    return taken(_now, reset)


def count(computed: int, pairs: int, flops: int, tiled: bool) -> None:
    """Count one attention. flops: per pair."""
    _now.calls += 1
    _now.tiled += tiled
    _now.pairs += pairs
    _now.pairs_computed += computed
    _now.flops += pairs * flops
    _now.flops_computed += computed * flops
