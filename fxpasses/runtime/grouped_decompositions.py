"""Grouped products that Inductor calls from C++, as `aten._grouped_mm`.

On the CPU `aten._grouped_mm` is the loop over `mm` that the operators of `grouped_linear.py` make. Where nothing of
their own is left to do, neither offsets to check nor rows to fill, the call from Python is saved: six calls in a layer
and its backward, some 5 % of a step with 8 experts on 1,024 tokens of hidden size 256.

Private name, checked on torch 2.11, 2.13 and 2.15: `torch.ops.aten._grouped_mm`, which is `F.grouped_mm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxpasses.runtime import grouped_linear  # noqa: F401 - registers the operators
from fxpasses.runtime.grouped_kernels import loops_in_library, suits

_MM, _OUTER = torch.ops.fxpasses.grouped_mm.default, torch.ops.fxpasses.grouped_outer.default


def _grouped_mm(
    rows: Tensor,
    weights: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    transposed: bool = False,
    covers: bool = False,
) -> Any:
    stacked = weights.mT if transposed else weights
    if not covers or bias is not None or not _known(rows, stacked):
        return NotImplemented
    if not (loops_in_library(rows, stacked.shape[2]) and suits(stacked)):
        return NotImplemented
    return torch.ops.aten._grouped_mm(rows, stacked, offsets)


def _grouped_outer(left: Tensor, right: Tensor, offsets: Tensor, covers: bool = False) -> Any:
    if not covers or not _known(left, right):
        return NotImplemented
    if not (loops_in_library(left, right.shape[1]) and loops_in_library(right, left.shape[1])):
        return NotImplemented
    return torch.ops.aten._grouped_mm(left.t(), right, offsets)


def _known(rows: Tensor, other: Tensor) -> bool:
    """Whether compilers know the product of these dtypes, and all sizes but the number of rows are numbers.

    Its rule for fake tensors takes bfloat16 alone, also on the CPU. Asking about symbols would add guards.
    """
    if rows.dtype is not torch.bfloat16:
        return False
    sizes = [*rows.shape[1:], *rows.stride(), *other.shape[1:], *other.stride()]
    return all(isinstance(size, int) for size in sizes)


def decompositions(gm: GraphModule) -> dict[Any, Callable[..., Any]]:
    """Those of the products in a graph and its bodies, for AOTAutograd; empty if there are none."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    found = any(node.target in (_MM, _OUTER) for graph in graphs for node in graph.nodes)
    return {_MM: _grouped_mm, _OUTER: _grouped_outer} if found else {}
