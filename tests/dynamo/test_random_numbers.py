"""Comparisons with numbers of `random`: one graph where no number can change the answer, and eager mode's numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpasses.inspect
from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")


class Model(nn.Module):
    """Layers that are dropped at a rate, as in MusicGen. drops: whether to drop a layer, of the rate."""

    def __init__(self, rate: float, drops: Callable[[float], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.rate, self.drops = rate, drops

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and self.drops(self.rate):
                continue
            x = layer(x).tanh()
        return x * random.uniform(1, 2)


def graphs_of(rate: float, drops: Callable[[float], bool]) -> int:
    """How many graphs there are. The values are eager mode's, and so is the state of `random` after each step."""
    model, x = Model(rate, drops), torch.linspace(-1, 2, 8).view(2, 4)
    program = compiled(model, "aot_eager")
    with fxpasses.inspect.record() as record:
        for seed in range(4):
            random.seed(seed)
            expected, state = model(x), random.getstate()
            random.seed(seed)
            torch.testing.assert_close(program(x), expected, rtol=0, atol=0)
            assert random.getstate() == state
    return len([graph for graph in record.graphs if graph.outcome != "retraced"])


DECIDED: list[Callable[[float], bool]] = [
    lambda rate: random.uniform(0, 1) < rate,
    lambda rate: rate > random.uniform(0, 1),
    lambda rate: not random.uniform(0, 1) >= rate,
    lambda rate: random.uniform(0.25, 1) <= rate,
]


@pytest.mark.parametrize("drops", DECIDED)
def test_a_number_below_the_least_decides(drops: Callable[[float], bool]) -> None:
    assert graphs_of(0.0, drops) == 1


@pytest.mark.parametrize(
    ("rate", "drops"),
    [
        (0.5, DECIDED[0]),
        (0.5, DECIDED[2]),
        (0.0, lambda rate: random.uniform(-1, 1) < rate),
        (0.0, lambda rate: random.uniform(1, -1) < rate),
        (0.0, lambda rate: random.gauss(0, 1) < rate),
        (0.0, lambda rate: random.randint(0, 1) <= rate),
    ],
)
def test_where_numbers_decide_each_step_is_eager_modes(rate: float, drops: Callable[[float], bool]) -> None:
    graphs_of(rate, drops)
