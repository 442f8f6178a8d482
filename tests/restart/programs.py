"""Programs whose traces the tests here keep and restore."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.kind = 0.5, "gelu"

    def forward(self, x: Tensor) -> Tensor:
        act = getattr(F, self.kind)
        return x + self.scale * act(self.linear(self.norm(x)))


class Model(nn.Module):
    """Two layers, over a mask that each makes of the batch's lengths."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            longest = lengths.max().item()
            mask = torch.arange(x.shape[1])[None] < lengths[:, None]
            x = layer(x) * mask[..., None] * longest
        return x


class Asking(Model):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(x, lengths).exp() if lengths.max().item() > 3 else super().forward(x, lengths)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        best = self.router(tokens).argmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(best == number)
            out.index_add_(0, rows, expert(tokens[rows]))
        return out.view_as(x)


class Checkpointed(Model):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Counting(Model):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        with torch.no_grad():
            self.steps += 1
        return super().forward(x, lengths) + self.steps


class Returning(Model):
    def forward(self, x: Tensor, lengths: Tensor) -> dict[str, Any]:
        y = super().forward(x, lengths)
        return {"y": y, "shape": y.shape, "view": y.transpose(0, 1), "x": x}


def inputs(*lengths: int, tokens: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(len(lengths), tokens, WIDTH, generator=generator).requires_grad_()
    return x, torch.tensor(lengths)


BATCHES = [inputs(2, 3), inputs(6, 1)]


def reads_variables(x: Tensor) -> Tensor:
    if "FXPASSES_TEST_A" in os.environ:
        x = x + 1
    return x * float(os.environ.get("FXPASSES_TEST_B", "2")) * len(os.getenv("FXPASSES_TEST_C", "abc"))
