"""Partitions of a joint graph that save less and recompute more, by PyTorch's own solver.

    activation_memory_budget   1.0                  0.5                         0.01
    saved for backward         all that products    what costs most to          next to nothing
                               and softmax need     recompute for its bytes

Recomputed random numbers would be others, where Inductor does not draw them from a seed that is saved; so the results
of operators that draw them are saved, as are those of operators whose effects nobody may repeat.

Private names, checked on torch 2.11, 2.13 and 2.15: `min_cut_rematerialization_partition` and its setting
`activation_memory_budget`, which may save inputs alone at 0, whatever a node says; and `node.meta["recompute"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxpasses.graph.copying import copy_graph_module

Partition = tuple[GraphModule, GraphModule]
# From the most that is saved to the least.
RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01)
_FORCED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def partitions(
    joint: GraphModule, partition: Callable[[GraphModule], Partition], undo_checkpoints: bool
) -> Callable[[float], Partition]:
    """A function that partitions a copy of `joint` at one of the `RATIOS`."""

    def at(ratio: float) -> Partition:
        gm = copy_graph_module(joint)
        for node in gm.graph.nodes:
            if undo_checkpoints and node.meta.get("recompute") in _FORCED:
                node.meta = {key: value for key, value in node.meta.items() if key not in ("recompute", "ac_graph_id")}
            if ratio < 1 and "recompute" not in node.meta and _happens_once(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        settings: Any = torch._functorch.config
        with settings.patch(activation_memory_budget=ratio):
            return partition(gm)

    return at


def least_recomputing(
    at: Callable[[float], Any], peak_of: Callable[[Any], int], most: int, ratios: Sequence[float] = RATIOS
) -> tuple[float, Any, int]:
    """The largest ratio whose partition has a peak of at most `most` bytes, with the partition and its peak.

    If there is none, the ratio with the lowest peak. The peak is taken to fall with the ratio, so that few are tried.
    """
    tried: dict[int, tuple[Any, int]] = {}

    def fits(place: int) -> bool:
        if place not in tried:
            found = at(ratios[place])
            tried[place] = found, peak_of(found)
        return tried[place][1] <= most

    low, high = 0, len(ratios) - 1
    if not fits(low) and fits(high):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
    elif not fits(low):
        any([fits(place) for place in range(high)])  # recomputed at one time, tensors may need more than saved ones
    fitting = [place for place, (_, peak) in tried.items() if peak <= most]
    best = min(fitting) if fitting else min(tried, key=lambda place: tried[place][1])
    return ratios[best], *tried[best]


def _happens_once(node: Node) -> bool:
    """Whether running a node again may give another result, or repeat an effect."""
    tags: Any = getattr(node.target, "tags", ())
    seeded = torch.Tag.nondeterministic_seeded in tags
    schema = getattr(node.target, "_schema", None)
    return seeded or bool(schema is not None and schema.is_mutable)
