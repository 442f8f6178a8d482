"""Under "auto", several small layers become one body; the numbers stay."""

from __future__ import annotations

import pytest

from fxpasses.options import Options
from fxpasses.report import Reason
from tests.fold.programs import TOKENS, WIDTH, Plan, Stack, report_on
from tests.fold.test_fold_layers import EVERY, assert_same_steps, report_of

pytestmark = pytest.mark.usefixtures("capture_flags")

OF_A_BLOCK = 2 * TOKENS * 2 * 2 * WIDTH * 2 * WIDTH  # floating-point operations


@pytest.fixture(autouse=True)
def small_layers(monkeypatch):
    """ "auto" wants two blocks in a body, and folds under the eager lowering as well."""
    monkeypatch.setattr("fxpasses.fold.fold_layers._LEAST_FLOPS", OF_A_BLOCK + 1)
    monkeypatch.setattr(Options, "folds", True)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("plan", "pieces", "each"),
    [
        (Plan(("block",) * 8), 4, 2),
        (Plan(("block",) * 8, checkpointed=EVERY), 4, 2),
        (Plan(("dropout",) * 9), 4, 2),  # the last one is compiled with the head
        (Plan(("counting",) * 8), 4, 2),
        (Plan(("block",) * 8, scales=(0.5,) * 8), 4, 2),
        (Plan(("attention", *("block",) * 4, "attention", *("block",) * 4)), 4, 2),
    ],
)
def test_two_layers_in_a_body(plan, pieces, each):
    """Three steps of two lengths, bit for bit: forward, gradients and buffers."""
    report = report_of(assert_same_steps(plan, fold="auto"))
    assert (report.figures["layers"], report.figures["pieces"]) == (pieces * each, pieces)
    assert report.changes[0].endswith(f"×{pieces}, {each} layers each → one body")


def test_the_number_of_layers_is_the_one_that_leaves_least_to_compile(monkeypatch):
    monkeypatch.setattr("fxpasses.fold.fold_layers._LEAST_FLOPS", 3 * OF_A_BLOCK)
    report = report_on(Stack(Plan(("block",) * 16)), fold="auto")
    assert report.figures == {"layers": 16, "kinds": 1, "pieces": 4}  # by three, one more would be left over
    assert report.summary == "16 layers are compiled as 4"


@pytest.mark.parametrize("layers", [("block",) * 7, ("block", "wide") * 4])
def test_too_few_layers_are_left_alone(layers):
    """Of layers in turn with others, none are neighbours."""
    report = report_on(Stack(Plan(layers)), fold="auto")
    assert Reason.SMALL in {refusal.reason for refusal in report.refusals}
    assert report.figures.get("layers", 0) in (0, 4)
