"""Grouped products that Inductor calls from C++, as `aten._grouped_mm`.

On the CPU `aten._grouped_mm` is the same loop over `mm` as in the operators of `grouped_linear.py`. If those operators
have nothing else to do, neither offsets to check nor rows to fill, this saves their calls from Python: six in a layer
and its backward, some 5 % of a step with 8 experts on 1,024 tokens of hidden size 256 in bfloat16.

Private name, checked on torch 2.11, 2.13 and 2.15: `torch.ops.aten._grouped_mm`, which is `F.grouped_mm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxpasses.experts.runtime import grouped_linear  # noqa: F401 - registers the operators
from fxpasses.experts.runtime.grouped_kernels import is_library_loop
from fxpasses.graph.bodies import nodes_in

ops = torch.ops.fxpasses


def grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor, transposed: bool = False) -> Tensor:
    """The decomposition of `grouped_mm_covering`."""
    stacked = weights.mT if transposed else weights
    if not _is_called(rows, stacked, stacked.shape[2]):
        return ops.grouped_mm.default(rows, weights, offsets, None, transposed)
    return torch.ops.aten._grouped_mm(rows, stacked, offsets)


def grouped_outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """The decomposition of `grouped_outer_covering`."""
    if not _is_called(left, right, right.shape[1]) or not _is_called(right, left, 0):
        return ops.grouped_outer.default(left, right, offsets)
    return torch.ops.aten._grouped_mm(left.t(), right, offsets)


def _is_called(rows: Tensor, other: Tensor, width: int | torch.SymInt) -> bool:
    """Whether the product makes the loop's calls; width: that of the result's rows.

    PyTorch's rule for fake tensors accepts only bfloat16, even on the CPU. All sizes but the number of rows must be
    numbers: asking about symbols would add guards.
    """
    sizes = [*rows.shape[1:], *rows.stride(), *other.shape[1:], *other.stride(), width]
    return (
        rows.dtype is torch.bfloat16
        and all(isinstance(size, int) for size in sizes)
        and is_library_loop(rows, other, int(width))
    )


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    ops.grouped_mm_covering.default: grouped_mm,
    ops.grouped_outer_covering.default: grouped_outer,
}


def decompositions(gm: GraphModule) -> dict[Any, Callable[..., Any]]:
    """The decompositions of the products in a graph and its bodies, for AOTAutograd; empty if there are none."""
    return dict(_DECOMPOSITIONS) if any(node.target in _DECOMPOSITIONS for node in nodes_in(gm)) else {}
