"""PyTorch's flash-attention kernel for the CPU, and what goes around it, by private names.

Checked on torch 2.11 to 2.14. Query [B, H, Tq, D], key and value [B, Hkv, Tk, D] of one floating dtype, the last stride
1, H a multiple of Hkv.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

_FLASH = 1  # `SDPBackend.FLASH_ATTENTION`
_AUTOGRAD = (torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.ADInplaceOrView)


def takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> bool:
    """Whether `scaled_dot_product_attention` would call this kernel."""
    if query.device.type != "cpu":
        return False
    grouped = query.shape[1] != key.shape[1]
    choice = torch._fused_sdp_choice(query, key, value, mask, 0.0, False, scale=scale, enable_gqa=grouped)
    return int(choice) == _FLASH


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [B, H, Tq, D] and the log-sum-exp [B, H, Tq]; mask: additive, broadcast to [B, H, Tq, Tk]."""
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, logsumexp


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, each of its operand's shape."""
    first, second, third = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, logsumexp, 0.0, causal, attn_mask=mask, scale=scale
    )
    return first, second, third


def autograd() -> AbstractContextManager[object]:
    """Inside an operator's kernel, where the dispatcher leaves autograd out: calls record gradients again."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(included, excluded)
