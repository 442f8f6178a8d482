"""The grouped form of an expert loop, hand-written: one stable sort, a grouped product per weight, one addition back.

It is what a careful author would write instead of the loop. On CUDA in bfloat16 the product is `F.grouped_mm`;
elsewhere it is an operator with a gradient that multiplies group by group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("fxpasses_bench::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, stops: Tensor, transposed: bool) -> Tensor:
    """x [rows, n], weight [E, n, m] or, transposed, [E, m, n], stops int [E], where experts' rows end -> [rows, m]."""
    out = x.new_empty(x.shape[0], weight.shape[1 if transposed else 2])
    start = 0
    for e, stop in enumerate(stops.tolist()):
        if stop > start:
            torch.mm(x[start:stop], weight[e].t() if transposed else weight[e], out=out[start:stop])
        start = stop
    return out


@torch.library.custom_op("fxpasses_bench::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, grad: Tensor, stops: Tensor) -> Tensor:
    """x [rows, n], grad [rows, m] -> the product of each expert's rows, [E, n, m]."""
    out = x.new_zeros(stops.shape[0], x.shape[1], grad.shape[1])
    start = 0
    for e, stop in enumerate(stops.tolist()):
        if stop > start:
            torch.mm(x[start:stop].t(), grad[start:stop], out=out[e])
        start = stop
    return out


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, stops: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1 if transposed else 2])


@grouped_outer.register_fake
def _(x: Tensor, grad: Tensor, stops: Tensor) -> Tensor:
    return x.new_empty(stops.shape[0], x.shape[1], grad.shape[1])


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.transposed = inputs[3]


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x, weight, stops = ctx.saved_tensors
    grad = grad.contiguous()
    of_weight = grouped_outer(grad, x, stops) if ctx.transposed else grouped_outer(x, grad, stops)
    return grouped_mm(grad, weight, stops, not ctx.transposed), of_weight, None, None


grouped_mm.register_autograd(backward, setup_context=setup_context)


def product(x: Tensor, weight: Tensor, stops: Tensor) -> Tensor:
    """x [rows, n], weight [E, m, n], as `nn.Linear` has it -> [rows, m]."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=stops.int())
    return grouped_mm(x, weight, stops, True)


def grouped_experts(x: Tensor, weights: Tensor, idx: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x [T, H], weights [T, k], idx int [T, k], gate_up [E, 2 * W, H], down [E, H, W] -> [T, H]."""
    flat = idx.flatten()
    order = torch.argsort(flat, stable=True)
    stops = torch.searchsorted(flat[order], torch.arange(len(gate_up), device=x.device), right=True)
    token = order // idx.shape[1]
    gate, up = product(x[token], gate_up, stops).chunk(2, dim=-1)
    rows = product(F.silu(gate) * up, down, stops) * weights.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, token, rows)
