"""A step that has to fit on each of several ranks, which plan alike: under DDP, and with sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fxpasses.inspect
from fxpasses.memory import limits
from tests.distributed.ranks import run_on_ranks
from tests.memory.test_tiles import ROWS, WIDTH, Wide
from tests.support import compiled

BUDGET = 2 * ROWS * 256 * 4  # what forward alone would keep of one layer, twice


def stepped(rank: int, arrangement: str) -> Any:
    """Gradients of eager mode and of a planned step, and what was planned."""
    limits.in_use = lambda device: 0
    torch.manual_seed(rank)
    x = torch.randn(ROWS, WIDTH)
    found = []
    for is_ours in (False, True):
        model = Wide()

        def wrap(module: Any, is_ours: bool = is_ours) -> Any:
            return compiled(module, "aot_eager", memory=BUDGET) if is_ours else module

        with fxpasses.inspect.record() as record:
            run = ARRANGEMENTS[arrangement](model, wrap)
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                run(x).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        found.append([each.full_tensor() if isinstance(each, DTensor) else each for each in gradients])
    return *found, record.figures("memory")


def sharded(model: Wide, wrap: Any) -> Any:
    fully_shard(model)
    return wrap(model)


ARRANGEMENTS: dict[str, Any] = {
    "compiled, then DDP": lambda model, wrap: DistributedDataParallel(wrap(model)),
    "DDP, then compiled": lambda model, wrap: wrap(DistributedDataParallel(model)),
    "FSDP2": sharded,
}


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_ranks_plan_alike(arrangement: str) -> None:
    ranks = run_on_ranks(stepped, args=(arrangement,))
    for eager, ours, figures in ranks:
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
        assert figures["tiles"] > 1 and figures["peak_bytes"] <= 1.05 * BUDGET
        assert figures == ranks[0][2]
