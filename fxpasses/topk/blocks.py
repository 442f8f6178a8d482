"""`torch.topk` of long rows in two stages: the blocks with the greatest elements, then the elements of these blocks.

    maxima = x.unflatten(-1, (-1, 128)).amax(-1)       # reads the rows once, at the speed of memory
    blocks = maxima.topk(k).indices                    # no other block has an element that k elements do not exceed
    values = x.unflatten(-1, (-1, 128))[blocks].topk(k)

The two-stage top-k in NVIDIA's account of MLPerf Training v1.1 takes the top-k of each part of a row, then of these. On
a CPU that gains less: PyTorch's kernel copies each row, or each part of one, into pairs of value and index before it
selects, which takes most of its time; the maxima need no pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

DEVICES = frozenset({"cpu"})  # the devices on which it was measured
DTYPES = frozenset({
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
})  # fmt: skip


# Measured on a CPU for 1 to 64 rows of 10^4 to 10^7 elements (bench case `split_topk`). Below these sizes the calls
# cost more than the row; a second stage of more than 1/32 of a row costs what the first one saves.
_LEAST_COLUMNS, _LEAST_NARROW_COLUMNS, _LEAST_ELEMENTS, _MOST_OF_A_ROW = 10_000, 100_000, 250_000, 32
_LENGTHS = (128, 64, 32)  # longer blocks have fewer maxima, and more elements in the second stage


def block_length(rows: int, columns: int, k: int, dtype: torch.dtype, largest: bool) -> int:
    """The elements of a block, or 0 if one stage is as fast, for rows of `columns` elements of which k are wanted."""
    if dtype is torch.int64 and not largest:  # PyTorch has no vectorised minimum of int64
        return 0
    narrow = dtype in (torch.bfloat16, torch.float16)  # these are converted to float32, slowly in short blocks
    lengths = _LENGTHS[: 1 if narrow else None]
    if columns < (_LEAST_NARROW_COLUMNS if narrow else _LEAST_COLUMNS) or rows * columns < _LEAST_ELEMENTS or k < 1:
        return 0
    return next((length for length in lengths if _MOST_OF_A_ROW * k * length <= columns), 0)


def lies_along(tensor: Tensor, dim: int) -> bool:
    """Whether the elements along a dimension are neighbours in memory; otherwise blocks are slow to read."""
    return tensor.ndim > 0 and tensor.stride(dim) == 1


@custom_op("fxpasses::split_topk", mutates_args=())
def split_topk(tensor: Tensor, k: int, dim: int, largest: bool, sorted: bool) -> tuple[Tensor, Tensor]:
    """`torch.topk`, with the same values and gradients; among equal values another one may win.

    Returns values and int64 indices, contiguous, of the sizes of `tensor` with k along `dim`. NaN is the greatest.
    """
    found = None
    if tensor.device.type in DEVICES and tensor.dtype in DTYPES and lies_along(tensor, dim):
        columns = tensor.shape[dim]
        length = block_length(tensor.numel() // max(1, columns), columns, k, tensor.dtype, largest)
        if length:
            found = _by_blocks(tensor.movedim(dim, -1), k, length, largest, sorted)
    if found is None:
        values, indices = torch.topk(tensor, k, dim, largest, sorted)
        return values, indices
    return found[0].movedim(-1, dim).contiguous(), found[1].movedim(-1, dim).contiguous()


def _by_blocks(rows: Tensor, k: int, length: int, largest: bool, sorted: bool) -> tuple[Tensor, Tensor] | None:
    """The top-k along the last dimension; None if the extremes of blocks do not determine their order."""
    count = rows.shape[-1] // length
    whole = count * length
    blocks = rows[..., :whole].unflatten(-1, (count, length))
    extremes = blocks.amax(-1) if largest else blocks.amin(-1)
    if not largest and rows.is_floating_point() and extremes.isnan().any():
        return None  # the least element of a block with a NaN is not known
    chosen = extremes.topk(k, -1, largest, sorted=False).indices
    candidates = blocks.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, length)).flatten(-2)
    if whole < rows.shape[-1]:
        candidates = torch.cat([candidates, rows[..., whole:]], -1)
    values, places = candidates.topk(k, -1, largest, sorted)
    block = (places // length).clamp(max=k - 1)
    indices = chosen.gather(-1, block) * length + places % length
    if whole < rows.shape[-1]:
        indices = torch.where(places < k * length, indices, places + (whole - k * length))
    return values, indices


@split_topk.register_fake
def _(tensor: Tensor, k: int, dim: int, largest: bool, sorted: bool) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk(tensor, k, dim, largest, sorted)
    return values, indices


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensor, _, ctx.dim, _, _ = inputs
    ctx.sizes = tensor.shape
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    (indices,) = ctx.saved_tensors
    return grad.new_zeros(ctx.sizes).scatter(ctx.dim, indices, grad), None, None, None, None


split_topk.register_autograd(_backward, setup_context=_save)
