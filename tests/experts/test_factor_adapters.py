"""Adapters of experts that are applied to the rows give eager mode's numbers, and no weight is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect
from fxpasses.report import Reason
from tests.support import compiled, reports_of

EXPERTS, TOKENS, WIDTH, HIDDEN, RANK = 4, 24, 32, 48, 3


def experts(x: Tensor, chosen: Tensor, up: Tensor, down: Tensor, transposed: bool = True) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        rows = torch.where(chosen == expert)[0]
        first, second = (w[expert].t() if transposed else w[expert] for w in (up, down))
        out = out.index_add(0, rows, ((x[rows] @ first).sin() @ second))
    return out


class Adapted(torch.nn.Module):
    """frozen: whether the weights are. transposed: [E, out, in], as `nn.Linear` stores them."""

    def __init__(self, frozen: bool = True, transposed: bool = True, rank: int = RANK, scale: float = 2.0) -> None:
        super().__init__()
        self.transposed, self.scale = transposed, scale
        sizes = {"up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
        for name, (out, into) in sizes.items():
            first, second = (out, into) if transposed else (into, out)
            made = {name: (first, second), f"{name}_b": (first, rank), f"{name}_a": (rank, second)}
            for own, shape in made.items():
                parameter = torch.nn.Parameter(torch.randn(EXPERTS, *shape, dtype=torch.float64))
                parameter.requires_grad_(not frozen or own != name)
                self.register_parameter(own, parameter)

    def weights(self, name: str) -> Tensor:
        weight, b, a = (getattr(self, own) for own in (name, f"{name}_b", f"{name}_a"))
        return torch.baddbmm(weight, b, a, alpha=self.scale)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return experts(x, chosen, self.weights("up"), self.weights("down"), self.transposed)


def found(step: Any, model: Adapted, *inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = inputs[0].clone().requires_grad_()
    result = step(x, *inputs[1:])
    result.square().sum().backward()
    return [result.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def compare(model: Adapted, forward: Any = None) -> Any:
    """Compare all numbers with eager mode's; returns the pass's report."""
    torch.manual_seed(0)
    forward = forward or model
    with fxpasses.inspect.record() as record:
        step = compiled(forward, "aot_eager", adapters="factored")
        for top in (EXPERTS, 2):  # then two experts get nothing
            inputs = torch.randn(TOKENS, WIDTH, dtype=torch.float64), torch.randint(0, top, (TOKENS,))
            expected = found(forward, model, *inputs)
            torch.testing.assert_close(found(step, model, *inputs), expected, rtol=1e-9, atol=1e-9)
    return reports_of(record, "factor_adapters")[-1]


@pytest.mark.parametrize("transposed", [True, False])
def test_no_weight_is_made(transposed: bool) -> None:
    report = compare(Adapted(transposed=transposed))
    assert report.figures == {"adapters": 2, "weight_bytes": 2 * EXPERTS * WIDTH * HIDDEN * 8}


def test_in_a_checkpoint() -> None:
    model = Adapted()

    def forward(x: Tensor, chosen: Tensor) -> Tensor:
        return x + checkpoint(model, x, chosen, use_reentrant=False)

    assert compare(model, forward).figures["adapters"] == 2


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Adapted(frozen=False), Reason.NO_GAIN), (Adapted(rank=16), Reason.NO_GAIN)],
    ids=["trained weights", "large rank"],
)
def test_what_would_not_gain_stays(model: Adapted, reason: Reason) -> None:
    report = compare(model)
    assert not report.changed and {refusal.reason for refusal in report.refusals} == {reason}


def test_weights_that_something_else_reads_stay() -> None:
    model = Adapted()

    def forward(x: Tensor, chosen: Tensor) -> Tensor:
        up = model.weights("up")
        return experts(x, chosen, up, model.weights("down")) + up.square().mean()

    report = compare(model, forward)
    assert report.figures["adapters"] == 1
    assert [refusal.reason for refusal in report.refusals] == [Reason.WEIGHTS_USED]


def test_it_is_asked_for() -> None:
    with fxpasses.inspect.record() as record:
        x, chosen = torch.randn(TOKENS, WIDTH, dtype=torch.float64), torch.arange(TOKENS) % EXPERTS
        compiled(Adapted(), "eager")(x, chosen)
    assert not any(report.changed for report in reports_of(record, "factor_adapters"))
    assert any(report.changed for report in reports_of(record, "group_experts"))
