"""What is recomputed gives the same results, and what must run once does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fxpasses import MemoryBudgetError
from fxpasses.compiler import memory_partitioner
from fxpasses.memory.footprint import Footprint, footprint_of
from tests.memory.programs import PLANS, PLENTY, WIDTH, Model, added
from tests.support import compiled


def test_checkpoints_are_undone_where_there_is_room() -> None:
    expected, most = added(Model, PLENTY)
    _, least = added(lambda: Model(checkpoints=True), PLENTY)
    found, peak = added(lambda: Model(checkpoints=True), most, **{"memory.checkpoints": "free"})
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert least < 0.4 * most and 0.8 * most < peak <= most  # the first layer is none of those that are alike
    _, peak = added(lambda: Model(checkpoints=True), round(1.01 * least), **{"memory.checkpoints": "free"})
    assert peak <= 1.01 * least


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_is_dropped_in_forward_is_dropped_in_backward(lowering: str) -> None:
    """With other random numbers in backward, the gradient would not be that of the loss."""
    torch.manual_seed(0)

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = F.dropout(x.sin() * weight, 0.5)
            return x

    model = Dropping()
    x = torch.ones(32, 64, requires_grad=True)
    compiled(model, lowering, memory=PLENTY)(x)
    most = PLANS.pop().peak()
    tried = 0
    for share in (1.0, 0.9, 0.8):
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                out = compiled(model, lowering, memory=round(share * most))(x)
            except MemoryBudgetError:
                break
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(gradient == 0, out == 0) and 0 < (out == 0).sum() < out.numel()
        tried += 1
    assert tried


@torch.library.custom_op("fxpasses_tests::unknown_noise", mutates_args=())
def unknown_noise(x: Tensor) -> Tensor:
    """Nothing in its schema says that it is random."""
    return torch.rand_like(x)


@unknown_noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def of_cond(x: Tensor) -> Tensor:
    return torch.cond(x.shape[0] > 0, lambda y: F.dropout(y, 0.5), lambda y: y.clone(), (x,))


@pytest.mark.parametrize("noise", [torch.rand_like, unknown_noise, F.dropout, of_cond])
def test_what_is_random_or_unknown_runs_once(noise: Callable[[Tensor], Tensor]) -> None:
    """Before, operators without PyTorch's tag, and bodies of higher-order ones, ran again, with other numbers."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                y = layer(x).tanh()
                x = (y * noise(y.detach())).sin() * y
            return x.square().sum()

    expected, _ = added(Noisy, PLENTY)
    most = PLANS[-1].peak()
    for share in (0.8, 0.6):
        try:
            found, _ = added(Noisy, round(share * most))
        except MemoryBudgetError:
            assert share < 0.8
            break
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_long_chains_of_fused_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a RecursionError from some 500 on."""
    found = []

    def fused(partition: Any, _: bool, *given: Any) -> Any:
        found.append(footprint_of(partition, True, *given))
        return found[-1]

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(700))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = x * weight
            return x.sum()

    monkeypatch.setattr(memory_partitioner, "footprint_of", fused)
    model = Chain()
    compiled(model, "aot_eager", memory=PLENTY, fold="off")(torch.ones(4, 8)).backward()
    assert found and found[-1].forward > 0


class Chain(nn.Module):
    """Many operators, and no layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 5 for _ in range(75))

    def forward(self, x: Tensor) -> Tensor:
        for number, weight in enumerate(self.weights):
            x = (x @ weight + number).sin().sigmoid()
        return x.sum()


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_large_graphs_are_partitioned_few_times(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All partitions take about half as long as Inductor would for the graph."""
    made: list[int] = []
    predicted: list[object] = []

    def partition(joint: Any, *given: Any, **named: Any) -> Any:
        made.append(len(joint.graph.nodes))
        return min_cut_rematerialization_partition(joint, *given, **named)

    def footprint(*given: Any) -> Footprint:
        predicted.append(given)
        return footprint_of(*given)

    monkeypatch.setattr(memory_partitioner, "min_cut_rematerialization_partition", partition)
    monkeypatch.setattr(memory_partitioner, "footprint_of", footprint)
    options = {"offload": "disk", "offload.min_bytes": 0} if offload else {}
    _, most = added(Chain, PLENTY, **options)
    assert len(made) == 1 and made[0] > 1000
    made.clear()
    predicted.clear()
    _, peak = added(Chain, round(0.6 * most), **options)
    assert peak <= 0.6 * most and len(made) <= 11
    assert len(predicted) <= (200 if offload else 11)
    made.clear()
    with pytest.raises(MemoryBudgetError):
        added(Chain, most // 20, **options)
    assert len(made) <= 6  # planned once more, it would be the same
