"""Stacks of layers for the tests of `fold_layers`: each layer is one of a few kinds, and may have a peculiarity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpasses.fold.fold_layers import FoldLayers
from fxpasses.options import Options
from fxpasses.passes.pipeline import run_passes
from fxpasses.report import Report
from tests.support import captured

WIDTH, TOKENS, VOCABULARY = 8, 6, 12


class Block(nn.Module):
    """A residual MLP behind a norm."""

    def __init__(self, dropout: float = 0.0, width: int = 2 * WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Routed(nn.Module):
    """Two experts for half of the tokens each, added in place to memory of the layer's own."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        order = self.router(tokens).flatten().argsort()
        out = torch.zeros_like(tokens)
        for expert, rows in zip(self.experts, order.chunk(2), strict=True):
            out.index_add_(0, rows, expert(tokens[rows]))
        return x + out.view_as(x)


class Counting(Block):
    """Writes to a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)))
        return super().forward(x - self.mean)


class InPlace(Block):
    """Writes to the value that it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.5) + self.down(F.gelu(self.up(x)))


class Returned(Block):
    """Returns a view of what it is given besides its result."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(0).squeeze(0)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "block": Block,
    "wide": lambda: Block(width=3 * WIDTH),
    "dropout": lambda: Block(0.25),
    "attention": Attention,
    "routed": Routed,
    "counting": Counting,
    "in_place": InPlace,
    "view": Returned,
}


@dataclass(frozen=True)
class Plan:
    """layers: names, in order. shared: layers of one name are one module. checkpointed: positions. frozen: positions of
    layers whose weights have no gradient. recorded: positions whose results the model returns. skip: the first layer's
    result is added behind each layer. scales: the factor behind each layer, 1.0 for none, so that layers may differ
    slightly. autocast: of the whole model."""

    layers: tuple[str, ...]
    shared: bool = False
    checkpointed: frozenset[int] = frozenset()
    frozen: frozenset[int] = frozenset()
    recorded: frozenset[int] = frozenset()
    skip: bool = False
    scales: tuple[float, ...] = ()
    autocast: bool = False


class Stack(nn.Module):
    """Takes tokens [batch, length]; returns logits and the recorded values."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        made: dict[str, nn.Module] = {}
        stack = [made.setdefault(n, LAYERS[n]()) if plan.shared else LAYERS[n]() for n in plan.layers]
        self.layers = nn.ModuleList(stack)
        for position in plan.frozen:
            stack[position].requires_grad_(False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        plan = self.plan
        with torch.autocast("cpu", torch.bfloat16, enabled=plan.autocast):
            x = self.embed(tokens) * 1.0
            first, recorded = x.sin() if plan.skip else x, []
            for position, layer in enumerate(self.layers):
                x = checkpoint(layer, x, use_reentrant=False) if position in plan.checkpointed else layer(x)
                if plan.scales and plan.scales[position] != 1.0:
                    x = x * plan.scales[position]
                if plan.skip:
                    x = x + first
                if position in plan.recorded:
                    recorded.append(x)
            return self.head(x), recorded


def tokens(number: int = 0, length: int = TOKENS) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(number))


def report_on(model: nn.Module, **options: Any) -> Report:
    """The pass's report on a model that takes tokens."""
    gm = captured(model, tokens())
    examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    (report,) = run_passes([FoldLayers()], gm, examples, Options(strict=True, **options)).reports
    return report
