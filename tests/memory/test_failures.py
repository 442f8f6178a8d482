"""What cannot fit is refused, and what fails in planning costs the plan alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from bench.counting import allocated_bytes as peak_of
from fxpasses import MemoryBudgetError
from fxpasses.memory.step import Step
from tests.memory.programs import PLENTY, Model, added, batch, step
from tests.support import compiled


@pytest.mark.usefixtures("few_tries")
def test_what_cannot_fit_is_refused_before_the_step() -> None:
    _, most = added(Model, PLENTY)
    with pytest.raises(MemoryBudgetError, match=r"^fastpack.memory is .*KiB, and") as caught:
        added(Model, most // 10)
    files = {entry.path.name for entry in caught.traceback}
    assert "backend.py" in files and not files & {"convert_frame.py", "output_graph.py"}  # none of Dynamo's


@pytest.mark.slow
def test_a_budget_that_cannot_be_is_refused_for_each_model() -> None:
    """Before, a graph of another model of the class, of another budget, or of inference, made it a warning."""
    _, most = added(Model, PLENTY)
    torch._dynamo.reset()
    model = Model()
    step(compiled(model, "aot_eager", memory=most), model, batch())
    torch._dynamo.reset()
    program = compiled(model, "aot_eager", memory=most // 10)
    with torch.no_grad():
        program(batch())
    for _ in range(2):
        with pytest.raises(MemoryBudgetError):
            program(batch())


@pytest.mark.parametrize("name", ["footprint_of", "movable", "operands_of", "recomputed", "MemoryPartitioner._report"])
def test_a_planner_that_fails_leaves_the_graph_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a plan: half of one counted, and where tiles would have been tried, the step was refused."""

    def fails(*given: Any) -> Any:
        raise ZeroDivisionError(f"a defect in {name}")

    expected, _ = added(Model, PLENTY)
    torch._dynamo.reset()
    monkeypatch.setattr(f"fxpasses.compiler.memory_partitioner.{name}", fails)
    model = Model()
    program = compiled(model, "aot_eager", memory=1000, strict=False)
    with pytest.warns(UserWarning, match="planning memory failed .ZeroDivisionError: a defect.*without a budget"):
        found = step(program, model, batch())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["Step.outlook", "guard_compiled_graph", "current_compilation", "_StillFits.__init__"])
def test_a_guard_that_cannot_be_made_leaves_the_plan_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning. Before, the graph ran uncompiled."""

    def fails(*given: Any) -> Any:
        raise ZeroDivisionError(f"a defect in {name}")

    expected, most = added(Model, PLENTY)
    torch._dynamo.reset()
    owner = "fxpasses.memory.step" if name.startswith("Step") else "fxpasses.compiler.fitting"
    monkeypatch.setattr(f"{owner}.{name}", fails)
    model, x = Model(), batch()
    program = compiled(model, "aot_eager", memory=round(0.7 * most), strict=False)
    with pytest.warns(UserWarning, match="guarding how much memory a step takes failed .*Its plan stays as it is"):
        found = step(program, model, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert peak_of(lambda: step(program, model, x)) <= 0.7 * most


@pytest.mark.parametrize("piece", ["fxpasses.memory.step.needs", "fxpasses.memory.limits.in_use"])
def test_a_step_that_cannot_be_planned_has_no_budget(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning. Before, its graph ran uncompiled."""

    def fails(*given: Any) -> Any:
        raise ZeroDivisionError(f"a defect in {piece}")

    expected, _ = added(Model, PLENTY)
    torch._dynamo.reset()
    monkeypatch.setattr(piece, fails)
    model = Model()
    program = compiled(model, "aot_eager", memory=1000, strict=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = step(program, model, batch())
    texts = [str(each.message) for each in said if str(each.message).startswith("fxpasses: ")]
    assert len(texts) == 1 and f"a defect in {piece}" in texts[0] and "budget" in texts[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("few_tries")
@pytest.mark.parametrize("name", ["is_too_large", "in_words", "describe"])
def test_an_error_about_a_plan_costs_one_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, most = added(Model, PLENTY)

    def fail(*given: Any) -> None:
        raise RuntimeError(f"no {name}")

    monkeypatch.setattr(Step, name, fail)
    torch._dynamo.reset()
    model = Model()
    budget = most // 10 if name == "in_words" else round(0.7 * most)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = step(compiled(model, "aot_eager", memory=budget, strict=False), model, batch())
    (text,) = [str(each.message) for each in said if "fxpasses" in str(each.message)]
    assert f"no {name}" in text and "uncompiled" not in text
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
