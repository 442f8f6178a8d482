"""The additive masks of a plan's partial tiles, made once and shared by all layers of a step.

Masks live as long as the plan's tensor, and as long as no other plans are used; a copy of a plan makes its own. Tiles
whose rows all begin at the left edge and have the same ends differ only in width: they are views of one mask, so the
bands of a causal document of T tokens hold rows x T values and not T x T.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxpasses.attention.runtime import plan as plans
from fxpasses.attention.runtime.plan import Kind, PlacedTile, Plan

KEPT_BYTES = 64 << 20  # of one plan; masks beyond that are made in each call
KEPT_PLANS = 4  # the last used: a step may have one for windows, one for whole documents, one for an encoder


@dataclass(frozen=True)
class _Edges:
    """Where a tile's rows begin and end, counted from its edges; tiles with equal edges share a mask.

    columns: the tile's width; None if every row begins at the left edge, so that the mask serves any width.
    """

    begins: tuple[int, ...]
    ends: tuple[int, ...]
    columns: int | None

    @classmethod
    def of(cls, plan: Plan, tile: PlacedTile) -> _Edges:
        rows = slice(tile.start, tile.stop)
        begins = (plan.first[tile.b0, tile.h0, rows] - tile.left).tolist()
        ends = (tile.right - plan.last[tile.b0, tile.h0, rows]).tolist()
        straight = not any(begins)
        return cls(tuple(begins), tuple(ends), None if straight else tile.right - tile.left)

    def make(self, columns: int, dtype: torch.dtype) -> torch.Tensor:
        column = torch.arange(columns)
        begins, ends = (torch.tensor(edge).unsqueeze(-1) for edge in (self.begins, self.ends))
        return additive((column >= begins) & (column < columns - ends), dtype)


@dataclass(eq=False)
class PreparedPlan:
    """A plan's numbers, and the masks made for it so far. It does not keep the plan's tensor alive."""

    plan: Plan
    version: int
    edges: dict[PlacedTile, int]
    shapes: list[_Edges]
    kept: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    bytes_kept: int = 0

    def of_intervals(self, tile: PlacedTile, dtype: torch.dtype) -> torch.Tensor:
        """The additive mask [rows, columns] of a tile whose rows are intervals."""
        index, columns = self.edges[tile], tile.right - tile.left
        shape = self.shapes[index]
        if shape.columns is not None:
            return self.keep((index, dtype), lambda: shape.make(columns, dtype))
        base = self.kept.get((index, dtype))
        if base is None or base.shape[-1] < columns:
            width = columns if base is None else max(columns, min(2 * base.shape[-1], self.plan.header.columns))
            self._forget((index, dtype))
            base = self.keep((index, dtype), lambda: shape.make(width, dtype))
        return base[:, base.shape[-1] - columns :]

    def keep(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The mask that is kept under `key`, or else a new one from `make`."""
        mask = self.kept.get(key)
        if mask is None:
            mask = make()
            if self.bytes_kept + mask.nbytes <= KEPT_BYTES:
                self.bytes_kept += mask.nbytes
                self.kept[key] = mask
        return mask

    def _forget(self, key: Hashable) -> None:
        mask = self.kept.pop(key, None)
        self.bytes_kept -= 0 if mask is None else mask.nbytes


_prepared = WeakTensorKeyDictionary()  # plan's tensor -> PreparedPlan; the last used is last


def prepared(tensor: torch.Tensor) -> PreparedPlan:
    """A plan's numbers, with the masks that other layers have made."""
    found = _prepared.pop(tensor, None)
    if found is None or found.version != _version(tensor):
        found = _prepare(tensor)
    _prepared[tensor] = found
    if len(_prepared) > KEPT_PLANS:
        for older in list(_prepared)[:-KEPT_PLANS]:
            _prepared.pop(older, None)
    return found


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _prepare(tensor: torch.Tensor) -> PreparedPlan:
    view = plans.read(tensor)
    plan = Plan(view.header, view.tiles, view.first.clone(), view.last.clone(), None)
    numbers: dict[_Edges, int] = {}
    edges = {}
    for tile in plan.tiles:
        if tile.kind == Kind.INTERVALS:
            edges[tile] = numbers.setdefault(_Edges.of(plan, tile), len(numbers))
    return PreparedPlan(plan, _version(tensor), edges, list(numbers))


def values(tensor: torch.Tensor, tile: PlacedTile, mask: torch.Tensor | None) -> torch.Tensor:
    """The part of the mask in a tile, bool or additive; from the plan's bits if `mask` is None."""
    if mask is None:
        plan = plans.read(tensor)
        if plan.bits is None:
            raise ValueError("this plan needs the mask that it was made from, but the mask is None")
        where = (slice(tile.b0, tile.b1), slice(tile.h0, tile.h1), slice(tile.start, tile.stop))
        bits, first, last = plan.bits[where], plan.first[where].unsqueeze(-1), plan.last[where].unsqueeze(-1)
        column = torch.arange(tile.left, tile.right)
        interval = (column >= first) & (column < last)
        no_bits = ~bits.any(-1, keepdim=True)  # rows that are intervals have none
        return plans.unpack(bits, tile.left, tile.right) | (no_bits & interval)
    mask = plans.four_dimensional(mask)
    # A broadcast dimension stays broadcast: the kernel takes it.
    b = slice(0, 1) if mask.shape[0] == 1 or mask.stride(0) == 0 else slice(tile.b0, tile.b1)
    h = slice(0, 1) if mask.shape[1] == 1 or mask.stride(1) == 0 else slice(tile.h0, tile.h1)
    rows = slice(0, 1) if mask.shape[2] == 1 else slice(tile.start, tile.stop)
    return mask[b, h, rows, tile.left : tile.right]


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a bool mask allows a pair and -inf elsewhere, as in SDPA; an additive mask in `dtype`."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), float("-inf"))
