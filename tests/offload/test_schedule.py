"""The schedule's formulas, and choices on plain data."""

from __future__ import annotations

import itertools

import pytest

from fxpasses.offload.choose import Candidate, Limits, Step, choose
from fxpasses.offload.schedule import Life, backward_time, exposed_time, forward_time, peak
from fxpasses.report import Reason

MIB = 1 << 20


@pytest.mark.all_cases
@pytest.mark.parametrize("layers", [1, 2, 16])
@pytest.mark.parametrize(("c", "g"), [(1.0, 4.0), (4.0, 1.0), (2.0, 2.0), (0.0, 1.0)])
def test_equal_layers_follow_the_formulas(layers, c, g):
    copies, computes = [c] * layers, [g] * layers
    assert backward_time(copies, computes, 1) == layers * (c + g)
    assert backward_time(copies, computes, 2) == pytest.approx(c + (layers - 1) * max(c, g) + g)
    assert backward_time(copies, computes, 4) <= backward_time(copies, computes, 2)
    assert forward_time(copies, [g] * layers, 1) == layers * (c + g)
    assert forward_time(copies, [g] * layers, 2) == pytest.approx(g + (layers - 1) * max(c, g) + c)


def test_more_buffers_are_never_slower_and_nothing_is_faster_than_the_work():
    for copies in itertools.product((0.5, 1.0, 3.0), repeat=4):
        for computes in itertools.product((0.5, 2.0), repeat=4):
            times = [backward_time(copies, computes, buffers) for buffers in (1, 2, 3, 4)]
            assert times == sorted(times, reverse=True)
            assert times[-1] >= max(sum(copies) + computes[-1], copies[0] + sum(computes)) - 1e-9


def test_nothing_moved_exposes_nothing():
    assert exposed_time([], [3.0], [], [], 2) == 0


def test_peak_counts_what_is_live_together():
    assert peak([Life(4, 0, 2), Life(3, 2, 4), Life(10, 5, 5)], 6) == 10
    assert peak([Life(4, 0, 2), Life(3, 2, 4)], 6) == 7
    assert peak([], 3) == 0


def decoder(layers: int, size: int = 10 * MIB) -> list[Candidate]:
    """A layer takes 10 moments forward and 20 backward; what it begins with is needed when its backward begins."""
    end = 10 * layers
    return [
        Candidate(
            f"x{i}",
            size,
            max(10 * i - 1, 0),
            10 * i + 9,
            end + 20 * (layers - 1 - i),
            end + 20 * (layers - i) - 1,
            True,
        )
        for i in range(layers)
    ]


TIMES = [("a", 0, 90), ("b", 10, 75), ("c", 44, 50)]  # name, made, needed


def step(layers: int, seconds: float = 1e-3, rate: float = 1e10) -> Step:
    return Step([seconds] * (30 * layers), 10 * layers, (), rate, rate)


def test_without_a_budget_all_but_the_small_and_the_last_are_moved():
    candidates = [*decoder(6), Candidate("mask", 100, 3, 4, 170, 171)]
    choice = choose(candidates, Limits(min_bytes=MIB, keep_last=1), step(6))
    assert [c.name for c in choice.moved] == ["x4", "x3", "x2", "x1", "x0"]  # in the order of need
    reasons = {d.candidate.name: d.reason for d in choice.decisions if not d.move}
    assert reasons == {"mask": Reason.SMALL, "x5": Reason.NEEDED_SOON}
    assert choice.exposed_seconds == pytest.approx(10 * MIB / 1e10)  # the first copy back; the others hide
    assert choice.peak_before == 60 * MIB + 100 and choice.peak_after <= 30 * MIB + 100


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_a_budget_is_met_with_as_few_as_it_takes(buffers):
    candidates = decoder(12)
    previous = 0
    for budget in (120, 100, 80, 60):
        limits = Limits(buffers=buffers, device_budget=budget * MIB)
        choice = choose(candidates, limits, step(12))
        assert choice.peak_after <= budget * MIB
        assert len(choice.moved) >= previous
        for left_out in choice.moved:  # each of them is needed
            fewer = [d.candidate for d in choice.decisions if d.move and d.candidate is not left_out]
            again = choose(candidates, Limits(buffers=buffers), step(12))
            assert set(fewer) < set(again.moved) or len(fewer) < len(again.moved)
        previous = len(choice.moved)
    assert previous > 0 and not choose(candidates, Limits(buffers=buffers, device_budget=121 * MIB), step(12)).moved


def test_a_budget_prefers_copies_that_hide():
    """Three tensors of equal size, of which one has to go: copies of the first two find compute to hide under."""
    tensors = [Candidate(name, 10 * MIB, made, made + 5, needed, needed + 3) for name, made, needed in TIMES]
    choice = choose(tensors, Limits(device_budget=25 * MIB, buffers=2), Step([1e-3] * 100, 50, (), 1e9, 1e9))
    assert "c" not in {c.name for c in choice.moved} and choice.peak_after <= 25 * MIB


def test_checkpoint_boundaries_come_first_where_the_host_has_little_room():
    large = Candidate("large", 30 * MIB, 0, 5, 50, 60)
    boundary = Candidate("boundary", 10 * MIB, 0, 5, 55, 60, boundary=True)
    choice = choose([large, boundary], Limits(host_budget=30 * MIB), Step([1e-3] * 100, 40))
    assert [c.name for c in choice.moved] == ["boundary"]
    assert {d.reason for d in choice.decisions if not d.move} == {Reason.HOST_BUDGET}
