"""A step that has to fit into a device whose allocator refuses more: `fastpack.memory` where checkpoints do not do."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpasses
from fxpasses.base import once
from fxpasses.memory import movable
from fxpasses.offload.runtime import chain, pinned
from fxpasses.offload.runtime.calibration import Rates
from tests.device import simulated

WIDTH, LAYERS, ROWS = 32, 4, 256
SIM = torch.device("sim", 0)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12 * WIDTH), nn.Linear(12 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Mlp() for _ in range(LAYERS))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x.square().mean()


def rows(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1)).to(SIM)


def step(program: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = program(x)
    loss.backward()
    found = [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    return found


def compiled(model: nn.Module, budget: int, **more: Any) -> Any:
    options = {"fastpack.memory": budget, "fastpack.lowering": "aot_eager", "fastpack.strict": True}
    options |= {f"fastpack.{name}": value for name, value in more.items()}
    return torch.compile(model, backend="fastpack", options=options)


def most_of(program: Any, model: nn.Module, x: Tensor) -> int:
    simulated.reset_counts()
    step(program, model, x)
    torch.accelerator.synchronize()
    return simulated.most_allocated()


@pytest.mark.slow
def test_four_times_the_rows_that_checkpoints_fit():
    model = Model(checkpoints=True).to(SIM)
    step(model, model, rows(ROWS))
    most = most_of(model, model, rows(ROWS))
    x = rows(4 * ROWS)
    expected = step(model, model, x)
    simulated.limit(0, most)
    with pytest.raises(torch.OutOfMemoryError):
        step(model, model, x)
    model.zero_grad(set_to_none=True)
    model.checkpoints = False
    program = compiled(model, most)
    for _ in range(2):
        torch.testing.assert_close(step(program, model, x), expected, rtol=1e-5, atol=1e-6)
    assert most_of(program, model, x) <= most


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_a_step_stays_within_the_device(share):
    model = Model(checkpoints=False).to(SIM)
    x = rows(2 * ROWS)
    expected = step(model, model, x)
    budget = round(share * most_of(model, model, x))
    simulated.limit(0, budget)
    program = compiled(model, budget)
    for _ in range(2):
        torch.testing.assert_close(step(program, model, x), expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def fast_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """So fast that to move something is always better than to compute it again."""
    monkeypatch.setattr(movable, "rates", lambda *_: Rates(1e13, 1e13, 1e10, 1e10))
    monkeypatch.setattr(once, "_given", set())
    monkeypatch.setattr(pinned, "POOL", pinned.Pool())
    for devices in ("_tight", "_full"):
        monkeypatch.setattr(chain, devices, set())
    fxpasses.offload_stats(reset=True)


TO_HOST = {"offload": "host", "offload.min_bytes": 0}


def test_what_has_to_move_does_without_pinned_memory(fast_copies):
    model = Model(checkpoints=False).to(SIM)
    x = rows(2 * ROWS)
    expected = step(model, model, x)
    budget = round(0.6 * most_of(model, model, x))
    simulated.refuse_pinning()
    program = compiled(model, budget, **TO_HOST)
    with pytest.warns(UserWarning, match="cannot be pinned") as caught:
        for _ in range(3):
            torch.testing.assert_close(step(program, model, x), expected, rtol=1e-5, atol=1e-6)
    assert len(caught) == 1
    found = fxpasses.offload_stats()
    assert found.tensors_out > 0 and found.fallbacks["pinned"] > 0 and found.bytes_held == 0


@pytest.mark.parametrize("more", [{}, TO_HOST], ids=["recomputed", "moved"])
def test_a_device_that_runs_out_all_the_same_fails_the_step_and_not_the_next(more, fast_copies):
    """In forward, and in backward."""
    model = Model(checkpoints=False).to(SIM)
    x = rows(2 * ROWS)
    expected = step(model, model, x)
    program = compiled(model, round(0.6 * most_of(model, model, x)), **more)
    step(program, model, x)
    assert bool(fxpasses.offload_stats().tensors_out) == bool(more)
    for after in (0, 7, 14, 21, 28):
        simulated.refuse(at_least=1000, after=after, times=1)
        with contextlib.suppress(torch.OutOfMemoryError):
            step(program, model, x)
        simulated.refuse(times=0)
        model.zero_grad(set_to_none=True)
        torch.testing.assert_close(step(program, model, x), expected, rtol=1e-5, atol=1e-6)
    assert fxpasses.offload_stats().bytes_held == 0
