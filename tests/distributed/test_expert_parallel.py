"""Expert parallel in torchtitan's manner on two ranks: one graph, grouped experts, fewer reads than eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import fxpasses.inspect
from fxpasses.inspect.figures import figures
from tests.distributed.expert_parallel import WIDTH, ListedExperts, Model
from tests.distributed.expert_parallel import Experts as StackedExperts
from tests.distributed.ranks import run_on_ranks
from tests.support import compiled

TOKENS = 12
EAGER_READS = 3  # a layer's copies to the host: the splits of what it sends, of what it receives, and the counts
READS = 1  # all of them follow from the counts that the ranks exchange
KINDS = {"stacked": StackedExperts, "listed": ListedExperts}


def step(program: Any, model: Model, x: Tensor) -> dict[str, Any]:
    """The numbers of a training step, and the splits that it leaves."""
    x = x.clone().requires_grad_()
    out = program(x)
    gradients = torch.autograd.grad(out.square().sum(), [x, *model.parameters()], allow_unused=True)
    splits = [(layer.dispatcher.input_splits, layer.dispatcher.output_splits) for layer in model.layers]
    return {"numbers": [out.detach(), *gradients], "splits": splits}


def train(rank: int, kind: str, layers: int, checkpoints: bool, lowering: str, steps: int) -> dict[str, Any]:
    """Differences to eager mode, and what was compiled. Each rank has tokens and a number of tokens of its own."""
    torch.manual_seed(0)
    model = Model(KINDS[kind], checkpoints, layers)
    program, differences = compiled(model, lowering, experts="auto"), []
    counters.clear()
    with fxpasses.inspect.record() as record:
        for number in range(steps):
            torch.manual_seed(10 * number + rank)
            x = torch.randn(TOKENS + number + rank, WIDTH)
            expected, actual = step(model, model, x), step(program, model, x)
            assert actual["splits"] == expected["splits"]
            pairs = zip(actual["numbers"], expected["numbers"], strict=True)
            differences += [(a - b).abs().max().item() for a, b in pairs if a is not None and b is not None]
    last = [[stage for stage in graph.stages if stage.regions is not None][-1] for graph in record.graphs]
    return {
        "difference": max(differences),
        "breaks": dict(counters["graph_break"]),
        "reads": [figures(stage).host_reads for stage in last],
        "experts": record.figures("group_experts"),
    }


def train_both(rank: int) -> list[dict[str, Any]]:
    return [train(rank, "stacked", 2, True, "aot_eager", 2), train(rank, "listed", 1, False, "aot_eager", 1)]


@pytest.mark.slow
def test_a_step_is_eager_modes_bit_for_bit() -> None:
    """With checkpoints and without. The second batch has another number of tokens: sizes are not known any more."""
    for checkpointed, listed in run_on_ranks(train_both, seconds=240):
        assert checkpointed["difference"] == listed["difference"] == 0
        assert not checkpointed["breaks"] and not listed["breaks"]
        assert checkpointed["reads"] == [2 * READS] * 2 and listed["reads"] == [READS]
        assert checkpointed["experts"] == {"loops_grouped": 4} and listed["experts"] == {"loops_grouped": 1}


@pytest.mark.slow
def test_through_inductor() -> None:
    for found in run_on_ranks(train, args=("stacked", 1, True, "inductor", 1), seconds=240):
        assert found["difference"] < 1e-4
        assert not found["breaks"] and found["reads"] == [READS]
