"""A router and stacked experts around one loop, and how far `group_experts` gets with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxpasses.inspect import Record
from tests.support import assert_same

WIDTH, EXPERTS, TOKENS = 8, 4, 10


class Layer(nn.Module):
    """A router and stacked experts around `loop(layer, x, weights, idx)`."""

    def __init__(self, loop: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.loop = loop
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Any:
        scores = self.gate(x).softmax(-1)
        weights, idx = scores.topk(2, dim=-1)[0], scores.detach().topk(2, dim=-1)[1]  # so that `idx` may be written to
        return self.loop(self, x, weights, idx)


def check(loop: Callable[..., Any], lowering: str = "eager", level: str = "auto", tolerance: float = 0.0) -> Record:
    torch.manual_seed(6)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    return assert_same(Layer(loop), [(x,)], lowering, tolerance, experts=level)


def level_of(record: Record) -> int:
    figures = record.figures("group_experts")
    return 2 if figures.get("loops_grouped") else 1 if figures.get("loops_sliced") else 0
