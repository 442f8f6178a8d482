"""Attention over all pairs of tokens, bit for bit as `scaled_dot_product_attention` computes it, with its backward.

On the CPU, SDPA calls its flash kernel with the mask in the query's dtype, and composes attention from other operators
if that kernel does not fit. This module calls the kernel directly, so that backward need not run forward again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxpasses.attention.runtime import flash
from fxpasses.attention.runtime.flash import Attention, Gradients


def forward(attention: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the log-sum-exp or zeros. The mask must have the dtype that SDPA would use."""
    if flash.takes(attention):
        return flash.forward(attention)
    query = attention.query
    accumulator = torch.float64 if query.dtype == torch.float64 else torch.float32
    return composed(attention), torch.zeros(query.shape[:-1], dtype=accumulator, device=query.device)


def backward(attention: Attention, grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor) -> Gradients:
    if flash.takes(attention):
        return flash.backward(attention, grad, out, logsumexp)
    with flash.autograd(), torch.enable_grad():
        q, k, v = (operand.detach().requires_grad_() for operand in attention[:3])
        first, second, third = torch.autograd.grad(
            composed(attention._replace(query=q, key=k, value=v)), (q, k, v), grad
        )
    return first, second, third


def composed(attention: Attention) -> torch.Tensor:
    """`scaled_dot_product_attention` itself; its mask may also be bool."""
    query, key, value, mask, scale, _ = attention
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=attention.is_grouped)


def repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values [B, Hkv, T, D] with each head copied for its group of queries: [B, heads, T, D]."""
    batch, own, tokens, size = tensor.shape
    if own == heads:
        return tensor
    grouped = tensor[:, :, None].expand(batch, own, heads // own, tokens, size)
    return grouped.reshape(batch, heads, tokens, size)


def added_up(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """The gradient of `repeated`'s argument, which has `heads` heads, from the gradient of its result."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)
