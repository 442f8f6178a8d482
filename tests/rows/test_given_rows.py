"""A graph may be given its rows, as a head that is compiled alone is, and masked numbers of rows may be read whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxpasses.inspect
from tests.rows.models import VOCABULARY, WIDTH
from tests.support import compiled, reports_of

Loss = Callable[[Any, Tensor, Tensor], Any]


def log_probabilities(head: Any, x: Tensor, target: Tensor) -> Tensor:
    return head(x).float().log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]


def preferred(head: Any, x: Tensor, target: Tensor) -> Tensor:
    """DPO, of rows that are not yet in texts."""
    chosen = (log_probabilities(head, x, target) * (target != -100)).view(4, -1).sum(1)
    return -F.logsigmoid(chosen[:2] - chosen[2:]).mean()


def cross_entropy(head: Any, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(head(x), target)


def of_next_tokens(head: Any, x: Tensor, target: Tensor) -> Tensor:
    """Sums that run over the tokens of a text, of a part of the rows."""
    found = torch.where(target[:, 1:] != -100, log_probabilities(head, x[:, :-1], target[:, 1:]), 0.0)
    return found.cumsum(1).sin().mean()


def filled(head: Any, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Masked numbers are returned as well."""
    found = log_probabilities(head, x, target).masked_fill(target == -100, 0)
    return found.sum(), found


def filled_with_one(head: Any, x: Tensor, target: Tensor) -> Tensor:
    return log_probabilities(head, x, target).masked_fill(target == -100, 1).cumsum(0).sin().sum()


def masked_by_value(head: Any, x: Tensor, target: Tensor) -> Tensor:
    found = log_probabilities(head, x, target)
    return (found * (found < -2)).cumsum(0).sin().sum()


def of_all(head: Any, x: Tensor, target: Tensor) -> Tensor:
    return log_probabilities(head, x, target).cumsum(0).sin().sum()


FLAT, IN_TEXTS = (32,), (4, 8)
TAKEN = [(preferred, FLAT), (cross_entropy, FLAT), (of_next_tokens, IN_TEXTS), (filled, IN_TEXTS), (filled, FLAT)]
LEFT = [(filled_with_one, FLAT), (masked_by_value, FLAT), (of_all, FLAT)]


def batch(shape: tuple[int, ...], labelled: float, trained: bool) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(*shape, WIDTH, dtype=torch.float64), torch.randint(0, VOCABULARY, shape)
    return x.requires_grad_(trained), target.masked_fill(torch.rand(shape) >= labelled, -100)


def found(function: Any, head: torch.nn.Module, x: Tensor, target: Tensor) -> list[Tensor]:
    head.zero_grad()
    x.grad = None
    returned = function(head, x, target)
    returned = returned if isinstance(returned, tuple) else (returned,)
    returned[0].backward()
    gradients = [p.grad for p in (*head.parameters(), x) if p.grad is not None]
    return [*(value.detach() for value in returned), *map(torch.clone, gradients)]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("loss", "shape"), [*TAKEN, *LEFT])
def test_a_head_alone_is_eager_modes(loss: Loss, shape: tuple[int, ...], trained: bool) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY).double()
    with fxpasses.inspect.record() as record:
        step = compiled(loss, "aot_eager", rows="auto")
        for labelled in (0.3, 0.0, 0.4, 1.0):
            x, target = batch(shape, labelled, trained)
            torch.testing.assert_close(found(step, head, x, target), found(loss, head, x, target), equal_nan=True)
    reports = reports_of(record, "live_rows")
    assert any(report.changed for report in reports) is ((loss, shape) in TAKEN), reports


def test_rows_that_count_nothing_are_not_multiplied() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY).double()
    x, target = batch(FLAT, 0.3, trained=True)
    x.data[target == -100] = float("nan")
    with torch.no_grad():  # a NaN there reaches nothing
        loss = compiled(preferred, "eager", rows="auto")(head, x, target)
    assert loss.isfinite()


def test_a_piece_that_returns_its_rows_is_not_told_of() -> None:
    def piece(x: Tensor, ids: Tensor) -> Tensor:
        return (x * (ids != 0)[..., None]).tanh()

    with fxpasses.inspect.record() as record:
        compiled(piece, "eager", rows="auto")(torch.randn(4, 8, WIDTH), torch.randint(0, 2, (4, 8)))
    assert not any(report.refusals or report.changed for report in reports_of(record, "live_rows"))
