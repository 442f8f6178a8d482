"""A step that has to fit on each of several ranks: DDP's ranks plan alike, graphs that communicate have no plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fxpasses.inspect
from fxpasses.memory import limits
from tests.distributed.ranks import run_on_ranks
from tests.memory.test_tiles import ROWS, WIDTH, Wide
from tests.support import compiled

BUDGET = 2 * ROWS * 256 * 4  # what forward alone would keep of one layer, twice


def stepped(rank: int, is_inside: bool) -> Any:
    """Gradients of eager mode and of a planned step, and what was planned."""
    limits.in_use = lambda device: 0
    torch.manual_seed(rank)
    x = torch.randn(ROWS, WIDTH)
    found = []
    for is_ours in (False, True):
        model = Wide()

        def wrap(module: Any) -> Any:
            return compiled(module, "aot_eager", memory=BUDGET)

        with fxpasses.inspect.record() as record:
            if is_ours:
                run = DistributedDataParallel(wrap(model)) if is_inside else wrap(DistributedDataParallel(model))
            else:
                run = DistributedDataParallel(model)
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                run(x).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    return *found, record.figures("memory")


@pytest.mark.slow
@pytest.mark.parametrize("is_inside", [False, True], ids=["around DDP", "inside"])
def test_ranks_plan_alike(is_inside: bool) -> None:
    ranks = run_on_ranks(stepped, args=(is_inside,))
    for eager, ours, figures in ranks:
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
        assert figures["tiles"] > 1 and figures["peak_bytes"] <= 1.05 * BUDGET
        assert figures == ranks[0][2]
