"""What a step is predicted to take is what it takes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.counting import allocated_bytes as peak_of
from fxpasses import MemoryBudgetError
from fxpasses.memory.workspace import _has_onednn
from tests.memory.programs import LAYERS, PLANS, PLENTY, WIDTH, Model, batch, random_program, step
from tests.support import compiled, thorough

RANDOM = 300  # programs


def test_logits_that_the_program_returns_are_there_in_backward() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 64 * WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(x.sin())
            return logits.logsumexp(-1).sum(), logits

    model, x = Head(), batch()
    program = compiled(model, "aot_eager", memory=PLENTY)

    def run() -> None:
        loss, logits = program(x)
        loss.backward()
        model.zero_grad()
        del logits

    run()
    assert peak_of(run) == pytest.approx(PLANS[-1].peak(), rel=0.03)


@pytest.mark.skipif(not _has_onednn(), reason="this CPU has no products of bfloat16")
def test_products_of_bfloat16_need_buffers() -> None:
    model, x = Model(), batch()
    program = compiled(model, "aot_eager", memory=PLENTY)
    with torch.autocast("cpu", torch.bfloat16):
        step(program, model, x)
        peak = peak_of(lambda: step(program, model, x))
    assert PLANS[-1].peak() == pytest.approx(peak, rel=0.02)  # 5 % less without them


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=thorough) for part in range(1, 25))])
def test_random_programs(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(part * RANDOM // 25, (part + 1) * RANDOM // 25):
        choose, found, most = random.Random(seed), [], 0
        for budget in (PLENTY, 1.0, choose.uniform(0.4, 1.0)):
            torch._dynamo.reset()
            PLANS.clear()
            model, x = random_program(seed)
            given = budget if budget == PLENTY else round(budget * most)
            program = compiled(lambda x, model=model: model(x).square().sum(), "aot_eager", memory=given)
            try:
                found.append(step(program, model, x))
            except MemoryBudgetError:
                assert budget < 1.0
                continue
            torch.testing.assert_close(found[-1], found[0], rtol=0, atol=0)
            peak = peak_of(lambda: step(program, model, x))  # noqa: B023
            predicted = PLANS[-1].peak()
            # Gradients of a sum's operands are one tensor, and count twice.
            assert 0.98 * peak <= predicted <= 1.2 * peak, (seed, budget, predicted, peak)
            most = most or predicted


class Packed(nn.Module):
    """Attention within documents, which end where positions begin anew."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(LAYERS))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        number = positions.eq(0).cumsum(-1)
        mask = (number[:, :, None] == number[:, None]).tril()[:, None]
        for layer in self.layers:
            q, k, v = layer(x).unsqueeze(1).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]
        return x.square().mean()


def predicted_and_measured(width: int, documents: Sequence[int]) -> tuple[int, int]:
    model, x = Packed(width), torch.randn(1, sum(documents), width)
    positions = torch.cat([torch.arange(n) for n in documents])[None]
    program = compiled(model, "aot_eager", memory=PLENTY)

    def run() -> None:
        program(x, positions.clone()).backward()
        model.zero_grad()

    run()
    return PLANS[-1].peak(), peak_of(run)


def test_masks_that_attention_keeps_for_a_batch_count() -> None:
    """The largest of causal documents takes as much as several activations of a small model."""
    predicted, measured = predicted_and_measured(16, (700, 324))
    assert predicted == pytest.approx(measured, rel=0.03)


def test_bits_of_a_plan_that_nothing_writes_do_not_count() -> None:
    """It reserves one for each pair of a mask that is never whole, for irregular rows; documents have none."""
    predicted, measured = predicted_and_measured(64, (700, 324) * 8)
    assert predicted == pytest.approx(measured, rel=0.1)
