"""A model under DDP whose layers communicate: each piece of the graph issues what eager mode issues.

One rank is compiled and the other is not, so a difference hangs or pairs one collective with another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.distributed.collective_programs import gathered
from tests.distributed.ranks import run_on_ranks

STEPS = 3
LONGEST = [4, 6, 3]  # in each step of a model that takes at most 4


class Layer(nn.Module):
    """Its two parameters are used around a collective; of the former piece, the latter takes two results."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4, bias=False), nn.Parameter(torch.ones(4))
        self.checkpointed = checkpointed

    def body(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x + self.scale * gathered(x.sum(0, keepdim=True)).mean(0)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def train(rank: int, checkpointed: bool, compiled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(checkpointed) for _ in range(2)))
    if compiled:
        model.compile(backend="fastpack", options={"fastpack.lowering": "aot_eager"})
    parallel = DistributedDataParallel(model)
    x = torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(rank))
    numbers = []
    for _ in range(STEPS):
        loss = parallel(x).pow(2).sum()
        loss.backward()
        numbers += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        model.zero_grad()
    return numbers


def train_both_ways(rank: int) -> Any:
    dist._DEFAULT_FIRST_BUCKET_BYTES = 16  # DDPOptimizer cuts at each parameter
    return [(train(rank, each, False), train(rank, each, compiled=rank == 0)) for each in (False, True)]


class Checked(nn.Module):
    """Reads a number before the collectives of its layers, and checks it between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Layer(False), Layer(False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = lengths.max().item()
        x = self.first(x)
        assert longest <= 4
        return self.last(x) * longest


def train_beyond_an_error(rank: int, compiled: bool) -> list[Tensor]:
    """Losses and gradients; NaN for a step that raises."""
    torch.manual_seed(0)
    model = Checked()
    if compiled:
        model.compile(backend="fastpack", options={"fastpack.lowering": "aot_eager"})
    parallel = DistributedDataParallel(model)
    x = torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(rank))
    numbers = []
    for longest in LONGEST:
        try:
            loss = parallel(x, torch.tensor([2, longest])).pow(2).sum()
        except (AssertionError, RuntimeError):
            numbers.append(torch.tensor(torch.nan))
            continue
        loss.backward()
        numbers += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        model.zero_grad()
    return numbers


def train_both_ways_beyond_an_error(rank: int) -> Any:
    dist._DEFAULT_FIRST_BUCKET_BYTES = 16
    return train_beyond_an_error(rank, False), train_beyond_an_error(rank, compiled=rank == 0)


@pytest.mark.filterwarnings("ignore")
def test_ranks_that_catch_a_broken_assertion_stay_in_step() -> None:
    for expected, actual in run_on_ranks(train_both_ways_beyond_an_error, seconds=60):
        assert sum(number.isnan().any() for number in expected) == 1
        torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
def test_pieces_of_a_graph_stay_in_step_with_a_rank_in_eager_mode() -> None:
    for expected, actual in (pair for ways in run_on_ranks(train_both_ways, seconds=60) for pair in ways):
        torch.testing.assert_close(actual, expected)
