"""Gradients of programs that read a buffer and write to it: backward uses the values that forward read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support import compiled


class Writes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.arange(1.0, 9.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "counted":
            self.steps += 1
            return x / (1 + self.steps)
        if self.kind == "counted after":
            y = x / (1 + self.steps)
            self.steps += 1
            return y
        if self.kind == "a view":
            y = x * (1 + self.scale[2:3])
            self.scale[2] += 1
            return y
        if self.kind == "its view is written":
            y = x * (1 + self.scale)
            self.scale.view(2, 4)[1] = 7
            return y
        if self.kind == "a cast":
            self.scale.mul_(2)
            return (x.double() * self.scale.double()).float()
        assert self.kind == "an average"
        self.scale.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return torch.sin(x * self.scale)


KINDS = ["counted", "counted after", "a view", "its view is written", "a cast", "an average"]


@pytest.mark.parametrize(
    "lowering, kind", [*(("aot_eager", kind) for kind in KINDS), ("inductor", "counted after"), ("inductor", "a view")]
)
def test_gradients_are_those_of_the_values_that_forward_read(lowering, kind):
    expected, actual = Writes(kind), Writes(kind)
    run: Any = compiled(actual, lowering)
    for _ in range(2):
        x = torch.randn(6, 8)
        gradients = []
        for model in (expected, run):
            leaf = x.clone().requires_grad_()
            model(leaf).square().sum().backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)
    torch.testing.assert_close(dict(actual.named_buffers()), dict(expected.named_buffers()))
