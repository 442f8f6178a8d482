"""How much of attention was computed: `fxpasses.attention_stats()`."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass
class AttentionStats:
    """Counts since the process began, or since the last reset, of attention on the CPU in forward; each recomputation
    of a checkpoint counts. A device's plans are not read, and not counted.

    calls: attentions that had a plan. tiled: those of them that ran in tiles.
    pairs: query times key, for each head: what there was. pairs_computed: what was computed of it.
    """

    calls: int = 0
    tiled: int = 0
    pairs: int = 0
    pairs_computed: int = 0


_now = AttentionStats()


def attention_stats(reset: bool = False) -> AttentionStats:
    """A copy of the counts; with `reset`, they start again from 0, so that they can be read once per step."""
    taken = replace(_now)
    if reset:
        _now.calls = _now.tiled = _now.pairs = _now.pairs_computed = 0
    return taken


def count(computed: int, pairs: int, tiled: bool) -> None:
    _now.calls += 1
    _now.tiled += tiled
    _now.pairs += pairs
    _now.pairs_computed += computed
