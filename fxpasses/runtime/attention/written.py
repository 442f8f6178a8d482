"""Attention of all pairs, written out in PyTorch's operators, for rows that a mask hides by finite values throughout.

Of a score to which the least float32 is added nothing is left, so such a row weighs all values alike. The flash kernel
gives the same output and, on the CPU, gradients that are as many times too large as there are columns (torch 2.11 to
2.15): it recomputes weights from the log-sum-exp, in which the logarithm of their number is lost for the same reason.
"""

from __future__ import annotations

import torch

from fxpasses.runtime.attention.dense import Gradients, added_up, repeated


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """[B, H, Tq, Dv] in the dtype of `query`; mask: additive. As Hugging Face writes attention, bit for bit."""
    weights = _weights(query, repeated(key, query.shape[1]), mask, scale)
    return torch.matmul(weights.to(query.dtype), repeated(value, query.shape[1]))


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    filled: bool,
) -> Gradients:
    """What autograd makes of `forward`: an operator's own implementation runs below autograd.

    filled: whether the mask's values were put in place of scores, which then get no gradient, and not added to them.
    """
    keys, values = (repeated(tensor, query.shape[1]) for tensor in (key, value))
    weights = _weights(query, keys, mask, scale)
    to_values = torch.matmul(weights.to(query.dtype).transpose(2, 3), grad)
    to_weights = torch.matmul(grad, values.transpose(2, 3)).to(weights.dtype)
    to_scores = torch.ops.aten._softmax_backward_data(to_weights, weights, -1, weights.dtype).to(query.dtype)
    to_scores = (to_scores.masked_fill(mask != 0, 0) if filled else to_scores) * scale
    to_keys = torch.matmul(query.transpose(2, 3), to_scores).transpose(2, 3)
    to_query = torch.matmul(to_scores, keys)
    return to_query, added_up(to_keys, key.shape[1]), added_up(to_values, value.shape[1])


def _weights(query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    scores = torch.matmul(query, keys.transpose(2, 3)) * scale + mask
    return scores.softmax(-1, dtype=None if query.dtype == torch.float64 else torch.float32)
