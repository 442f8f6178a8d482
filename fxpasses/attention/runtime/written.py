"""Attention over all pairs in PyTorch's operators, for rows in which the mask hides every column.

A score plus the least float32 is the least float32, so a row that finite values hide weighs all values equally. The
flash kernel gives the same output, but on the CPU its gradients are too large by a factor of the number of columns
(torch 2.11 to 2.15): it recomputes weights from the log-sum-exp, where the logarithm of that number is rounded away for
the same reason. A row of -inf, which is NaN in the mask, has weights of NaN; its scores get no gradient if -inf has
replaced them.
"""

from __future__ import annotations

import torch

from fxpasses.attention.runtime.dense import added_up, repeated
from fxpasses.attention.runtime.flash import Attention, Gradients


def forward(attention: Attention) -> torch.Tensor:
    """[B, H, Tq, Dv] in the dtype of the query, bit for bit as Hugging Face writes attention."""
    query, key, value = attention[:3]
    weights = _weights(attention, repeated(key, query.shape[1]))
    return torch.matmul(weights.to(query.dtype), repeated(value, query.shape[1]))


def backward(attention: Attention, grad: torch.Tensor, filled: bool) -> Gradients:
    """The gradients that autograd computes for `forward`; an operator's own implementation runs below autograd.

    filled: whether the mask's values replace scores, which then get no gradient, instead of being added to them.
    """
    query, key, value, mask, *_ = attention
    keys, values = (repeated(tensor, query.shape[1]) for tensor in (key, value))
    weights = _weights(attention, keys)
    to_values = torch.matmul(weights.to(query.dtype).transpose(2, 3), grad)
    to_weights = torch.matmul(grad, values.transpose(2, 3)).to(weights.dtype)
    to_scores = torch.ops.aten._softmax_backward_data(to_weights, weights, -1, weights.dtype).to(query.dtype)
    if filled and mask is not None:
        to_scores = to_scores.masked_fill(mask != 0, 0)
    to_scores = to_scores * attention.factor
    to_keys = torch.matmul(query.transpose(2, 3), to_scores).transpose(2, 3)
    return torch.matmul(to_scores, keys), added_up(to_keys, key.shape[1]), added_up(to_values, value.shape[1])


def _weights(attention: Attention, keys: torch.Tensor) -> torch.Tensor:
    query, mask = attention.query, attention.mask
    scores = torch.matmul(query, keys.transpose(2, 3)) * attention.factor
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1, dtype=None if query.dtype == torch.float64 else torch.float32)
