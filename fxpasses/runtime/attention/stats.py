"""How much of attention was computed: `fxpasses.attention_stats()`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from fxpasses.units import amount


@dataclass
class AttentionStats:
    """Counts since the process began, or since the last reset, of attention on the CPU in forward; each recomputation
    of a checkpoint counts. A device's plans are not read, and not counted.

    calls: attentions that had a plan. tiled: those of them that ran in tiles.
    pairs: query times key, for each head: what there was. pairs_computed: what was computed of it. flops and
    flops_computed: what their two products take, two for each multiply-add.
    """

    calls: int = 0
    tiled: int = 0
    pairs: int = 0
    pairs_computed: int = 0
    flops: int = 0
    flops_computed: int = 0

    def since(self, before: AttentionStats) -> AttentionStats:
        """What came after `before`; all of it where the counts were reset meanwhile."""
        if any(getattr(self, field.name) < getattr(before, field.name) for field in fields(self)):
            return self
        return AttentionStats(*(getattr(self, field.name) - getattr(before, field.name) for field in fields(self)))

    def __str__(self) -> str:
        """`attention: 43 % of 4.2 M pairs of tokens, 46 M of 107 M FLOPs of forward`; "" where none had a plan."""
        if not self.pairs:
            return ""
        share = f"{100 * self.pairs_computed / self.pairs:.0f} % of {amount(self.pairs)} pairs of tokens"
        return f"attention: {share}, {amount(self.flops_computed)} of {amount(self.flops)} FLOPs of forward"


_now = AttentionStats()


def attention_stats(reset: bool = False) -> AttentionStats:
    """A copy of the counts; with `reset`, they start again from 0, so that they can be read once per step."""
    taken = replace(_now)
    if reset:
        for field in fields(_now):
            setattr(_now, field.name, 0)
    return taken


def count(computed: int, pairs: int, flops: int, tiled: bool) -> None:
    """flops: for each pair."""
    _now.calls += 1
    _now.tiled += tiled
    _now.pairs += pairs
    _now.pairs_computed += computed
    _now.flops += pairs * flops
    _now.flops_computed += computed * flops
