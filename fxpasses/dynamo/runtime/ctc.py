"""The CTC loss as an operator whose results have sizes that do not depend on the lengths.

`torch._ctc_loss` also returns the probabilities of all prefixes, whose size is the longest target, so it has no meta
kernel. Here the backward pass computes them again, which takes as long as the loss itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` of a batch, without cuDNN, bit for bit.

    log_probs: [T, N, C]. targets: [N, S] or [sum of target_lengths]. input_lengths, target_lengths: [N], integers.
    """
    # Copied, as in eager mode: the backward pass needs the lengths, and a program may reuse their buffers. A prologue
    # copies lengths that are on a device together with everything else.
    lengths = input_lengths.to("cpu", copy=True), target_lengths.to("cpu", copy=True)
    losses = torch.ops.fxpasses.ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == float("inf"), torch.zeros((), dtype=losses.dtype, device=losses.device), losses)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return (losses / target_lengths.clamp_min(1).to(losses)).mean()


@custom_op("fxpasses::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """[N]: the negative log-likelihoods. input_lengths, target_lengths: on the host."""
    return _run(log_probs, targets, _listed(input_lengths), _listed(target_lengths), blank, zero_infinity)[0]


@ctc_losses.register_fake
def _losses(log_probs: Tensor, *others: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@custom_op("fxpasses::ctc_losses_backward", mutates_args=())
def ctc_losses_backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """[T, N, C]: the gradient of `log_probs`. gradient: [N], the gradient of the losses."""
    lengths = _listed(input_lengths), _listed(target_lengths)
    losses, prefixes = _run(log_probs, targets, *lengths, blank, zero_infinity)
    return torch.ops.aten._ctc_loss_backward(
        gradient, log_probs, targets, *lengths, losses, prefixes, blank, zero_infinity
    )


@ctc_losses_backward.register_fake
def _gradient(gradient: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _run(log_probs: Tensor, targets: Tensor, inputs: list[int], lengths: list[int], blank: int, zeros: bool) -> Any:
    return torch.ops.aten._ctc_loss(log_probs, targets, inputs, lengths, blank, zeros)


def _listed(lengths: Tensor) -> list[int]:
    return lengths.numpy().tolist()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.fxpasses.ctc_losses_backward(gradient, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return found, None, None, None, None, None


ctc_losses.register_autograd(_backward, setup_context=_save)
