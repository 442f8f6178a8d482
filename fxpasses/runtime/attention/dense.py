"""All pairs of tokens with their mask, as `scaled_dot_product_attention` computes them, bit for bit, both ways.

On the CPU, SDPA calls its flash kernel with the mask in the query's dtype, or where that kernel does not fit composes
attention of other operators. The first is called here directly, so that backward need not run forward again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxpasses.runtime.attention import flash

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """mask: additive, in the dtype that SDPA would use, or None. Returns the output and the log-sum-exp, or zeros."""
    if flash.takes(query, key, value, mask, scale):
        return flash.forward(query, key, value, mask, scale)
    out = _composed(query, key, value, mask, scale)
    accumulator = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, torch.zeros(query.shape[:-1], dtype=accumulator, device=query.device)


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float | None,
) -> Gradients:
    if flash.takes(query, key, value, mask, scale):
        return flash.backward(grad, query, key, value, out, logsumexp, mask, scale)
    with flash.autograd(), torch.enable_grad():
        q, k, v = (operand.detach().requires_grad_() for operand in (query, key, value))
        first, second, third = torch.autograd.grad(_composed(q, k, v, mask, scale), (q, k, v), grad)
    return first, second, third


def _composed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)


def repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values [B, Hkv, T, D] with each head copied for its group of queries: [B, heads, T, D]."""
    batch, own, tokens, size = tensor.shape
    if own == heads:
        return tensor
    grouped = tensor[:, :, None].expand(batch, own, heads // own, tokens, size)
    return grouped.reshape(batch, heads, tokens, size)


def added_up(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """The gradient of what `repeated` was given, which has so many heads, from that of what it gave."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)
