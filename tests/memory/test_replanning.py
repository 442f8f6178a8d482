"""When a step is planned anew: what is in use, what a step has taken, and what the batch needs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpasses
import fxpasses.inspect
from bench.counting import allocated_bytes as peak_of
from fxpasses.compiler import fitting
from fxpasses.memory import limits
from tests.memory.programs import PLANS, PLENTY, ROWS, WIDTH, Labelled, Model, added, batch, labelled, step
from tests.support import compiled


def test_an_optimizer_that_gets_its_state_is_planned_for(in_use: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    expected, most = added(Model, PLENTY)
    torch._dynamo.reset()
    PLANS.clear()
    model, x = Model(), batch()
    program = compiled(model, "aot_eager", memory=most)
    found = [step(program, model, x)]
    assert PLANS[-1].peak() == pytest.approx(most, rel=0.01)
    in_use[0] = most // 3
    found += [step(program, model, x) for _ in range(3)]
    assert len(PLANS) == 2 and most // 3 <= PLANS[-1].before <= 0.4 * most and PLANS[-1].peak() <= most
    assert capsys.readouterr().err.count("Model.forward is planned again: ") == 1
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=0)
    assert peak_of(lambda: step(program, model, x)) <= most - most // 3


def test_a_step_that_took_more_than_predicted_is_planned_anew_once(
    highest: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    expected, most = added(Model, PLENTY)
    torch._dynamo.reset()
    PLANS.clear()
    model, x = Model(), batch()
    program = compiled(model, "aot_eager", memory=round(1.02 * most))
    with fxpasses.inspect.record() as record:
        found = [step(program, model, x)]
        highest[0] = round(1.04 * most)  # within the tolerance
        found.append(step(program, model, x))
        assert len(PLANS) == 1
        highest[0] = round(1.2 * most)
        found += [step(program, model, x) for _ in range(2)]
        assert len(PLANS) == 2 and PLANS[-1].before == pytest.approx(0.24 * most, rel=0.05)
        highest[0] = 2 * most
        found += [step(program, model, x) for _ in range(2)]
    assert len(PLANS) == 2
    assert capsys.readouterr().err.count("more than predicted") == 1
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=0)
    reports = [each for graph in record.graphs for each in graph.reports if each.pass_name == "memory"]
    assert [each.figures["peak_bytes_measured"] for each in reports] == [round(1.2 * most), 2 * most]


def test_another_model_is_not_planned_for_what_a_collected_one_took(highest: list[int]) -> None:
    """It may have the same code, and parameters at the same addresses."""
    _, most = added(Model, PLENTY)
    torch._dynamo.reset()
    model, x = Model(), batch()
    program = compiled(model, "aot_eager", memory=round(1.02 * most))
    step(program, model, x)
    highest[0] = round(1.2 * most)
    step(program, model, x)
    assert fitting._unpredicted
    del model, program
    torch._dynamo.reset()
    gc.collect()
    assert not fitting._unpredicted


def test_a_step_that_cannot_be_measured_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: Any) -> int:
        raise OSError("on purpose")

    expected, most = added(Model, PLENTY)
    torch._dynamo.reset()
    model, x = Model(), batch()
    program = compiled(model, "aot_eager", memory=round(1.02 * most), strict=False)
    monkeypatch.setattr(limits, "highest", fail)
    with pytest.warns(UserWarning, match="measuring the memory of a step failed .*on purpose") as warned:
        found = [step(program, model, x) for _ in range(3)]
    assert len([each for each in warned if "on purpose" in str(each.message)]) == 1
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=0)


def test_a_larger_batch_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Before it runs, and with room for one that is larger still."""
    _, most = added(Model, PLENTY)
    torch._dynamo.reset()
    PLANS.clear()
    model = Model()
    program = compiled(model, "aot_eager", memory=most, dynamic=True)
    for rows, is_planned in ((ROWS, True), (ROWS // 2, False), (3 * ROWS // 2, True), (2 * ROWS, False), (40, False)):
        x, before = batch(rows), len(PLANS)
        expected = step(model, model, x)
        torch.testing.assert_close(step(program, model, x), expected, rtol=1e-5, atol=1e-5)
        assert (len(PLANS) > before) is is_planned
        assert peak_of(lambda: step(program, model, x)) <= most  # noqa: B023
    assert "Model.forward is planned again: the batch is larger" in capsys.readouterr().err


@pytest.mark.slow
def test_what_only_labelled_tokens_need_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    """`live_rows` computes as many rows as the batch has labels."""

    def of(model: nn.Module, program: Any, texts: tuple[Tensor, Tensor]) -> list[Tensor]:
        program(*texts).backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return found  # type: ignore[return-value]

    few, more = labelled(ROWS // 4), labelled(3 * ROWS // 8)
    model = Labelled()
    program = compiled(model, "aot_eager", memory=PLENTY)
    of(model, program, few)
    most = peak_of(lambda: of(model, program, few))
    assert PLANS[-1].peak() == pytest.approx(most, rel=0.05)
    torch._dynamo.reset()
    PLANS.clear()
    budget = round(0.85 * most)
    model = Labelled()
    program = compiled(model, "aot_eager", memory=budget)
    for found, plans in ((few, 1), (more, 2), (few, 2)):
        expected = of(model, model, found)
        torch.testing.assert_close(of(model, program, found), expected, rtol=1e-5, atol=1e-6)
        assert len(PLANS) == plans
        if found is few:
            assert peak_of(lambda: of(model, program, few)) <= 1.05 * budget
    assert "planned again: the batch is larger" in capsys.readouterr().err


class Running(nn.Module):
    """All rows go through sums along the tokens, and only those with a label through products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for norm in self.norms:
            x = x + F.gelu(norm(x).cumsum(1))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


@pytest.mark.slow
def test_rows_without_products_are_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A batch with as many labels as before, and four times the texts."""

    def of(texts: int, tokens: int) -> tuple[Tensor, Tensor]:
        labels = torch.full((texts, tokens), -100)
        labels[0, :16] = 1
        return torch.randn(texts, tokens, WIDTH, generator=torch.Generator().manual_seed(1)), labels

    def run(program: Any, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        program(*batch).backward()
        model.zero_grad()

    model, small, large = Running(), of(4, 64), of(16, 64)
    program = compiled(model, "aot_eager", memory=PLENTY, dynamic=True)
    run(program, model, large)
    most = peak_of(lambda: run(program, model, large))
    torch._dynamo.reset()
    model = Running()
    program = compiled(model, "aot_eager", memory=round(0.95 * most), dynamic=True)
    run(program, model, small)
    plans = len(PLANS)
    run(program, model, large)
    assert len(PLANS) > plans and "planned again: the batch is larger" in capsys.readouterr().err
    assert peak_of(lambda: run(program, model, large)) <= 0.95 * most


def test_gradients_that_are_added_to_are_there_from_the_start(in_use: list[int]) -> None:
    model, x = Model(), batch()
    program = compiled(model, "aot_eager", memory=PLENTY)
    program(x).backward()
    torch._dynamo.reset()
    in_use[0] = 12345
    program(x).backward()
    first, second = PLANS
    assert not first.has_gradients and second.has_gradients and second.before == 12345
    assert second.peak() < 12345 + first.peak()


class Scaled(Model):
    """The batch is its first input, and no parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


@pytest.mark.usefixtures("few_tries")
@pytest.mark.parametrize("kind", ["leaves", "blocks", "frozen"])
def test_a_model_that_did_fit_is_warned_of(kind: str, in_use: list[int]) -> None:
    """Also where the batch is a leaf, another one in each step; where the block that does not fit shares a graph; and
    where other parameters are trained than before. Before, the step was refused."""

    def run(used: Sequence[int]) -> list[Any]:
        x = batch().requires_grad_()
        if kind == "blocks":
            h = x
            for program, each in zip(programs, used, strict=True):
                in_use[0] = each
                h = program(h)
            h.sum().backward()
        else:
            in_use[0] = used[-1]
            programs[0](x).backward()
        found = [x.grad, *(parameter.grad for parameter in model.parameters())]
        model.zero_grad()
        return found

    def programs_of(**options: Any) -> list[Any]:
        torch._dynamo.reset()
        PLANS.clear()
        parts = model.layers[:3] if kind == "blocks" else [model]
        return [compiled(part, "aot_eager", **options) for part in parts]

    model = Scaled()
    model.layers[0].requires_grad_(kind != "frozen")
    programs = programs_of(memory=PLENTY)
    run([0, 0, 0])
    programs = programs_of(memory=(budget := PLANS[-1].peak()))
    run([0, 0, 0])
    model.requires_grad_()
    with pytest.warns(UserWarning, match="fastpack.memory is .* are in use before it") as warned:
        found = [run([0, budget, 2 * budget]) for _ in range(2)]
    assert len(warned) == 1
    programs = programs_of()
    torch.testing.assert_close(found[1], run([0, 0, 0]), rtol=1e-5, atol=1e-5)
    assert not fitting._outgrown
