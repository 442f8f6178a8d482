"""Random programs in which an intermediate is asked for its gradient: results require gradients as in eager mode."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import THOROUGH, compiled

pytestmark = pytest.mark.usefixtures("capture_flags")

SIZE = (3, 3)
TWO = ("add", "mul", "expand", "where", "cat", "write", "write part", "write silently")
ONE = ("tanh", "detach", "view", "silent", "round", "split", "zeros")


def apply(kind: str, a: Tensor, b: Tensor) -> Tensor:
    match kind:
        case "add":
            return a + b
        case "mul":
            return a * b.sin()
        case "expand":
            return a.expand_as(b)
        case "where":
            return torch.where(b > 0, a, 0.5)
        case "cat":
            return torch.cat([a, b])[1:4]
        case "write":
            return a.clone().copy_(b)
        case "write part":
            out = torch.zeros_like(a)
            early = out + 1
            out[1:].add_(b[:2])
            return out + early
        case "write silently":
            out = torch.ones_like(a)
            with torch.no_grad():
                out.mul_(b)
            return out
        case "tanh":
            return a.tanh()
        case "detach":
            return a.detach() + 1
        case "view":
            return a.t()
        case "silent":
            with torch.no_grad():
                return a * 2
        case "round":
            return (a * 4).long().float()
        case "split":
            return torch.cat(a.split(1)[::-1])
        case _:
            return torch.zeros_like(a)


def program_of(seed: int) -> Any:
    draw = random.Random(seed)
    steps = [(draw.choice(TWO * 2 + ONE), draw.random(), draw.random()) for _ in range(draw.randint(2, 8))]

    def program(table: Tensor, *trained: Tensor) -> Any:
        asked = table.sin().requires_grad_()
        values = [asked + 0, *trained, asked * 2]
        for kind, first, second in steps:
            values.append(apply(kind, values[int(first * len(values))], values[int(second * len(values))]))
        return values[-1], values[-2].sum() + values[-1].mean()

    return program


def results(program: Any) -> Any:
    table = torch.linspace(-1, 1, 9).view(SIZE)
    trained = [torch.linspace(-2, 1, 9).view(SIZE).requires_grad_(), torch.ones(SIZE)]
    found = program(table, *trained)
    if loss := [result.sum() for result in found if result.requires_grad]:
        sum(loss).backward()
    return [(result.detach(), result.requires_grad) for result in found], [leaf.grad for leaf in trained]


def flags_of(found: Any) -> list[bool]:
    return [requires_grad for _, requires_grad in found[0]]


@pytest.mark.parametrize(
    "seeds",
    [
        range(6),
        *(pytest.param(range(s, s + 50), marks=pytest.mark.slow) for s in range(6, 156 if THOROUGH else 56, 50)),
    ],
    ids=str,
)
def test_random_programs(seeds: range) -> None:
    breaks: Counter[bool] = Counter()
    for seed in seeds:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        program = program_of(seed)
        expected, actual = results(program), results(compiled(program, "aot_eager"))
        if flags_of(actual) != flags_of(expected):  # stock PyTorch does not see a gradient that a write to a view gives
            torch._dynamo.reset()
            expected = results(torch.compile(program, backend="aot_eager"))
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)  # gradients are summed in another order
        breaks[bool(torch._dynamo.utils.counters["graph_break"])] += 1
    assert breaks[False] and breaks[True]  # both kinds were drawn
