"""Random stacks of layers give the same numbers with and without `fold_layers`, bit for bit, or are left alone."""

from __future__ import annotations

import copy
from collections import Counter

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import fxpasses.inspect
from tests.fold.programs import LAYERS, Plan, Stack
from tests.fold.test_fold_layers import step
from tests.support import THOROUGH, compiled, reports_of

pytestmark = pytest.mark.usefixtures("capture_flags")

seen: Counter[str] = Counter()


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Layers of one to three kinds, in a pattern that repeats, with a peculiarity here and there."""
    pattern = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3))
    layers = tuple((pattern * 6)[: draw(st.integers(3, 6))])
    places = st.frozensets(st.integers(0, len(layers) - 1), max_size=2)
    all_or_some = st.sampled_from([frozenset(), frozenset(range(len(layers)))]) | places
    return Plan(
        layers,
        shared=draw(st.booleans()),
        checkpointed=draw(all_or_some),
        frozen=draw(st.just(frozenset()) | places),
        recorded=draw(st.just(frozenset()) | places),
        skip=draw(st.sampled_from([False, False, True])),
        scales=draw(st.just(()) | st.lists(st.sampled_from([1.0, 0.5]), min_size=6, max_size=6).map(tuple)),
        autocast=draw(st.sampled_from([False, False, False, True])),
    )


def check(plan: Plan, seed: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = Stack(plan)
    twin = copy.deepcopy(model)
    try:  # under autocast, eager mode casts a shared weight once, and a compiler each time
        without = compiled(twin, "aot_eager", fold="off", passes=["fold_layers"])
        expected = [step(twin, without, seed + number) for number in range(2)]
    except RuntimeError:  # such as a write to a value that backward needs
        hypothesis.reject()
    torch._dynamo.reset()
    with fxpasses.inspect.record() as record:
        program = compiled(model, "aot_eager", fold="on", passes=["fold_layers"])
        for number in range(2):
            torch.testing.assert_close(step(model, program, seed + number), expected[number], rtol=0, atol=0)
    seen["programs"] += 1
    for report in reports_of(record, "fold_layers"):
        seen["folded"] += report.changed
        seen["refused"] += bool(report.refusals)


_SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
    "phases": [hypothesis.Phase.generate],
}


def test_checkpoints_that_write_to_one_buffer():
    kinds, all_of_them, none = ("counting", "counting", "attention"), frozenset({0, 1, 2}), frozenset[int]()
    check(Plan(kinds, True, all_of_them, none, none, False, (), False), 0)


@hypothesis.settings(max_examples=1, **_SETTINGS)
@hypothesis.given(plans(), st.integers(0, 1000))
def test_a_few_random_stacks(plan, seed):
    check(plan, seed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@hypothesis.settings(max_examples=200 if THOROUGH else 25, **_SETTINGS)
@hypothesis.given(plans(), st.integers(0, 1000))
def test_random_stacks(plan, seed):
    check(plan, seed)


@pytest.mark.slow
def test_the_stacks_are_not_vacuous():
    """Runs after the test above, and on its own checks nothing."""
    if seen["programs"] < 25:
        pytest.skip("the random stacks did not run")
    assert seen["folded"] > seen["programs"] / 10
    assert seen["refused"] > seen["programs"] / 10
