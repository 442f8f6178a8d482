"""The tiles of a plan, each one call of PyTorch's flash kernel; gradients of keys and values accumulate in place.

Short tiles of bfloat16 and float16 are computed in float32: the kernel's products are small there, and a product of low
precision takes a fixed 13 microseconds (64 x 64 tokens, 8 heads, forward and backward: 1.5 ms in bfloat16, 0.4 in
float32; 256 x 767: 16.9 and 17.5; 768 x 1279: 77 and 92). With AMX's matrix units, which are not measured, bfloat16
tiles keep their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fxpasses.attention.runtime import dense, flash, masks, stats, written
from fxpasses.attention.runtime.flash import Attention, Gradients
from fxpasses.attention.runtime.plan import Kind, PlacedTile
from fxpasses.base import sample

_LONG = 768  # from this many rows on, the kernel takes 256 at a time, so that products of low precision are large


class Planned(NamedTuple):
    """An attention by a plan, whose mask may be bool; mask_dtype, form: see `operators.sparse_attention_forward`."""

    attention: Attention
    plan: torch.Tensor
    mask_dtype: torch.dtype | None
    form: str


class _Part(NamedTuple):
    """One call of the kernel: the slices of its operands. mask: additive, or None."""

    q: tuple[slice, slice, slice]
    k: tuple[slice, slice, slice]
    mask: torch.Tensor | None
    causal: bool
    dtype: torch.dtype


class _Casts:
    """Operands [B, H, T, D] in the kernel's layout: one head size, unit strides within a head, the dtype of a tile."""

    def __init__(self, size: int, *tensors: torch.Tensor) -> None:
        self._size = size
        self._made: dict[torch.dtype | None, list[torch.Tensor]] = {None: list(tensors)}

    def __call__(self, dtype: torch.dtype) -> list[torch.Tensor]:
        if dtype not in self._made:
            self._made[dtype] = [self._cast(tensor, dtype) for tensor in self._made[None]]
        return self._made[dtype]

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        tensor = tensor.to(dtype)
        if tensor.shape[-1] < self._size:
            return F.pad(tensor, (0, self._size - tensor.shape[-1]))
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def forward(planned: Planned) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [B, H, Tq, Dv] and the log-sum-exp [B, H, Tq]; see `operators.sparse_attention`."""
    attention, view = planned.attention, masks.prepared(planned.plan)
    query, key, value, mask, *_ = attention
    shape = (*query.shape[:-1], key.shape[-2])
    flops = 2 * (query.shape[-1] + value.shape[-1])  # per pair: its score, and its share of the output
    accumulator = _accumulator(query.dtype)
    as_written = planned.form in ("written", "filled") and view.plan.header.blind
    if view.plan.is_dense or as_written:
        stats.count(math.prod(shape), math.prod(shape), flops, tiled=False)
        if as_written and mask is not None:
            return written.forward(attention), torch.zeros(query.shape[:-1], dtype=accumulator)
        return dense.forward(_as_dense(planned, view))
    _check(view, query, key)
    computed = sum(part.pairs(*_broadcast(view, shape)) for part in view.plan.tiles)
    stats.count(computed, math.prod(shape), flops, tiled=True)
    sample.take_tiles(shape[2], shape[3], view.plan.tiles)
    width, scale = value.shape[-1], attention.factor
    operands = _Casts(max(query.shape[-1], width), query, key, value)
    out = _empty_like(query, width, zero=not _covers(view))
    logsumexp = torch.zeros(_rows_first(query.shape[:-1]), dtype=accumulator).transpose(1, 2)
    for part in _parts(planned, view):
        q, k, v = operands(part.dtype)
        tile = Attention(q[part.q], k[part.k], v[part.k], part.mask, scale, part.causal)
        tile_out, logsumexp[part.q] = flash.forward(tile)
        out[part.q] = tile_out[..., :width]
    return out, logsumexp


def backward(planned: Planned, grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor) -> Gradients:
    """Gradients of query, key and value."""
    attention, view = planned.attention, masks.prepared(planned.plan)
    query, key, value, mask, *_ = attention
    if planned.form in ("written", "filled") and view.plan.header.blind and mask is not None:
        return written.backward(attention, grad, planned.form == "filled")
    if view.plan.is_dense:
        to_q, to_k, to_v = dense.backward(_as_dense(planned, view), grad, out, logsumexp)
        return to_q, dense.added_up(to_k, key.shape[1]), dense.added_up(to_v, value.shape[1])
    depth, width, scale = query.shape[-1], value.shape[-1], attention.factor
    operands = _Casts(max(depth, width), query, key, value, grad, out)
    q_grad = _empty_like(query, depth, zero=not _covers(view))
    accumulator = _accumulator(query.dtype)
    k_grad, v_grad = (_empty_like(key, size, zero=True, dtype=accumulator) for size in (depth, width))
    for part in _parts(planned, view):
        q, k, v, g, o = operands(part.dtype)
        tile = Attention(q[part.q], k[part.k], v[part.k], part.mask, scale, part.causal)
        to_q, to_k, to_v = flash.backward(tile, g[part.q], o[part.q], logsumexp[part.q])
        q_grad[part.q] = to_q[..., :depth]
        k_grad[part.k].add_(to_k[..., :depth])
        v_grad[part.k].add_(to_v[..., :width])
    return q_grad, k_grad.to(key.dtype), v_grad.to(value.dtype)


def _parts(planned: Planned, view: masks.PreparedPlan) -> Iterator[_Part]:
    """The calls to make: one for a tile, or one for each head of keys if the tile's heads split a group."""
    query, key = planned.attention[:2]
    batch, heads = _broadcast(view, query.shape)
    group = query.shape[1] // key.shape[1]
    for tile in view.plan.tiles:
        dtype = _compute_dtype(query.dtype, tile.stop - tile.start)
        tile_mask = _tile_mask(planned, view, tile, dtype)
        elements = slice(tile.b0, tile.b1 * batch)
        rows, columns = slice(tile.start, tile.stop), slice(tile.left, tile.right)
        for h0, h1 in _whole_groups(tile.h0, tile.h1 * heads, group):
            mask = tile_mask
            if tile_mask is not None and tile_mask.shape[1] > 1:
                mask = tile_mask[:, h0 - tile.h0 : h1 - tile.h0]
            kv_heads = slice(h0 // group, (h1 - 1) // group + 1)
            q, k = (elements, slice(h0, h1), rows), (elements, kv_heads, columns)
            yield _Part(q, k, mask, tile.kind == Kind.CAUSAL, dtype)


def _whole_groups(h0: int, h1: int, group: int) -> Iterator[tuple[int, int]]:
    if h0 % group == 0 and h1 % group == 0:
        yield h0, h1
        return
    while h0 < h1:
        stop = min(h1, (h0 // group + 1) * group)
        yield h0, stop
        h0 = stop


def _tile_mask(planned: Planned, view: masks.PreparedPlan, tile: PlacedTile, dtype: torch.dtype) -> torch.Tensor | None:
    if tile.kind in (Kind.FULL, Kind.CAUSAL):
        return None
    if tile.kind == Kind.INTERVALS:
        return view.of_intervals(tile, dtype)[None, None]
    mask, mask_dtype = planned.attention.mask, planned.mask_dtype

    def make() -> torch.Tensor:
        values = masks.values(planned.plan, tile, mask)
        if mask_dtype is not None and values.dtype != torch.bool:
            values = values.to(mask_dtype)
        made = masks.additive(values, dtype)
        return made if made.stride(-1) == 1 else made.contiguous()

    if mask is not None and mask.dtype == dtype and mask_dtype in (None, dtype) and mask.stride(-1) == 1:
        return make()  # it is a view, so there is nothing to keep
    return view.keep((tile, dtype, None if mask is None else mask.dtype, mask_dtype), make)


def _as_dense(planned: Planned, view: masks.PreparedPlan) -> Attention:
    """The attention that SDPA hands to its kernel: a bool mask becomes additive, in the query's dtype."""
    attention = planned.attention
    query, key, value, mask, *_ = attention
    if mask is None:
        raise ValueError("a dense plan needs the mask that it was made from, but the mask is None")
    if mask.dtype == torch.bool:
        bools = mask
        mask = view.keep(("whole", query.dtype, mask.shape), lambda: masks.additive(bools, query.dtype))
    elif planned.mask_dtype is not None:
        mask = mask.to(planned.mask_dtype)
    if planned.form == "repeated":
        key, value = (dense.repeated(tensor, query.shape[1]) for tensor in (key, value))
    return attention._replace(key=key, value=value, mask=mask)


def _compute_dtype(dtype: torch.dtype, rows: int) -> torch.dtype:
    low = dtype in (torch.bfloat16, torch.float16)
    keeps = rows >= _LONG or (dtype == torch.bfloat16 and _has_amx())
    return torch.float32 if low and not keeps else dtype


def _has_amx() -> bool:
    check = getattr(torch.cpu, "_is_amx_tile_supported", None)  # private: torch 2.11 to 2.14
    return bool(check and check())


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1], *shape[3:])


def _empty_like(operand: torch.Tensor, size: int, zero: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[B, H, T, size], with the heads of a token adjacent in memory, as in the flash kernel's results."""
    shape = (*_rows_first(operand.shape[:-1]), size)
    make = operand.new_zeros if zero else operand.new_empty
    return make(shape, dtype=dtype or operand.dtype).transpose(1, 2)


def _covers(view: masks.PreparedPlan) -> bool:
    """Whether the tiles contain every row."""
    header = view.plan.header
    covered = sum((t.b1 - t.b0) * (t.h1 - t.h0) * (t.stop - t.start) for t in view.plan.tiles)
    return covered == header.batch * header.heads * header.rows


def _broadcast(view: masks.PreparedPlan, shape: tuple[int, ...]) -> tuple[int, int]:
    """How many elements and heads share one element and one head of the plan."""
    return shape[0] // view.plan.header.batch, shape[1] // view.plan.header.heads


def _check(view: masks.PreparedPlan, query: torch.Tensor, key: torch.Tensor) -> None:
    header = view.plan.header
    planned = (header.batch, header.heads, header.rows, header.columns)
    batch, heads, rows, columns = (*query.shape[:-1], key.shape[-2])
    if header.batch not in (1, batch) or header.heads not in (1, heads) or planned[2:] != (rows, columns):
        raise ValueError(f"the plan is for a mask {planned}, but attention is {(batch, heads, rows, columns)}")
