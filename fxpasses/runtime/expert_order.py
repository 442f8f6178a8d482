"""The order in which routed pairs reach their experts, as plain ATen operators that never make the host wait.

A *pair* is one token in one of its k slots. Groups are described by their *offsets*: the cumulative counts, int32 as
`torch.nn.functional.grouped_mm` wants them. `torch.bincount` would wait for the device (its output size is data), a
search in the sorted ids does not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExpertOrder(NamedTuple):
    """Pairs sorted by expert.

    order: int64 [P]; `order[offsets[e - 1]:offsets[e]]` are the pairs of expert e, in the order that they came in. The
    pairs of no expert follow at the end. counts: int32 [E]. offsets: int32 [E], where each group ends.
    """

    order: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor


def sort_by_expert(ids: torch.Tensor, experts: int, first: int = 0) -> ExpertOrder:
    """Sort pairs by expert, stably, on the device of `ids`.

    ids: integer [P], the expert of each pair. Flatten `idx` [T, k] for the order in which `torch.where(idx == e)` finds
    the pairs, and `idx.t()` for that of a mask [k, T], as from `one_hot(idx, E).permute(2, 1, 0)[e]`.
    experts, first: the experts `first` to `first + experts - 1` are wanted, for a rank that holds a slice of them; ids
    of others, -1 for dropped pairs among them, belong to no group.
    """
    local = ids - first
    local = torch.where((local >= 0) & (local < experts), local, experts)
    in_order, order = torch.sort(local, stable=True)
    wanted = torch.arange(experts, device=ids.device, dtype=local.dtype)
    offsets = torch.searchsorted(in_order, wanted, right=True, out_int32=True)
    return ExpertOrder(order, torch.diff(offsets, prepend=offsets.new_zeros(1)), offsets)


def row_groups(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """The group of each row: int64 [rows], from offsets [E]; E for the rows after the last group."""
    positions = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, positions, right=True)
