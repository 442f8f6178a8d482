"""FlexAttention on CUDA devices, with a `BlockMask` that the device computes from the mask, without a host read.

A plan on a device is int32 [B, H, words]: the eight tables of a `BlockMask`, in blocks of 128 x 128 (the number of
partial blocks in each row of blocks and their columns, the same for full blocks, and both by columns, for gradients);
in a plan made in blocks, the mask's bits follow. FlexAttention enters the graph as PyTorch's own operator, and Inductor
writes its kernels. Private names: checked on torch 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fxpasses.attention.runtime import plan as plans
from fxpasses.attention.runtime.flash import Attention
from fxpasses.attention.runtime.intervals import ruled_out

BLOCK = 128
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LEAST_FEATURES = 16
_BITS = 32


def table_size(rows: int, columns: int) -> int:
    """The words of a plan without bits, for each element and head; accepts symbolic sizes."""
    q, k = _blocks(rows), _blocks(columns)
    return 2 * (q + k) + 4 * q * k


def plan_size_in_blocks(rows: int, columns: int) -> int:
    """The words of a plan with bits, likewise."""
    return table_size(rows, columns) + rows * _words(columns)


def plan_of(mask: torch.Tensor) -> torch.Tensor:
    """The plan of a mask [B, H, rows, columns], bool or additive, on its device."""
    some, every = _summary(mask)
    return _tables(some, every)


def plan_in_blocks(rows: plans.Rows, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """The plan of a mask that never exists as a whole; rows, shape: as in `plan.plan_in_blocks`, on the device."""
    step = BLOCK * max(1, (1 << 22) // max(1, BLOCK * shape[0] * shape[1] * shape[3]))
    parts, bits = [], []
    for start in range(0, shape[2], step):
        block = rows(start, min(shape[2], start + step))
        parts.append(_summary(block))
        bits.append(plans.pack(block))
    some, every = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    return torch.cat([_tables(some, every), torch.cat(bits, 2).flatten(2)], -1)


def block_mask(plan: torch.Tensor, rows: int, columns: int, mask_mod: Callable[..., torch.Tensor]) -> Any:
    """The `BlockMask` of a plan for attention of `rows` queries and `columns` keys. plan: without bits."""
    from torch.nn.attention.flex_attention import BlockMask

    q, k = _blocks(rows), _blocks(columns)
    shapes: list[Any] = [(q,), (q, k)] * 2 + [(k,), (k, q)] * 2
    parts = zip(plan.split([math.prod(shape) for shape in shapes], -1), shapes, strict=True)
    tables = (part.unflatten(-1, shape).contiguous() for part, shape in parts)
    arguments: Any = ((rows, columns), *tables, (BLOCK, BLOCK), mask_mod)
    return BlockMask(*arguments)


def attend(attention: Attention, plan: torch.Tensor) -> torch.Tensor:
    """`operators.sparse_attention` by FlexAttention's operator. The mask has 4 dimensions. Differentiable.

    Raises `ValueError` if Inductor has no kernel: for dtypes other than `DTYPES`, or heads of less than 16 features.
    """
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch.nn.attention.flex_attention import _apply_kernel_options

    query, key, value, mask, *_ = attention
    if query.dtype not in DTYPES:
        raise ValueError(f"FlexAttention has no kernel for {query.dtype}")
    if (features := min(query.shape[-1], value.shape[-1])) < LEAST_FEATURES:
        raise ValueError(f"FlexAttention takes heads of {LEAST_FEATURES} features or more, and these have {features}")
    rows, columns = query.shape[-2], key.shape[-2]
    b, h = plan.shape[0] > 1, plan.shape[1] > 1
    allows: Callable[..., torch.Tensor]
    if mask is None:
        words = _words(columns)
        plan, bits = plan.split([table_size(rows, columns), rows * words], -1)
        buffer = bits.unflatten(-1, (rows, words))
        allows = _bit_allows
    else:
        buffer = mask
        allows = _value if mask.dtype == torch.bool else _is_finite
    buffer = buffer if b else buffer[0]
    buffer = buffer if h else buffer.select(int(b), 0)
    place = _place(b, h)

    def mask_mod(b: Any, h: Any, q: Any, k: Any, values: torch.Tensor) -> torch.Tensor:
        return allows(values, place(b, h, q), k)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, *values: torch.Tensor) -> torch.Tensor:
        return score + _value(values[0], place(b, h, q), k) if values else score

    scored = () if mask is None or mask.dtype == torch.bool else (buffer,)
    blocks = block_mask(plan, rows, columns, mask_mod).as_tuple()
    options: Any = _apply_kernel_options(query, key, value, True, None, None)
    leaves = (query, key, value)
    is_traced = get_proxy_mode() is not None or any(type(leaf) is not FakeTensor for leaf in leaves)
    # Its gradients cannot be traced on fake tensors alone: a captured mask belongs to another fake mode.
    with contextlib.nullcontext() if is_traced else torch.no_grad():
        out = flex_attention(query, key, value, score_mod, blocks, attention.factor, options, scored, (buffer,))[0]
    if is_traced:
        return out
    return out.requires_grad_(torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves))


def _place(b: bool, h: bool) -> Callable[..., tuple[Any, ...]]:
    """An index into a mask that has no dimension for batch or heads if these are broadcast."""

    def place(element: Any, head: Any, row: Any) -> tuple[Any, ...]:
        return (*([element] if b else []), *([head] if h else []), row)

    return place


def _value(mask: torch.Tensor, place: tuple[Any, ...], column: Any) -> torch.Tensor:
    return mask[place + (column,)]


def _is_finite(mask: torch.Tensor, place: tuple[Any, ...], column: Any) -> torch.Tensor:
    return _value(mask, place, column) != float("-inf")


def _bit_allows(bits: torch.Tensor, place: tuple[Any, ...], column: Any) -> torch.Tensor:
    return ((_value(bits, place, column // _BITS) >> (column % _BITS)) & 1) == 1


def _summary(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether any pair of a 128 x 128 block is allowed, and whether each pair is (with value 0)."""
    if mask.dtype == torch.bool:
        allowed = every = mask
    else:
        allowed = ~(mask <= ruled_out(mask.dtype))
        blind = ~allowed.any(-1, keepdim=True)
        allowed = allowed | (blind & (mask != float("-inf")))
        every = allowed & (mask == 0)
    rows, columns = mask.shape[-2:]
    pad = (0, -columns % BLOCK, 0, -rows % BLOCK)

    def blocks(pairs: torch.Tensor) -> torch.Tensor:
        return F.pad(pairs, pad).unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))

    return blocks(allowed).any(-1).any(-2), blocks(every).all(-1).all(-2)


def _tables(some: torch.Tensor, every: torch.Tensor) -> torch.Tensor:
    partial, parts = some & ~every, []
    for kind in (partial, every, partial.mT, every.mT):
        parts.append(kind.sum(-1))
        parts.append(torch.argsort(kind.to(torch.int32), dim=-1, descending=True, stable=True).flatten(2))
    return torch.cat(parts, -1).to(torch.int32)


def _blocks(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK


def _words(columns: int) -> int:
    return (columns + _BITS - 1) // _BITS
