"""PyTorch's flash-attention kernel for the CPU, by private names checked on torch 2.11 to 2.14."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_FLASH = 1  # `SDPBackend.FLASH_ATTENTION`
_AUTOGRAD = (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.ADInplaceOrView)


class Attention(NamedTuple):
    """The arguments of `scaled_dot_product_attention`, without dropout.

    query: [B, H, Tq, D]. key: [B, Hkv, Tk, D], value: [B, Hkv, Tk, Dv], H a multiple of Hkv. All have one floating
    dtype. mask: additive, broadcast to [B, H, Tq, Tk], or None. scale: None stands for 1 / sqrt(D).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scale: float | None
    causal: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether several heads of queries share a head of keys."""
        return self.query.shape[1] != self.key.shape[1]

    @property
    def factor(self) -> float:
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale


def takes(attention: Attention) -> bool:
    """Whether `scaled_dot_product_attention` would call this kernel."""
    query, key, value, mask, scale, _ = attention
    if query.device.type != "cpu":
        return False
    grouped = attention.is_grouped
    choice = torch._fused_sdp_choice(query, key, value, mask, 0.0, False, scale=scale, enable_gqa=grouped)
    return int(choice) == _FLASH


def forward(attention: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [B, H, Tq, D] and the log-sum-exp [B, H, Tq]. The operands' last strides must be 1, and Dv be D."""
    query, key, value, mask, scale, causal = attention
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, logsumexp


def backward(attention: Attention, grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor) -> Gradients:
    """Gradients of query, key and value, each of its operand's shape."""
    query, key, value, mask, scale, causal = attention
    first, second, third = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, logsumexp, 0.0, causal, attn_mask=mask, scale=scale
    )
    return first, second, third


def autograd() -> AbstractContextManager[object]:
    """Record gradients inside an operator's kernel, where the dispatcher excludes autograd."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(included, excluded)
