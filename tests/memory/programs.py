"""Models and steps that tests of memory share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.counting import allocated_bytes as peak_of
from fxpasses.memory.step import Step
from tests.support import compiled

ROWS, WIDTH, LAYERS = 256, 32, 6
PLENTY = 1 << 40


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout)


class Model(nn.Module):
    def __init__(self, checkpoints: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 10)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x).logsumexp(-1).sum()


PLANS: list[Step] = []


def noted(*given: Any, **named: Any) -> Step:
    PLANS.append(Step(*given, **named))
    return PLANS[-1]


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def step(program: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(2)
    loss = program(x)
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return found  # type: ignore[return-value]


def added(make: Callable[[], nn.Module], budget: int, lowering: str = "aot_eager", **options: Any) -> tuple[Any, int]:
    """Loss and gradients, and the most bytes that a step added."""
    torch._dynamo.reset()
    model = make()
    program = compiled(model, lowering, memory=budget, **options)
    x = batch()
    found = step(program, model, x)
    return found, peak_of(lambda: step(program, model, x))


def fits(make: Callable[[], nn.Module], shares: tuple[float, ...], lowering: str, **options: Any) -> None:
    expected, most = added(make, PLENTY, lowering, **options)
    for share in shares:
        budget = round(share * most)
        found, peak = added(make, budget, lowering, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        predicted = PLANS[-1].peak()
        assert predicted <= budget and peak <= budget
        assert abs(predicted - peak) <= 0.05 * budget


class Labelled(Model):
    """Tokens [B, T, W], of which only those with labels reach the loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def labelled(count: int, texts: int = 4, tokens: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.full((texts, tokens), -100)
    labels[:, :count] = 3
    return torch.randn(texts, tokens, WIDTH, generator=generator), labels


def random_program(seed: int) -> tuple[nn.Module, Tensor]:
    """Layers, some alike, of products, norms and pointwise operators, with residuals across them."""
    choose = random.Random(seed)
    width = choose.choice([8, 16, 24])
    steps = [
        choose.choice(["linear", "gelu", "norm", "softmax", "square", "cat", "gate"])
        for _ in range(choose.randint(2, 6))
    ]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            count = steps.count("linear") + steps.count("gate")
            self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            y, linears = x, iter(self.linears)
            for name in steps:
                if name == "linear":
                    y = next(linears)(y)
                elif name == "gate":
                    y = y * next(linears)(y).sigmoid()
                elif name == "norm":
                    y = F.layer_norm(y, (width,))
                elif name == "cat":
                    y = torch.cat([y, y.cos()], -1).unflatten(-1, (2, width)).sum(-2)
                else:
                    y = {"gelu": F.gelu, "softmax": lambda z: z.softmax(-1), "square": lambda z: z * z / 2}[name](y)
            return x + y

    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(width, width), *(Layer() for _ in range(choose.randint(1, 5)))]
    return nn.Sequential(*layers), torch.randn(choose.choice([32, 64]), width)
