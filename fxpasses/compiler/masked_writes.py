"""`x[mask] = number` as `where(mask, number, x)` for Inductor, which lets such a write overtake an earlier one.

    d = x.exp().scatter_add(1, index, y)
    d[mask] = 0

Inductor (torch 2.13) gives the buffer `d` new contents here, and the addition that was recorded before, whose target is
that buffer, adds to the new contents: rows that should be 0 are not (`docs/upstream.md`). Inductor itself turns the
write into `where`; this decomposition gives it a separate buffer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxpasses.graph.bodies import nodes_in

_WRITES = (operator.setitem, torch.index_put, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
_METHODS = ("index_put", "index_put_", "__setitem__")


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """`aten.index_put` with one mask of the first dimensions and one number, both of any layout and dtype it takes.

    NotImplemented for other indices and values, and for a mask on another device, which `where` does not take.
    """
    mask = indices[0] if len(indices) == 1 else None
    is_number = all(isinstance(size, int) and size == 1 for size in values.shape)
    if mask is None or mask.dtype is not torch.bool or mask.device != x.device or not is_number:
        return NotImplemented
    has_order = mask.ndim > 1
    mask = mask.reshape([*mask.shape, *[1] * (x.ndim - mask.ndim)])
    if has_order:  # the result would take the mask's order of strides, and later views need that of `x`
        mask = torch.zeros_like(x, dtype=torch.bool) | mask
    number = values.reshape(()).to(x.dtype)
    return torch.where(mask, x + number if accumulate else number, x)


def decompositions(gm: GraphModule) -> dict[Any, Callable[..., Any]]:
    """The decompositions for AOTAutograd; empty if nothing in a graph and its bodies writes by index."""
    writes = any(node.target in _WRITES or node.target in _METHODS for node in nodes_in(gm))
    return {torch.ops.aten.index_put.default: index_put} if writes else {}
