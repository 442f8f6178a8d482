"""Random stacks of layers give the same numbers from their saved traces as from new ones, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from fxpasses.restart import recording, restoring
from tests.fold.programs import Plan, Stack
from tests.fold.test_fold_layers import step
from tests.fold.test_random import _SETTINGS, plans
from tests.restart.restarting import counting, forget
from tests.support import THOROUGH, compiled

pytestmark = [
    pytest.mark.usefixtures("capture_flags"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="traces are kept from torch 2.13 on"),
]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    recording._is_on = False
    forget()


def check(plan: Plan, seed: int) -> None:
    forget()
    recording.start()
    torch.manual_seed(seed)
    model = Stack(plan)
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"fold": "on"}
    program = compiled(twin, "aot_eager", **options)
    with counting() as first:
        try:
            expected = [step(twin, program, seed + number) for number in range(2)]
        except RuntimeError:  # such as a write to a value that backward needs
            hypothesis.reject()
    traces = recording.saved()
    forget()
    restoring.load(traces)
    program = compiled(model, "aot_eager", **options)
    with counting() as traced:
        for number in range(2):
            torch.testing.assert_close(step(model, program, seed + number), expected[number], rtol=0, atol=0)
    assert len(recording.saved()) == len(traces)  # all are used
    assert len(traced) + len(traces) <= len(first)  # frames that cannot be compiled are traced once more


@hypothesis.settings(max_examples=1, **_SETTINGS)
@hypothesis.given(plans(), st.integers(0, 1000))
def test_a_few_random_stacks(plan: Plan, seed: int) -> None:
    check(plan, seed)


@pytest.mark.slow
@hypothesis.settings(max_examples=200 if THOROUGH else 10, **_SETTINGS)
@hypothesis.given(plans(), st.integers(0, 1000))
def test_random_stacks(plan: Plan, seed: int) -> None:
    check(plan, seed)
