"""`fold_layers` under FSDP2, whose blocks are compiled one by one: a block is folded if it consists of equal layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fxpasses.inspect
from fxpasses.report import Reason, Report
from tests.distributed.ranks import run_on_ranks
from tests.fold.programs import WIDTH, Block
from tests.support import reports_of

BLOCKS = 2
OPTIONS = {"fastpack.lowering": "aot_eager", "fastpack.strict": True, "fastpack.fold": "on"}


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(layers: int, compiled: bool) -> nn.Sequential:
    """layers: of each block; 1 for blocks that are a layer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Stack(layers) for _ in range(BLOCKS)))
    for block in model:
        if compiled:
            block.compile(backend="fastpack", options=OPTIONS)
        fully_shard(block)
    fully_shard(model)
    return model


def steps(rank: int, layers: int, compiled: bool) -> tuple[list[Tensor], list[Report]]:
    """Losses, this rank's parts of the gradients, and final weights of two steps; and the pass's reports."""
    model = sharded(layers, compiled)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: list[Tensor] = []
    with fxpasses.inspect.record() as record:
        for number in range(2):
            optimizer.zero_grad()
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * rank + number), requires_grad=True)
            loss = model(x).square().mean()
            loss.backward()
            found += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
            optimizer.step()
    return found + [p.detach().to_local() for p in model.parameters()], reports_of(record, "fold_layers")


def compare(rank: int, layers: int) -> list[Report]:
    """Bit for bit as eager mode; returns the reports."""
    expected, _ = steps(rank, layers, compiled=False)
    actual, reports = steps(rank, layers, compiled=True)
    assert all(map(torch.equal, expected, actual))
    return reports


def check(reports: list[Report], layers: int) -> None:
    """There is one graph for all blocks."""
    (report,) = reports
    assert report.figures.get("layers", 0) == (layers if layers > 1 else 0)
    assert [refusal.reason for refusal in report.refusals] == ([] if layers > 1 else [Reason.STANDS_ONCE])


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("layers", [1, 3])
def test_on_one_rank(layers: int) -> None:
    check(compare(0, layers), layers)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 3])
def test_on_two_ranks(layers: int) -> None:
    for reports in run_on_ranks(compare, args=(layers,)):
        check(reports, layers)
