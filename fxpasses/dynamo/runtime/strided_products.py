"""A matrix product whose result has given strides: what `torch.mm(a, b, out=tile)` computes, in memory of its own.

A library may sum in another order if rows are further apart, so the strides are part of the result's definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("fxpasses::strided_mm", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def strided_mm(a: Tensor, b: Tensor, stride: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    """[N, K] @ [K, M] as [N, M] with the strides `stride`, in elements. dtype: the result's, by default that of `a`.

    No autocast and no gradient, as in a call with `out`.
    """
    out = _empty(a, b, stride, dtype)
    return torch.mm(a, b, out=out) if dtype is None else torch.mm(a, b, out_dtype=dtype, out=out)


@strided_mm.register_fake
def _empty(a: Tensor, b: Tensor, stride: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    torch._check(a.shape[1] == b.shape[0], lambda: f"{tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied")
    return torch.empty_strided((a.shape[0], b.shape[1]), stride, dtype=dtype or a.dtype, device=a.device)
