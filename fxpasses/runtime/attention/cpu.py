"""A plan's tiles, each by a call of PyTorch's flash kernel; the gradients of keys and values add up in place.

Short tiles of bfloat16 and float16 are computed in float32: the kernel's products there are small, and one of low
precision takes a fixed 13 microseconds (64 x 64 tokens, 8 heads, both ways: 1.5 ms in bfloat16, 0.4 in float32; 256 x
767: 16.9 and 17.5; 768 x 1279: 77 and 92). With matrix units for bfloat16 (AMX), all keep it; not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fxpasses.runtime.attention import dense, flash, masks, stats, written
from fxpasses.runtime.attention.plan import Kind, PlacedTile

_LONG = 768  # rows from which the kernel takes 256 at a time, so that products of low precision are large


class _Part(NamedTuple):
    """A call: its place in the operands. mask: additive, or None."""

    q: tuple[slice, slice, slice]
    k: tuple[slice, slice, slice]
    mask: torch.Tensor | None
    causal: bool
    dtype: torch.dtype


class _Casts:
    """Operands [B, H, T, D] as the kernel wants them: one head size, no strides within a head, the dtype of a tile."""

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


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    plan: torch.Tensor,
    scale: float | None,
    mask_dtype: torch.dtype | None,
    form: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [B, H, Tq, Dv] and the log-sum-exp [B, H, Tq]; see `operators.sparse_attention`."""
    view = masks.prepared(plan)
    shape = (*query.shape[:-1], key.shape[-2])
    flops = 2 * (query.shape[-1] + value.shape[-1])  # of a pair: its score, and its share of the output
    as_written = form in ("written", "filled") and view.plan.header.blind
    if view.plan.is_dense or as_written:
        stats.count(math.prod(shape), math.prod(shape), flops, tiled=False)
        if as_written and mask is not None:
            out = written.forward(query, key, value, mask, _scale(query, scale))
            return out, torch.zeros(query.shape[:-1], dtype=_accumulator(query.dtype))
        if form == "repeated":
            key, value = (dense.repeated(tensor, query.shape[1]) for tensor in (key, value))
        return dense.forward(query, key, value, _whole(mask, view, query.dtype, mask_dtype), scale)
    _check(view, query, key)
    computed = sum(part.pairs(*_broadcast(view, shape)) for part in view.plan.tiles)
    stats.count(computed, math.prod(shape), flops, tiled=True)
    width, scale = value.shape[-1], _scale(query, scale)
    operands = _Casts(max(query.shape[-1], width), query, key, value)
    out = _empty_like(query, width, zero=not _covers(view))
    logsumexp = torch.zeros(_rows_first(query.shape[:-1]), dtype=_accumulator(query.dtype)).transpose(1, 2)
    for part in _parts(view, plan, mask, shape, key.shape[1], query.dtype, mask_dtype):
        q, k, v = operands(part.dtype)
        tile_out, tile_logsumexp = flash.forward(q[part.q], k[part.k], v[part.k], part.mask, scale, part.causal)
        out[part.q] = tile_out[..., :width]
        logsumexp[part.q] = tile_logsumexp
    return out, logsumexp


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    plan: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float | None,
    mask_dtype: torch.dtype | None,
    form: str,
) -> dense.Gradients:
    """Gradients of query, key and value."""
    view = masks.prepared(plan)
    if form in ("written", "filled") and view.plan.header.blind and mask is not None:
        return written.backward(grad, query, key, value, mask, _scale(query, scale), form == "filled")
    if view.plan.is_dense:
        whole = _whole(mask, view, query.dtype, mask_dtype)
        heads = (key.shape[1], value.shape[1])
        if form == "repeated":
            key, value = (dense.repeated(tensor, query.shape[1]) for tensor in (key, value))
        to_q, to_k, to_v = dense.backward(grad, query, key, value, whole, out, logsumexp, scale)
        return to_q, dense.added_up(to_k, heads[0]), dense.added_up(to_v, heads[1])
    shape = (*query.shape[:-1], key.shape[-2])
    scale = _scale(query, scale)
    depth, width = query.shape[-1], value.shape[-1]
    operands = _Casts(max(depth, width), query, key, value, grad, out)
    q_grad = _empty_like(query, depth, zero=not _covers(view))
    accumulator = _accumulator(query.dtype)
    k_grad, v_grad = (_empty_like(key, size, zero=True, dtype=accumulator) for size in (depth, width))
    for part in _parts(view, plan, mask, shape, key.shape[1], query.dtype, mask_dtype):
        q, k, v, g, o = operands(part.dtype)
        to_q, to_k, to_v = flash.backward(
            g[part.q], q[part.q], k[part.k], v[part.k], o[part.q], logsumexp[part.q], part.mask, scale, part.causal
        )
        q_grad[part.q] = to_q[..., :depth]
        k_grad[part.k].add_(to_k[..., :depth])
        v_grad[part.k].add_(to_v[..., :width])
    return q_grad, k_grad.to(key.dtype), v_grad.to(value.dtype)


def _parts(
    view: masks.PreparedPlan,
    plan: torch.Tensor,
    mask: torch.Tensor | None,
    shape: tuple[int, ...],
    kv_heads: int,
    dtype: torch.dtype,
    mask_dtype: torch.dtype | None,
) -> Iterator[_Part]:
    """The calls to make: a tile, or where its heads are a part of a group of queries, a piece of it for each key."""
    batch, heads = _broadcast(view, shape)
    group = shape[1] // kv_heads
    for tile in view.plan.tiles:
        compute_dtype = _compute_dtype(dtype, tile.stop - tile.start)
        tile_mask = _tile_mask(view, plan, tile, mask, compute_dtype, mask_dtype)
        elements = slice(tile.b0, tile.b1 * batch)
        rows, columns = slice(tile.start, tile.stop), slice(tile.left, tile.right)
        for h0, h1 in _whole_groups(tile.h0, tile.h1 * heads, group):
            part_mask = tile_mask
            if tile_mask is not None and tile_mask.shape[1] > 1:
                part_mask = tile_mask[:, h0 - tile.h0 : h1 - tile.h0]
            kv_heads_of_part = slice(h0 // group, (h1 - 1) // group + 1)
            yield _Part(
                q=(elements, slice(h0, h1), rows),
                k=(elements, kv_heads_of_part, columns),
                mask=part_mask,
                causal=tile.kind == Kind.CAUSAL,
                dtype=compute_dtype,
            )


def _whole_groups(h0: int, h1: int, group: int) -> Iterator[tuple[int, int]]:
    if h0 % group == 0 and h1 % group == 0:
        yield h0, h1
        return
    while h0 < h1:
        stop = min(h1, (h0 // group + 1) * group)
        yield h0, stop
        h0 = stop


def _tile_mask(
    view: masks.PreparedPlan,
    plan: torch.Tensor,
    tile: PlacedTile,
    mask: torch.Tensor | None,
    dtype: torch.dtype,
    mask_dtype: torch.dtype | None,
) -> torch.Tensor | None:
    if tile.kind in (Kind.FULL, Kind.CAUSAL):
        return None
    if tile.kind == Kind.INTERVALS:
        return view.of_intervals(tile, dtype)[None, None]

    def make() -> torch.Tensor:
        said = masks.values(plan, tile, mask)
        if mask_dtype is not None and said.dtype != torch.bool:
            said = said.to(mask_dtype)
        made = masks.additive(said, dtype)
        return made if made.stride(-1) == 1 else made.contiguous()

    if mask is not None and mask.dtype == dtype and mask_dtype in (None, dtype) and mask.stride(-1) == 1:
        return make()  # a view, which is not to be kept
    return view.keep((tile, dtype, None if mask is None else mask.dtype, mask_dtype), make)


def _whole(
    mask: torch.Tensor | None, view: masks.PreparedPlan, dtype: torch.dtype, mask_dtype: torch.dtype | None
) -> torch.Tensor | None:
    """The mask as SDPA hands it on: bool ones as additive ones in the query's dtype, others as they are."""
    if mask is None:
        raise ValueError("a dense plan needs the mask that it was made from, but the mask is None")
    if mask.dtype != torch.bool:
        return mask if mask_dtype is None else mask.to(mask_dtype)
    return view.keep(("whole", dtype, mask.shape), lambda: masks.additive(mask, dtype))


def _compute_dtype(dtype: torch.dtype, rows: int) -> torch.dtype:
    low = dtype in (torch.bfloat16, torch.float16)
    keeps = rows >= _LONG or (dtype == torch.bfloat16 and _has_amx())
    return torch.float32 if low and not keeps else dtype


def _has_amx() -> bool:
    check = getattr(torch.cpu, "_is_amx_tile_supported", None)  # private: torch 2.11 to 2.14
    return bool(check and check())


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _rows_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1], *shape[3:])


def _empty_like(operand: torch.Tensor, size: int, zero: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[B, H, T, size], its heads beside each other, as the flash kernel lays it out."""
    shape = (*_rows_first(operand.shape[:-1]), size)
    make = operand.new_zeros if zero else operand.new_empty
    return make(shape, dtype=dtype or operand.dtype).transpose(1, 2)


def _covers(view: masks.PreparedPlan) -> bool:
    """Whether each row lies in a tile."""
    header = view.plan.header
    covered = sum((t.b1 - t.b0) * (t.h1 - t.h0) * (t.stop - t.start) for t in view.plan.tiles)
    return covered == header.batch * header.heads * header.rows


def _broadcast(view: masks.PreparedPlan, shape: tuple[int, ...]) -> tuple[int, int]:
    """How many elements and heads share what the plan says of one."""
    return shape[0] // view.plan.header.batch, shape[1] // view.plan.header.heads


def _check(view: masks.PreparedPlan, query: torch.Tensor, key: torch.Tensor) -> None:
    header = view.plan.header
    planned = (header.batch, header.heads, header.rows, header.columns)
    batch, heads, rows, columns = (*query.shape[:-1], key.shape[-2])
    if header.batch not in (1, batch) or header.heads not in (1, heads) or planned[2:] != (rows, columns):
        raise ValueError(f"the plan is for a mask {planned}, but attention is {(batch, heads, rows, columns)}")
