"""Activations wait for the backward pass on disk: the same gradients, less memory."""

import torch
from torch.utils.checkpoint import checkpoint

import fxpasses


def model(x, weights):
    for weight in weights:  # each layer keeps its input for backward, 8 MiB
        x = x + checkpoint(lambda x, w: torch.tanh(x @ w), x, weight, use_reentrant=False)
    return x.square().mean()


x, weights = torch.randn(8192, 256), [(torch.randn(256, 256) / 16).requires_grad_() for _ in range(8)]
compiled = torch.compile(model, backend="fastpack", options={"fastpack.offload": "disk"})
compiled(x, weights).backward()
print(fxpasses.offload_stats())
