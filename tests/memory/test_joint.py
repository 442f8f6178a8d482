"""Values that are kept, recomputed or moved so that a step fits, whichever takes least."""

from __future__ import annotations

import errno
import itertools
import operator
import os
import pickle
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import fxpasses
import fxpasses.inspect
from bench.counting import allocated_bytes as peak_of
from fxpasses import MemoryBudgetError
from fxpasses.compiler import memory_partitioner
from fxpasses.compiler.memory_partitioner import MemoryPartitioner
from fxpasses.compiler.partitioner import Partitioner
from fxpasses.fold.outlining import WHOLE
from fxpasses.memory import joint, movable
from fxpasses.memory.joint import Option, Plan, least_time
from fxpasses.memory.recompute import RATIOS
from fxpasses.memory.step import Step as PlannedStep
from fxpasses.offload.choose import Candidate, Model, Step
from fxpasses.offload.runtime.calibration import Rates
from fxpasses.options import Options
from fxpasses.report import Report
from tests.memory import programs
from tests.memory.programs import LAYERS, PLENTY, ROWS, WIDTH, batch, random_program, step
from tests.support import compiled, thorough

FAST, MEDIUM, SLOW = 1e13, 1e9, 1e6  # bytes per second
OFFLOAD = {"offload": "disk", "offload.min_bytes": 0}
ALIKE = LAYERS - 1  # the first layer's input needs no gradient, so it is none of them


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    fxpasses.offload_stats(reset=True)
    yield
    torch._dynamo.reset()


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the rates of copies, in bytes per second."""

    def at(
        out: float, back: float | None = None, flops: float = 1e10, memory: float = 1e10, taken: float = 0.0
    ) -> None:
        monkeypatch.setattr(movable, "rates", lambda *_: Rates(out, back or out, flops, memory, taken))

    return at


class Ran:
    """A step with a budget: its loss and gradients, the peak, the plan's report, and how many tensors moved."""

    def __init__(self, budget: int, **options: Any) -> None:
        torch._dynamo.reset()
        model, x = programs.Model(), batch()
        with fxpasses.inspect.record() as record:
            program = compiled(model, "aot_eager", memory=budget, **options)
            self.found = step(program, model, x)
        self.report: Report = [r for g in record.graphs for r in g.reports if r.pass_name == "memory"][-1]
        self.figures = self.report.figures
        fxpasses.offload_stats(reset=True)
        self.peak = peak_of(lambda: step(program, model, x))
        self.moved = fxpasses.offload_stats().tensors_out
        torch.testing.assert_close(self.found, step(model, model, x), rtol=0, atol=0)
        # With 3 buffers, other calls' tensors are read a little later than predicted.
        assert 0.95 * self.peak <= self.figures["peak_bytes"] <= 1.15 * self.peak


@pytest.fixture(scope="module")
def most() -> int:
    """The bytes of a step that neither recomputes nor moves."""
    torch._dynamo.reset()
    model, x = programs.Model(), batch()
    program = compiled(model, "aot_eager", memory=PLENTY)
    step(program, model, x)
    return peak_of(lambda: step(program, model, x))


def test_with_room_for_all_nothing_moves(copying: Any, most: int) -> None:
    copying(FAST)
    ran = Ran(round(1.01 * most), **OFFLOAD)
    assert ran.moved == ran.figures["values_moved"] == ran.figures["exposed_microseconds"] == 0
    assert ran.figures["recomputing_microseconds"] == 0 and not ran.report.changed


def test_no_more_moves_than_has_to(copying: Any, most: int) -> None:
    copying(FAST)
    moved = []
    for share in (0.9, 0.7, 0.5):
        ran = Ran(round(share * most), **OFFLOAD)
        moved.append(ran.figures["bytes_moved"])
        assert ran.peak <= share * most and ran.moved == ALIKE * ran.figures["values_moved"]
        assert "operators_recomputed" not in ran.figures
        assert ran.figures["bytes_moved"] + ran.figures["bytes_saved"] == ROWS * WIDTH * 4 * (2 + 2 * 4) + ROWS * 4 * 2
    assert 0 < moved[0] < moved[1] < moved[2]
    assert "of each call wait for backward on the disk" in ran.report.summary


@pytest.mark.parametrize(
    ("rate", "taken"), [(SLOW, 0.0), (FAST, 1 / SLOW)], ids=["a slow disk", "copies that keep a core from computing"]
)
def test_what_moves_slowly_is_recomputed(rate: float, taken: float, copying: Any, most: int) -> None:
    copying(rate, taken=taken)
    ran = Ran(round(0.6 * most), **OFFLOAD)
    assert ran.peak <= 0.6 * most and ran.moved == ran.figures["values_moved"] == 0
    assert ran.figures["operators_recomputed"] > 0 and ran.figures["recomputing_microseconds"] > 0
    without = Ran(round(0.6 * most))
    shared = {name: number for name, number in ran.figures.items() if name in without.figures}
    assert shared == without.figures


def test_some_is_recomputed_and_some_moves(copying: Any, most: int) -> None:
    copying(MEDIUM)
    ran = Ran(round(0.6 * most), **OFFLOAD)
    assert ran.peak <= 0.6 * most and ran.moved == ALIKE * ran.figures["values_moved"] > 0
    assert ran.figures["operators_recomputed"] > 0
    assert ran.figures["recomputing_microseconds"] > 0 and ran.figures["exposed_microseconds"] > 0


def test_what_runs_once_moves_if_layers_alone_do_not_suffice(copying: Any, most: int) -> None:
    for rate in (FAST, SLOW):
        copying(rate)
        ran = Ran(round(0.35 * most), **OFFLOAD)
        assert ran.peak <= 0.35 * most and ran.moved > ALIKE * ran.figures["values_moved"]


def test_users_limits_hold(copying: Any, most: int) -> None:
    copying(FAST)
    ran = Ran(round(0.6 * most), **OFFLOAD | {"offload.min_bytes": 1 << 30})
    assert ran.moved == 0 and ran.figures["operators_recomputed"] > 0
    ran = Ran(PLENTY, **OFFLOAD | {"offload.device_budget": 1})
    assert ran.moved == ran.figures["values_moved"] > ALIKE * 6  # of the whole graph, as it has such a budget


@pytest.mark.slow
def test_several_buffers_and_a_graph_that_is_planned_as_a_whole(copying: Any, most: int) -> None:
    copying(FAST)
    for buffers, fold in itertools.product((1, 2, 3), ("auto", "off")):
        ran = Ran(round(0.7 * most), **OFFLOAD | {"offload.buffers": buffers}, fold=fold)
        assert ran.peak <= 1.05 * 0.7 * most and ran.moved > 0


def test_a_full_disk_keeps_what_was_to_move(copying: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning; the step takes more than its budget then, and nothing is lost."""

    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    copying(FAST)
    model, x = programs.Model(), batch()
    expected = step(model, model, x)
    program = compiled(model, "aot_eager", memory=round(0.6 * most), **OFFLOAD)
    with monkeypatch.context() as broken, pytest.warns(UserWarning, match="is not written to the file") as caught:
        broken.setattr(os, "pwrite", full)
        found = [step(program, model, x) for _ in range(3)]
    assert len(caught) == 1 and fxpasses.offload_stats().fallbacks["disk"] > 0
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=0)
    torch.testing.assert_close(step(program, model, x), expected, rtol=0, atol=0)
    assert fxpasses.offload_stats().bytes_held == 0


def test_without_a_plan_everything_moves(copying: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(memory_partitioner, "footprint_of", fails)
    model = programs.Model()
    with pytest.warns(UserWarning, match="planning memory failed"):
        step(compiled(model, "aot_eager", memory=PLENTY, strict=False, **OFFLOAD), model, batch())
    assert fxpasses.offload_stats().tensors_out > 6 * ALIKE


def best_of_all(options: dict[float, Option], most: int) -> float | None:
    """The least seconds of all ratios and all sets of values; None if nothing fits."""
    best = None
    for option in options.values():
        for count in range(len(option.free) + 1):
            for moved in map(frozenset, itertools.combinations(option.free, count)):
                seconds = option.recomputing + option.exposed(moved)
                if (best is None or seconds < best) and option.peak(moved) <= most:
                    best = seconds
    return best


def random_options(choose: random.Random) -> dict[float, Option]:
    """Three partitions of a layer that a step calls 6 times."""
    moments = choose.choice([40, 100])
    forward = moments // 3
    values = []
    for number in range(choose.randint(1, 7)):
        made, needed = choose.randrange(forward - 1), choose.randrange(forward, moments - 1)
        times = made, choose.randrange(made, forward), needed, choose.randrange(needed, moments)
        values.append(Candidate(f"v{number}", choose.choice([1000, 2000, 4000]), *times))
    seconds = [choose.choice([0, 0, 1e-6, 1e-6, 5e-6]) for _ in range(moments)]
    rate = 10 ** choose.uniform(7.5, 10)
    found = {}
    for ratio, (least, largest) in {1.0: (0, 0), 0.5: (0, 3e-5), 0.1: (3e-5, 6e-5)}.items():
        free = [value for value in values if ratio == 1 or choose.random() < 0.6]
        model = Model(Step(seconds, forward, (), rate, rate * choose.choice([1, 3])), 2, free)

        def exposed(moved: joint.Values, model: Model = model) -> float:
            return model.exposed(sorted(moved, key=operator.attrgetter("name")))

        def peak(moved: joint.Values, model: Model = model) -> int:
            kept = sum(value.bytes for value in model.all if value not in moved)
            return model.peak(sorted(moved, key=operator.attrgetter("name"))) + 5 * kept

        found[ratio] = Option(choose.uniform(least, largest), free, exposed, peak)
    return found


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=thorough) for part in range(1, 10))])
def test_no_other_choice_takes_much_less(part: int) -> None:
    worse = 0
    for seed in range(200 * part, 200 * part + 200):
        choose = random.Random(seed)
        options = random_options(choose)
        most = round(choose.uniform(0.2, 1) * options[1.0].peak(frozenset()))
        plan = least_time(lambda ratio: ratio, options.__getitem__, most, tuple(options))
        best = best_of_all(options, most)
        assert (plan.peak <= most) is (best is not None)
        if best is not None:
            assert plan.seconds <= min(2 * best, best + 2.5e-6) + 1e-12
            worse += plan.seconds > best + 1e-12
    assert worse <= 4


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=thorough) for part in range(1, 5))])
def test_no_other_choice_takes_less_in_programs(part: int, copying: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def checked(at: Any, option_of: Any, most: int, ratios: Sequence[float], peaks: int) -> Plan:
        nonlocal compared
        partitions = {ratio: found for ratio in RATIOS if (found := at(ratio)) is not None}
        options = {found: option_of(found) for found in partitions.values()}
        plan = least_time(partitions.get, options.__getitem__, most, ratios, peaks)
        if len(options[partitions[1.0]].free) <= 6:
            best = best_of_all(options, most)
            assert (plan.peak <= most) is (best is not None)
            assert best is None or plan.seconds <= best + 1e-12
            compared += 1
        return plan

    monkeypatch.setattr(memory_partitioner, "least_time", checked)
    for seed in range(4 * part, 4 * part + 4):
        choose = random.Random(seed)
        copying(
            *(10 ** choose.uniform(6, 10) for _ in range(2)), 10 ** choose.uniform(8, 11), 10 ** choose.uniform(8, 10)
        )
        model, x = random_program(seed) if seed % 4 == 3 else (programs.Model(), batch())
        expected = step(lambda x: model(x).square().sum(), model, x)  # noqa: B023
        for share in (1.0, choose.uniform(0.3, 1.0)):
            torch._dynamo.reset()
            program = compiled(
                lambda x, model=model: model(x).square().sum(), "aot_eager", memory=round(share * 2_100_000), **OFFLOAD
            )
            try:
                found = step(program, model, x)
            except MemoryBudgetError:
                continue
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert compared


def test_partitioners_can_be_pickled() -> None:
    """Inductor pickles its settings for the keys of its cache, and leaves the cache alone where it cannot."""
    options = Options.parse({"fastpack.memory": PLENTY, "fastpack.offload": "disk"})
    planner = MemoryPartitioner(options, PlannedStep(PLENTY, 0), WHOLE)
    for each in (None, planner):
        assert pickle.dumps(Partitioner(options.offload, True, frozenset(), each, WHOLE, each))
