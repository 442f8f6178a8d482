"""Grouped products in Triton, for devices on which PyTorch has no kernel for them; nothing here waits for the device.

The offsets stay on the device. The host knows only how many rows there are, so it launches as many programs as could be
needed: N rows in G groups fill at most `ceil(N / block) + G - 1` tiles of `block` rows. Each program finds its group by
a search in the offsets, and returns if no tile is left for it. The rows after the last group form one more group, whose
product is zero. Offsets that do not rise give wrong rows, but reach no memory outside the operands.

Products accumulate in float32. Products of float32 round their operands to TF32 if
`torch.backends.cuda.matmul.fp32_precision` says so, as `torch.mm` does.

Weights in E tensors are not copied into one: that would read and write all experts' weights for each product, and hold
a second copy of them. Their addresses are arguments of the kernel, and not a table in the device's memory: the host
would have to fill the table before each launch, and a replayed CUDA graph would fill it with what the host holds then.

Needs Triton 3.6 or later. Block sizes were chosen to fit the shared memory of each supported GPU, which tests check;
they were not measured on any.
"""

# mypy: allow-untyped-defs
# Triton determines the types of the kernels' arguments.

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Weights = Tensor | Sequence[Tensor]

MOST_LISTED = 256  # addresses that a kernel takes: arguments may fill 4 KiB


@dataclass(frozen=True)
class Tiles:
    """The tile of a product that a program computes: [rows, columns], `depth` of the contraction at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_HALF = Tiles(64, 128, 32, warps=4, stages=3)
_FLOAT = Tiles(64, 64, 32, warps=4, stages=3)


def tiles(dtype: torch.dtype) -> Tiles:
    return _FLOAT if dtype == torch.float32 else _HALF


def matmul(rows: Tensor, weights: Weights, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """`rows[a:b] @ weights[e] (+ bias[e])` for each group, zeros for the rows after the last: [N, K] -> [N, M]."""
    matrices, depth_stride, width_stride = _addressed(weights)
    depth, width = weights[0].shape
    if transposed:
        depth, width, depth_stride, width_stride = width, depth, width_stride, depth_stride
    out = rows.new_empty(rows.shape[0], width)
    if out.numel() == 0:
        return out
    groups, tile = offsets.shape[0], tiles(rows.dtype)
    stacked = matrices if isinstance(matrices, Tensor) else None
    grid = (_cdiv(rows.shape[0], tile.rows) + groups, _cdiv(width, tile.columns))
    with _on(rows.device):
        _matmul[grid](
            *(rows, matrices, offsets, bias, out, rows.shape[0], depth, width, groups),
            *(*rows.stride(), 0 if stacked is None else stacked.stride(0), depth_stride, width_stride),
            *((0, 0) if bias is None else bias.stride()),
            LISTED=0 if stacked is not None else groups,
            HAS_BIAS=bias is not None,
            PRECISION=_precision(rows.dtype),
            GROUPS=triton.next_power_of_2(groups + 1),
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            BLOCK_DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def outer(left: Tensor, right: Tensor, offsets: Tensor, of_empty: float = 0.0) -> Tensor:
    """`left[a:b].T @ right[a:b]` for each group, zeros for empty ones, 0.0 or -0.0: [N, A], [N, B] -> [E, A, B]."""
    out = left.new_empty(offsets.shape[0], left.shape[1], right.shape[1])
    _outer_into(out, left, right, offsets, of_empty)
    return out


def outer_list(left: Tensor, right: Tensor, offsets: Tensor, of_empty: float = 0.0) -> list[Tensor]:
    """As `outer`, each product in memory of its own: E tensors [A, B]."""
    if offsets.shape[0] > MOST_LISTED:
        return [product.clone() for product in outer(left, right, offsets, of_empty)]
    out = [left.new_empty(left.shape[1], right.shape[1]) for _ in range(offsets.shape[0])]
    _outer_into(tuple(out), left, right, offsets, of_empty)
    return out


def _outer_into(
    out: Tensor | tuple[Tensor, ...], left: Tensor, right: Tensor, offsets: Tensor, of_empty: float
) -> None:
    groups, tile = offsets.shape[0], tiles(left.dtype)
    height, width = left.shape[1], right.shape[1]
    if height * width == 0:
        return
    grid = (_cdiv(height, tile.rows) * _cdiv(width, tile.columns), groups)
    with _on(left.device):
        _outer[grid](
            *(left, right, offsets, out, left.shape[0], height, width, *left.stride(), *right.stride()),
            LISTED=0 if isinstance(out, Tensor) else groups,
            SIGN=math.copysign(1.0, of_empty),
            PRECISION=_precision(left.dtype),
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            BLOCK_DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def total(rows: Tensor, offsets: Tensor, of_empty: float = 0.0) -> Tensor:
    """The sum of each group's rows: [N, M] -> [E, M]."""
    out = rows.new_empty(offsets.shape[0], rows.shape[1])
    if out.numel() == 0:
        return out
    tile = tiles(rows.dtype)
    with _on(rows.device):
        _total[(_cdiv(rows.shape[1], tile.columns), offsets.shape[0])](
            *(rows, offsets, out, rows.shape[0], rows.shape[1], *rows.stride()),
            SIGN=math.copysign(1.0, of_empty),
            BLOCK_COLUMNS=tile.columns,
            BLOCK_DEPTH=tile.depth,
            num_warps=tile.warps,
        )
    return out


# Kernels. Triton specialises each by whether a number is 1, a multiple of 16, or neither; but not by `size`, which
# changes with the batch.


@triton.jit
def _find_group(tile, offsets, size, groups, GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """(group, start, end): the tile's rows, at most BLOCK_ROWS from `start` on and before `end`; none if there is no
    such tile. GROUPS: a power of two above `groups`."""
    index = tl.arange(0, GROUPS)
    ends = tl.load(offsets + index, mask=index < groups, other=0).to(tl.int32)
    starts = tl.load(offsets + index - 1, mask=(index > 0) & (index <= groups), other=0).to(tl.int32)
    ends = tl.minimum(tl.maximum(tl.where(index < groups, ends, size), 0), size)
    starts = tl.minimum(tl.maximum(tl.where(index <= groups, starts, size), 0), size)
    count = (tl.maximum(ends - starts, 0) + BLOCK_ROWS - 1) // BLOCK_ROWS
    group = tl.sum((tl.cumsum(count, 0) <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(index < group, count, 0), 0)
    start = tl.sum(tl.where(index == group, starts, 0), 0) + (tile - first) * BLOCK_ROWS
    return group, start, tl.sum(tl.where(index == group, ends, 0), 0)


@triton.jit
def _address(tensors, group, stride, LISTED: tl.constexpr):
    """Where the matrix of a group starts: in a stack, or one of LISTED tensors."""
    if LISTED == 0:
        return tensors + group.to(tl.int64) * stride
    else:
        found = tensors[0]
        for other in tl.static_range(1, LISTED):
            found = tl.where(group == other, tensors[other], found)
        return found


@triton.jit(do_not_specialize=["size"])
def _matmul(
    rows,
    weights,
    offsets,
    bias,
    out,
    size,
    depth,
    width,
    groups,
    row_stride,
    row_step,
    weight_stride,
    depth_stride,
    width_stride,
    bias_stride,
    bias_step,
    LISTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    group, start, end = _find_group(tl.program_id(0), offsets, size, groups, GROUPS, BLOCK_ROWS)
    if start >= end:
        return
    row = start + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inner = tl.arange(0, BLOCK_DEPTH)
    in_rows, in_columns = (row < end)[:, None], (column < width)[None, :]
    matrix = _address(weights, tl.minimum(group, groups - 1), weight_stride, LISTED)
    left = rows + row.to(tl.int64)[:, None] * row_stride + inner[None, :] * row_step
    right = matrix + inner[:, None] * depth_stride + column[None, :] * width_stride
    products = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for done in range(0, tl.where(group < groups, depth, 0), BLOCK_DEPTH):
        inside = done + inner < depth
        one = tl.load(left, mask=in_rows & inside[None, :], other=0.0)
        other = tl.load(right, mask=inside[:, None] & in_columns, other=0.0)
        products = tl.dot(one, other, products, input_precision=PRECISION)
        left += BLOCK_DEPTH * row_step
        right += BLOCK_DEPTH * depth_stride
    if HAS_BIAS:
        added = bias + group.to(tl.int64) * bias_stride + column * bias_step
        biased = tl.where(group < groups, width, 0)
        products += tl.load(added, mask=column < biased, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, products.to(out.dtype.element_ty), mask=in_rows & in_columns)


@triton.jit
def _bounds(group, offsets, size):
    """The rows of a group."""
    start = tl.load(offsets + group - 1, mask=group > 0, other=0).to(tl.int32)
    end = tl.load(offsets + group).to(tl.int32)
    return tl.maximum(start, 0), tl.minimum(end, size)


@triton.jit(do_not_specialize=["size"])
def _outer(
    left,
    right,
    offsets,
    out,
    size,
    height,
    width,
    left_stride,
    left_step,
    right_stride,
    right_step,
    LISTED: tl.constexpr,
    SIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    group = tl.program_id(1)
    across = (width + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    row = tl.program_id(0) // across * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) % across * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    in_rows, in_columns = (row < height)[:, None], (column < width)[None, :]
    start, end = _bounds(group, offsets, size)
    products = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for done in range(start, end, BLOCK_DEPTH):
        inner = done + tl.arange(0, BLOCK_DEPTH)
        inside, inner = inner < end, inner.to(tl.int64)
        one = left + inner[None, :] * left_stride + row[:, None] * left_step
        other = right + inner[:, None] * right_stride + column[None, :] * right_step
        one = tl.load(one, mask=in_rows & inside[None, :], other=0.0)
        other = tl.load(other, mask=inside[:, None] & in_columns, other=0.0)
        products = tl.dot(one, other, products, input_precision=PRECISION)
    products *= tl.where(start < end, 1.0, SIGN)  # a constant of -0.0 would become 0.0
    matrix = _address(out, group, height.to(tl.int64) * width, LISTED)
    target = matrix + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, products.to(matrix.dtype.element_ty), mask=in_rows & in_columns)


@triton.jit(do_not_specialize=["size"])
def _total(
    rows,
    offsets,
    out,
    size,
    width,
    row_stride,
    row_step,
    SIGN: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    group = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    start, end = _bounds(group, offsets, size)
    sums = tl.zeros((BLOCK_DEPTH, BLOCK_COLUMNS), tl.float32)
    for done in range(start, end, BLOCK_DEPTH):
        row = done + tl.arange(0, BLOCK_DEPTH)
        part = rows + row.to(tl.int64)[:, None] * row_stride + column[None, :] * row_step
        sums += tl.load(part, mask=(row < end)[:, None] & (column < width)[None, :], other=0.0).to(tl.float32)
    target = out + group.to(tl.int64) * width + column
    found = tl.sum(sums, 0) * tl.where(start < end, 1.0, SIGN)
    tl.store(target, found.to(out.dtype.element_ty), mask=column < width)


# Launching


def _addressed(weights: Weights) -> tuple[Any, int, int]:
    """(the stack, or a tuple of tensors of the same strides, the strides of a matrix)."""
    if not isinstance(weights, Tensor):
        if len(weights) > MOST_LISTED:
            weights = torch.stack(list(weights))
        elif len({weight.stride() for weight in weights}) > 1:
            weights = [weight.contiguous() for weight in weights]
    matrices = weights if isinstance(weights, Tensor) else tuple(weights)
    first, second = weights[0].stride()
    return matrices, first, second


def _precision(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Make `device` current: Triton launches on the current device, which need not be the operands'."""
    if device.type == "cpu":  # in Triton's interpreter
        yield
    else:
        with torch.accelerator.device_index(device.index):
            yield


def _cdiv(number: int, by: int) -> int:
    return -(-number // by)
