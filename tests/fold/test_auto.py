"""What `fastpack.fold` "auto" leaves alone: few layers, small ones, and a torch that was not checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpasses.inspect
from fxpasses.report import Reason, Refusal
from tests.fold.programs import VOCABULARY, WIDTH, Block, Plan, Stack, report_on
from tests.support import compiled, reports_of

pytestmark = pytest.mark.usefixtures("capture_flags")

BLOCKS = Plan(("block",) * 4)
LIMIT = "fxpasses.fold.fold_layers._LEAST_FLOPS"
OF_A_TOKEN = 2 * 2 * WIDTH * 2 * WIDTH  # floating-point operations of a `Block`


class Products(nn.Module):
    """Four projections, each one product and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in "abcd"),
        )

    def forward(self, given: Tensor) -> Tensor:
        x = self.embed(given)
        for layer in self.layers:
            x = layer(x).unflatten(-1, (2, -1)).transpose(1, 2).reshape(x.shape)
        return x.sin()


def test_auto_folds_from_four_layers_on(monkeypatch):
    monkeypatch.setattr(LIMIT, 0)
    assert not report_on(Stack(Plan(("block",) * 3)), fold="auto").changed
    assert not report_on(Stack(BLOCKS), fold="auto", lowering="aot_eager").changed
    assert report_on(Stack(BLOCKS), fold="auto").figures["layers"] == 4


def test_auto_folds_only_on_a_torch_that_was_checked(monkeypatch):
    monkeypatch.setattr("fxpasses.fold.outlining.CHECKED", ("1.0",))
    report = report_on(Stack(BLOCKS), fold="auto")
    assert [refusal.reason for refusal in report.refusals] == [Reason.UNCHECKED_TORCH]
    assert report_on(Stack(BLOCKS), fold="on").changed


def test_what_is_small_is_said_in_words(monkeypatch):
    (refusal,) = report_on(Stack(BLOCKS), fold="auto").refusals
    text = '6144 floating-point operations; "auto" folds from 700 M on, as calls of small layers cost time'
    assert (refusal.reason, refusal.text) == (Reason.SMALL, f"its forward takes {text}")
    monkeypatch.setattr(LIMIT, 0)
    (refusal,) = report_on(Products(), fold="auto").refusals
    assert (refusal.reason, refusal.text) == (Reason.SMALL, '2 calls that compute anything; "auto" folds from 5 on')
    assert report_on(Products(), fold="on").changed


class Repeated(nn.Module):
    """number: of copies of the token that the layers get."""

    def __init__(self, number: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.number = nn.ModuleList(Block() for _ in range(4)), number

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = torch.ones(self.number(x, lengths).item(), 1) * x
        for layer in self.layers:
            x = layer(x)
        return x


def refusals(number: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> list[Refusal]:
    """Under "auto", without what Inductor does."""
    monkeypatch.setattr("fxpasses.compiler.backend.lower", lambda gm, *others: gm.forward)
    with fxpasses.inspect.record() as record:
        program = compiled(Repeated(number), "inductor", fold="auto")
        program(torch.ones(1, WIDTH, requires_grad=True), torch.tensor([3, 5]))
    return reports_of(record, "fold_layers")[0].refusals


@pytest.mark.parametrize("least", [5 * OF_A_TOKEN, 5 * OF_A_TOKEN + 1])
def test_sizes_that_the_batch_determines_count_as_in_the_traced_batch(least, monkeypatch):
    monkeypatch.setattr(LIMIT, least)
    found = refusals(lambda x, lengths: lengths.max(), monkeypatch)
    assert [refusal.reason for refusal in found] == [Reason.SMALL] * (least > 5 * OF_A_TOKEN)


def test_sizes_that_activations_determine_are_not_counted(monkeypatch):
    (refusal,) = refusals(lambda x, lengths: x.detach().sum().long() // 2, monkeypatch)
    assert refusal.reason is Reason.SMALL
    assert "takes 0 floating-point operations, besides those of 2 calls that are not known" in refusal.text
