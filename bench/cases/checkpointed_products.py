"""Checkpointed layers of products: what a layer computes and what it keeps are set apart. Imports torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Products(nn.Module):
    """A layer, [N, width] -> [N, width]; it keeps its input, however many products it computes."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) / width for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + x @ weight
        return x


class Stack(nn.Module):
    """`layers` of them, each in a checkpoint, and then `loss`."""

    def __init__(self, layers: int, products: int, width: int, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Products(products, width) for _ in range(layers))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0  # computed, so that the first layer's input can be moved like the others'
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.loss(x)
