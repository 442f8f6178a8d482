"""Optimizers that skip experts without tokens, as after eager mode's backward.

In eager mode, a loop skips an expert that no token chose, so its parameters have no gradient, and an optimizer leaves
them unchanged. A grouped program computes a gradient for each expert. The gradient of an expert without rows is
*negative zeros*, the neutral element of addition: -0.0 + g is g for every g, 0.0 included, while no sum of products is
negative zero everywhere. So it survives accumulation over batches, sums over ranks, casts, scaling and clipping, until
the gradient of some token is added; and the optimizer's step can tell it from zeros that tokens made, to which AdamW's
weight decay and momentum do apply.

Private name, checked on torch 2.13: `torch._foreach_norm`, one kernel for the norms of many tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

NO_GRADIENT = -0.0  # what the operators of `grouped_linear.py` give as the gradient of a group without rows


def skip_idle_experts(optimizer: torch.optim.Optimizer) -> Any:
    """Have an optimizer's steps skip the parameters of experts that no token chose since their gradients were cleared.

    Before each step, `grad` becomes `None` if it is negative zero everywhere. That takes one pass over all gradients,
    and the host reads one number for each parameter, in one copy for each device; gradients that are zero take a second
    pass. Gradients that a closure computes in the step, and sharded (`DTensor`) and sparse ones, stay unchanged.

    Returns a handle whose `remove()` ends it.
    """

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        drop_idle_gradients(parameter for group in optimizer.param_groups for parameter in group["params"])

    return optimizer.register_step_pre_hook(before_step)


@torch.no_grad()
def drop_idle_gradients(parameters: Iterable[Tensor]) -> int:
    """Set `grad` to `None` if it is negative zero everywhere; returns for how many parameters it did."""
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if _is_plain(parameter.grad):
            by_device[parameter.device].append(parameter)
    dropped = 0
    for found in by_device.values():
        largest = torch.stack([norm.float() for norm in torch._foreach_norm(_gradients(found), math.inf)])
        zeros = [parameter for parameter, norm in zip(found, largest.tolist(), strict=True) if norm == 0]
        if zeros:
            negative = torch.stack([torch.signbit(gradient).all() for gradient in _gradients(zeros)]).tolist()
            idle = [parameter for parameter, is_negative in zip(zeros, negative, strict=True) if is_negative]
            dropped += len(idle)
            for parameter in idle:
                parameter.grad = None
    return dropped


def _is_plain(gradient: Any) -> bool:
    is_dense = type(gradient) is Tensor and gradient.layout is torch.strided
    return is_dense and gradient.is_floating_point() and gradient.numel() > 0


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
