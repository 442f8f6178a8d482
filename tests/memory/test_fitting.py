"""A step that has to fit: it takes no more than it was given, and results are the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpasses
import fxpasses.inspect
from fxpasses.compiler import fitting, memory_partitioner
from fxpasses.fold.outlining import WHOLE
from fxpasses.memory.footprint import Footprint
from fxpasses.memory.step import Step, TooLarge
from fxpasses.options import Options
from tests.memory.programs import PLANS, PLENTY, ROWS, WIDTH, Block, Model, added, batch, fits, step
from tests.support import compiled


def test_a_step_takes_no_more_than_it_is_given() -> None:
    fits(Model, (1.01, 0.7, 0.5), "aot_eager")


@pytest.mark.slow
def test_a_step_under_inductor_takes_no_more_than_it_is_given() -> None:
    expected, most = added(Model, PLENTY, "inductor")
    for share in (1.0, 0.8, 0.6):
        found, peak = added(Model, round(share * most), "inductor")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert peak <= share * most
        assert PLANS[-1].peak() == pytest.approx(peak, rel=0.03)  # of the code that Inductor has written


class Scores(nn.Module):
    """Compares all rows with each other: scores that backward needs at one time, whatever is saved; and no tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + (h @ h.T).softmax(-1) @ h


class TwoKinds(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer for _ in range(3) for layer in (Scores(), Block(0.0)))


@pytest.mark.slow
def test_the_kind_of_layer_that_is_planned_first_leaves_room_for_the_other() -> None:
    """Blocks are: they take the other kind for one like themselves, and with as much saved as then fits it does not."""
    expected, most = added(TwoKinds, PLENTY)
    for share in (0.7, 0.65):
        found, peak = added(TwoKinds, round(share * most))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert peak <= share * most


@pytest.mark.parametrize(
    ("taken", "tried"), [({2: 118, 4: 95}, [2, 4]), ({2: 104, 4: 102}, [2, 4, 2])], ids=["that fit", "in vain"]
)
def test_more_tiles_are_tried_where_compiled_code_takes_more_than_was_planned(
    taken: dict[int, int], tried: list[int]
) -> None:
    """What is compiled last is what runs, and what reports tell of."""
    x, compiled = torch.ones(2, requires_grad=True), []

    def compile(step: Step | None) -> Callable[..., Any]:
        assert step is not None
        if step.tiles == 1:
            raise TooLarge
        compiled.append(step.tiles)
        step.tiled, step.could_tile, step.planned = 1, True, 98
        step.footprints[""] = Footprint(forward=taken[step.tiles])
        return lambda: step.tiles

    gm = torch.fx.symbolic_trace(nn.Identity())
    assert fitting.fitted(Options.parse({"fastpack.memory": 100}).memory, gm, [x], None, compile)() == tried[-1]
    assert compiled == tried


def test_a_plan_is_no_part_of_a_key() -> None:
    """Inductor pickles its settings, and keeps nothing that it cannot pickle."""
    one = Step(1, 2, footprints={"a": Footprint(backward=lambda shared: 0)})
    partitioner = memory_partitioner.MemoryPartitioner(Options.parse({"fastpack.memory": 1}), one, WHOLE)
    assert pickle.dumps(partitioner)
    again = copy.deepcopy(partitioner)  # as Inductor copies its settings, before it pickles them
    assert again.uuid() == partitioner.uuid() and pickle.dumps(again)


def test_inference_has_no_plan() -> None:
    model = Model()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, "aot_eager", memory=1)(batch()), model(batch()))
    assert not any(plan.footprints for plan in PLANS)


def test_a_report_says_what_was_decided(tmp_path: Path) -> None:
    _, most = added(Model, PLENTY)
    torch._dynamo.reset()
    model = Model()
    with fxpasses.inspect.record() as record:
        step(compiled(model, "aot_eager", memory=round(0.7 * most)), model, batch())
    (report,) = [each for graph in record.graphs for each in graph.reports if each.pass_name == "memory"]
    assert report.changed and "are saved for backward in each call" in report.summary
    figures = report.figures
    assert 0.5 * most < figures["peak_bytes"] <= 0.7 * most
    assert 0 < figures["bytes_saved"] < figures["bytes_saved_without"] == ROWS * WIDTH * 4 * (2 + 2 * 4) + ROWS * 4 * 2
    assert figures["operators_recomputed"] > 0
    forward = 2 * 2 * ROWS * WIDTH * 4 * WIDTH  # of the products, and each of them is half
    assert figures["flops_recomputed"] in (0, forward // 2, forward)
    plan = report.plan
    assert plan is not None and max(plan.planned) == figures["peak_bytes"] <= plan.budget == round(0.7 * most)
    assert max(plan.saving_all) == pytest.approx(most, rel=0.01)
    assert len(plan.planned) == len(plan.saving_all) == 2 * len(PLANS[-1].calls)
    record.save(tmp_path / "record.jsonl")
    read = fxpasses.inspect.load(tmp_path / "record.jsonl")
    assert [each.plan for graph in read.graphs for each in graph.reports if each.plan] == [plan]
