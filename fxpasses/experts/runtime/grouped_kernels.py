"""The implementation of the operators of `grouped_linear.py`, on tensors with data and below autograd.

`grouped_ways.py` chooses between three ways: `torch.nn.functional.grouped_mm`, `grouped_triton.py`, and one `mm` for
each group that has rows, which is the call that a loop over the experts makes. In the first two ways the host waits for
nothing. The last needs the offsets on the host: each operator waits once for offsets on a device, unless there are no
rows. With offsets on the CPU nothing waits, wherever the rows are. On the CPU `F.grouped_mm` is the same loop in C++;
it is called if its `mm` get operands and results that are aligned as in the loop, so that no bit differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from types import ModuleType

import torch
import torch.nn.functional as F

from fxpasses.experts.runtime import grouped_ways
from fxpasses.experts.runtime.grouped_ways import LIBRARY_DTYPES, VECTOR, Way

Weights = torch.Tensor | Sequence[torch.Tensor]

_CACHE_LINE = 64  # bytes: what PyTorch's CPU allocator aligns to


def matmul(
    rows: torch.Tensor, weights: Weights, offsets: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """`rows[a:b] @ weights[e] (+ bias[e])` for each group, zeros for the rows after the last: [N, K] -> [N, M]."""
    width = weights[0].shape[0 if transposed else 1]
    way = _way(rows, rows.shape[1], width)
    if way is Way.TRITON:
        return _triton().matmul(rows, weights, _on_device(offsets, rows), bias, transposed)
    if way is Way.LIBRARY:
        stacked = weights if isinstance(weights, torch.Tensor) else torch.stack(list(weights))
        ends = _on_device(offsets, rows)
        out = F.grouped_mm(_vectorised(rows), _vectorised(stacked.mT if transposed else stacked), offs=ends)
        if bias is not None:
            out = out + expand(bias, ends, rows.shape[0])
        # The kernel leaves these rows uninitialised, and a caller that multiplies by a mask would get 0 * NaN.
        return out.masked_fill_((torch.arange(rows.shape[0], device=rows.device) >= ends[-1]).unsqueeze(1), 0)
    sizes = _sizes(offsets, rows.shape[0])
    if bias is None and isinstance(weights, torch.Tensor) and is_library_loop(rows, weights, width):
        out = F.grouped_mm(rows, weights.mT if transposed else weights, offs=offsets.to(torch.int32))
        out[rows.shape[0] - sizes[-1] :].zero_()
        return out
    out = rows.new_empty(rows.shape[0], width)
    matrices = _matrices(weights, transposed)
    groups = zip(sizes, _parts(rows, sizes), matrices, out.split(sizes), strict=False)  # the rest has no weight
    for group, (size, part, matrix, target) in enumerate(groups):
        if size == 0:
            continue
        if bias is None:
            _write(target, torch.mm, part, matrix)
        else:
            _write(target, torch.addmm, bias[group], part, matrix)
    out[rows.shape[0] - sizes[-1] :].zero_()
    return out


def outer(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, of_empty: float = 0.0) -> torch.Tensor:
    """`left[a:b].T @ right[a:b]` for each group, zeros for empty ones: [N, A], [N, B] -> [E, A, B].

    of_empty: 0.0 or -0.0.
    """
    shape = (offsets.shape[0], left.shape[1], right.shape[1])
    way = _way(left, *shape[1:])
    if way is Way.TRITON:
        return _triton().outer(left, right, _on_device(offsets, left), of_empty)
    if way is Way.LIBRARY:
        ends = _on_device(offsets, left)
        out = F.grouped_mm(_vectorised(left).t(), _vectorised(right), offs=ends)
        # Empty groups stay uninitialised on compute capability 10 (pytorch/pytorch#172439), and are zero on 9.
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        return out.masked_fill_(empty[:, None, None], of_empty)
    sizes = _sizes(offsets, left.shape[0])
    if is_library_loop(left, right, shape[2]) and is_library_loop(right, left, 0):
        out = F.grouped_mm(left.t(), right, offs=offsets.to(torch.int32))
        for size, target in zip(sizes, out.unbind(0), strict=False):
            if size == 0:
                target.fill_(of_empty)
        return out
    out = left.new_empty(shape)
    for size, one, other, target in zip(sizes, _parts(left, sizes), _parts(right, sizes), out.unbind(0), strict=False):
        if size == 0:
            target.fill_(of_empty)
        else:
            _write(target, torch.mm, one.t(), other)
    return out


def outer_list(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, of_empty: float = 0.0
) -> list[torch.Tensor]:
    """`outer` with each product in memory of its own: E tensors [A, B]."""
    way = _way(left, left.shape[1], right.shape[1])
    if way is Way.TRITON:
        return _triton().outer_list(left, right, _on_device(offsets, left), of_empty)
    if way is Way.LIBRARY:
        return [product.clone() for product in outer(left, right, offsets, of_empty)]
    sizes = _sizes(offsets, left.shape[0])
    groups, shape = (
        zip(sizes[:-1], _parts(left, sizes), _parts(right, sizes), strict=False),
        (left.shape[1], right.shape[1]),
    )
    return [torch.mm(one.t(), other) if size else left.new_full(shape, of_empty) for size, one, other in groups]


def total(rows: torch.Tensor, offsets: torch.Tensor, of_empty: float = 0.0) -> torch.Tensor:
    """The sum of each group's rows: [N, M] -> [E, M]."""
    way = _way(rows, rows.shape[1])
    if way is Way.TRITON:
        return _triton().total(rows, _on_device(offsets, rows), of_empty)
    if way is Way.LIBRARY:
        # A product with ones accumulates in float32 and in a fixed order; `index_add_` with its atomics does not.
        ones = rows.new_ones(rows.shape[0], VECTOR // rows.element_size())
        return outer(ones, rows, offsets, of_empty)[:, 0].contiguous()
    out = rows.new_empty(offsets.shape[0], rows.shape[1])
    for part, target in zip(rows.split(_sizes(offsets, rows.shape[0])), out.unbind(0), strict=False):
        if part.shape[0] == 0:
            target.fill_(of_empty)
        else:
            torch.sum(part, 0, out=target)
    return out


def expand(values: torch.Tensor, offsets: torch.Tensor, size: int) -> torch.Tensor:
    """`values[e]` for each row of group e, zeros for the rows after the last: [E, M] -> [size, M]."""
    padded = torch.cat([values, values.new_zeros(1, values.shape[1])])
    ends = offsets.to(values.device, non_blocking=True)
    # `torch.bincount` would wait for the device, as its output's size depends on data; searching the offsets does not.
    groups = torch.searchsorted(ends, torch.arange(size, device=ends.device, dtype=ends.dtype), right=True)
    return padded.index_select(0, groups)


def copy_to_host(offsets: torch.Tensor) -> torch.Tensor:
    """A copy of the offsets in CPU memory of its own; waits for them."""
    return offsets.to("cpu", copy=True)


def _matrices(weights: Weights, transposed: bool) -> Sequence[torch.Tensor]:
    if isinstance(weights, torch.Tensor):  # transposed once: with many experts, one call for each would add up
        return (weights.mT if transposed else weights).unbind(0)
    return [weight.t() for weight in weights] if transposed else weights


def _sizes(offsets: torch.Tensor, size: int) -> list[int]:
    """The number of rows in each group, then of the rows after the last group; checks the offsets."""
    if size == 0 and offsets.device.type != "cpu":
        return [0] * (offsets.shape[0] + 1)  # not worth waiting for
    ends = offsets.tolist()
    sizes = [end - start for start, end in zip([0, *ends], [*ends, size], strict=True)]
    if min(sizes) < 0:
        raise ValueError(f"offsets must rise from 0 to at most the {size} rows, but they are {ends}")
    return sizes


def _parts(rows: torch.Tensor, sizes: list[int]) -> Iterable[torch.Tensor]:
    """The rows of each group, aligned like a tensor of its own.

    BLAS libraries also choose kernels by alignment, and kernels round differently: unaligned, groups of rows whose
    width is not a multiple of 64 bytes differ from the loop in the last bit (seen with MKL 2024.2).
    """
    parts = rows.split(sizes)
    if starts_aligned(rows.stride(0), rows):  # one check for all groups, which are many and small
        return parts
    starts = accumulate(sizes, initial=0)
    return (
        part if starts_aligned(start * rows.stride(0), rows) else part.clone()
        for part, start in zip(parts, starts, strict=False)
    )


def _write(out: torch.Tensor, product: Callable[..., torch.Tensor], *operands: torch.Tensor) -> None:
    """`out.copy_(product(*operands))`, without the copy if `out` is aligned like a tensor of its own."""
    if starts_aligned(out.storage_offset(), out):
        product(*operands, out=out)
    else:
        out.copy_(product(*operands))


def starts_aligned(elements: int | torch.SymInt, tensor: torch.Tensor) -> bool:
    """Whether the address this many elements into a tensor is one at which PyTorch's allocator may start a tensor."""
    return bool(elements * tensor.element_size() % _CACHE_LINE == 0)


def is_library_loop(rows: torch.Tensor, other: torch.Tensor, width: int) -> bool:
    """Whether `F.grouped_mm` takes the operands on the CPU, and calls `mm` on groups that are aligned as in the loop.

    width: that of the result's rows.
    """
    return (
        rows.device.type == "cpu"
        and rows.dtype in LIBRARY_DTYPES
        and starts_aligned(rows.stride(0), rows)
        and starts_aligned(width, rows)
        and suits(rows)
        and suits(other)
    )


def _way(operand: torch.Tensor, *widths: int) -> Way:
    if operand.shape[0] == 0:  # F.grouped_mm rejects a contraction of length 0, and one by one there is nothing to do
        return Way.EACH
    return grouped_ways.way_of(operand.device, operand.dtype, *widths)


def _triton() -> ModuleType:
    from fxpasses.experts.runtime import grouped_triton  # imports triton, which may be absent

    return grouped_triton


def _vectorised(matrices: torch.Tensor) -> torch.Tensor:
    """`matrices`, copied if its strides or its address do not suit `F.grouped_mm`."""
    suited = suits(matrices) and matrices.data_ptr() % VECTOR == 0
    return matrices if suited else matrices.clone(memory_format=torch.contiguous_format)


def suits(matrices: torch.Tensor) -> bool:
    """Whether `F.grouped_mm` takes the strides. On a device, addresses count too."""
    step = VECTOR // matrices.element_size()
    rows, columns = matrices.shape[-2:]
    row_stride, column_stride = matrices.stride()[-2:]
    row_major = column_stride == 1 and row_stride >= columns and row_stride % step == 0
    column_major = row_stride == 1 and column_stride >= rows and column_stride % step == 0
    return row_major or column_major


def _on_device(offsets: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return offsets.to(rows.device, torch.int32, non_blocking=True)
