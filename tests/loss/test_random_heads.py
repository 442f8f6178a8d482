"""Random heads: chains of operators on logits, one of several reductions, and ways from there to a loss."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpasses.loss import chunks, region
from tests.loss.heads import COLUMNS, Head, batch
from tests.support import THOROUGH, assert_same, reports_of

Wide = Callable[[Head, Tensor, Tensor, Tensor], Tensor]  # of the model, logits [.., V], hidden rows and tokens

WIDE: dict[str, Wide] = {
    "scaled": lambda m, y, x, tokens: y * 0.7,
    "scaled by a parameter": lambda m, y, x, tokens: y * m.number / 3,
    "of bias": lambda m, y, x, tokens: m.columns[: y.shape[-1]] + y,
    "capped": lambda m, y, x, tokens: (y / 5).tanh() * 5,
    "of temperature": lambda m, y, x, tokens: y / 1.5,
    "of temperatures": lambda m, y, x, tokens: y / _like(tokens[:, :1] % 3 + 1, y),
    "of positions": lambda m, y, x, tokens: y + _rows(tokens % 5, y),
    "masked": lambda m, y, x, tokens: y.masked_fill(torch.arange(y.shape[-1]) == 2, -30.0),
    "log of softmax": lambda m, y, x, tokens: y.log_softmax(-1),
    "less the greatest": lambda m, y, x, tokens: y - y.max(-1, keepdim=True).values.detach(),
    "less the sum": lambda m, y, x, tokens: y - y.logsumexp(-1, keepdim=True),
    "of two": lambda m, y, x, tokens: torch.where(y > 0, y, y * 0.1),
    "half detached": lambda m, y, x, tokens: (y + y.detach()) / 2,
    "in place": lambda m, y, x, tokens: (y * 1.0).mul_(0.9).add_(0.1),
    "fewer columns": lambda m, y, x, tokens: y[..., 1:-1] if y.shape[-1] > COLUMNS - 4 else y,
    "adapted": lambda m, y, x, tokens: y + _as(m.up(m.down(x)), y) if y.shape[-1] == COLUMNS else y,
    "another": lambda m, y, x, tokens: torch.maximum(y, _as(m.other(x), y)) if y.shape[-1] == COLUMNS else y,
    "flat": lambda m, y, x, tokens: y.reshape(-1, y.shape[-1]),
    "normal": lambda m, y, x, tokens: y / y.square().mean(-1, keepdim=True).sqrt(),
}


def _rows(values: Tensor, y: Tensor) -> Tensor:
    values = values.to(y.dtype)
    return values[..., None] if y.dim() == 3 else values.flatten()[:, None]


def _like(values: Tensor, y: Tensor) -> Tensor:
    """[B, 1], for each row."""
    values = values.to(y.dtype)
    return values[..., None] if y.dim() == 3 else torch.ones(1)


def _as(other: Tensor, y: Tensor) -> Tensor:
    return other.view(y.shape)


Reduction = Callable[[Head, Tensor, Tensor, Tensor], Tensor]  # of logits, targets and tokens: a number for each row

REDUCTIONS: dict[str, Reduction] = {
    "cross entropy": lambda m, y, t, tokens: F.cross_entropy(
        y.reshape(-1, y.shape[-1]), t.clamp(max=y.shape[-1] - 1).view(-1), reduction="none", label_smoothing=0.1
    ),
    "chosen": lambda m, y, t, tokens: -y.gather(-1, _index(t, y)).squeeze(-1),
    "log of sum": lambda m, y, t, tokens: y.logsumexp(-1),
    "entropy": lambda m, y, t, tokens: -(y.softmax(-1) * y.log_softmax(-1)).sum(-1),
    "greatest": lambda m, y, t, tokens: y.amax(-1),
    "best": lambda m, y, t, tokens: y.topk(3, dim=-1).values.sum(-1),
    "mean": lambda m, y, t, tokens: y.tanh().mean(dim=-1),
    "divergence": lambda m, y, t, tokens: F.kl_div(
        y.log_softmax(-1), m.columns[: y.shape[-1]].softmax(-1).expand_as(y), reduction="none"
    ).sum(-1),
}


def _index(t: Tensor, y: Tensor) -> Tensor:
    index = t.clamp(min=0, max=y.shape[-1] - 1)
    return index.unsqueeze(-1) if y.dim() == 3 else index.view(-1, 1)


TAILS: dict[str, Callable[[Head, Tensor, Tensor, Tensor], Any]] = {
    "mean": lambda m, v, t, tokens: v.mean(),
    "masked mean": lambda m, v, t, tokens: (v * _mask(v, t)).sum() / _mask(v, t).sum(),
    "filled": lambda m, v, t, tokens: v.masked_fill(_mask(v, t) == 0, 0).sum() / 7,
    "of texts": lambda m, v, t, tokens: (v.view(t.shape) * _mask(v, t).view(t.shape)).sum(1).mul(0.5).mean(),
    "not linear": lambda m, v, t, tokens: F.logsigmoid(v.view(t.shape).sum(1)).sum(),
    "clipped": lambda m, v, t, tokens: (v.clamp(max=3.0) * _mask(v, t)).sum(),
    "squared": lambda m, v, t, tokens: (v**2).mean() - v.mean() * 0.1,
    "focal": lambda m, v, t, tokens: (v * (-v.detach()).exp()).sum(),
    "of a parameter": lambda m, v, t, tokens: v.mean() * m.number,
    "with rows": lambda m, v, t, tokens: (v.mean(), v.detach() * 2),
    "returned": lambda m, v, t, tokens: (v.sum(), v),
}


def _mask(v: Tensor, t: Tensor) -> Tensor:
    return (t != -100).to(v.dtype).view(v.shape)


def plan(seed: int) -> tuple[list[str], str, str]:
    draw = random.Random(seed)
    return draw.choices([*WIDE], k=draw.randrange(5)), draw.choice([*REDUCTIONS]), draw.choice([*TAILS])


def program(steps: list[str], reduction: str, tail: str) -> Any:
    def loss(m: Head, x: Tensor, t: Tensor, tokens: Tensor) -> Any:
        y = m.head(x)
        for name in steps:
            y = WIDE[name](m, y, x, tokens)
        return TAILS[tail](m, REDUCTIONS[reduction](m, y, t, tokens), t, tokens)

    return loss


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "LEAST_COLUMNS", 16)
    monkeypatch.setattr(region, "LEAST_BYTES", 0)
    monkeypatch.setattr(chunks, "_LEAST_ROWS", 5)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)


def run(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        steps = plan(seed)
        torch.manual_seed(seed)
        torch._dynamo.reset()
        try:
            record = assert_same(
                Head(program(*steps)).double(), [batch(3, 7), batch(2, 9)], "eager", 1e-9, loss="chunks"
            )
        except Exception as error:
            raise AssertionError(f"seed {seed}: {steps}") from error
        reports = reports_of(record, "chunk_loss")
        counts["taken" if any(report.changed for report in reports) else "left"] += 1
        counts.update(refusal.text for report in reports for refusal in report.refusals)
    return counts


def test_two_heads() -> None:
    assert run(range(2))["taken"] == 2


@pytest.mark.slow
def test_many_heads() -> None:
    seeds = range(2, 300 if THOROUGH else 25)
    assert run(seeds)["left"] <= (20 if THOROUGH else 4)
