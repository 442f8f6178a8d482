"""`x[mask]` for a mask of metadata: gathered by positions that the prologue computes once per batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxpasses.inspect import Record
from tests.support import assert_same, compiled, events, reports_of, results

pytestmark = pytest.mark.usefixtures("capture_flags")


def batch(masked: int, columns: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Activations [2, columns, 4], a weight, and labels of which the first `masked` are not valid."""
    torch.manual_seed(masked)
    labels = torch.randint(0, 9, (2, columns))
    labels[:, :masked] = -100
    return torch.randn(2, columns, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True), labels


BATCHES = [batch(1), batch(3), batch(6), batch(2, columns=9)]  # the third has no valid label


def asked_per_step(program: Any) -> int:
    """How often a warm step looks for the positions of a mask."""
    run = compiled(program, "aot_eager")
    results(run, BATCHES[0])
    return events(lambda: results(run, BATCHES[0]))["aten::nonzero"]


def hoisted(record: Record) -> str:
    return "\n".join(map(str, reports_of(record)))


def head(x: Tensor, w: Tensor, labels: Tensor) -> Any:
    """As TRL's fused head scores the valid positions alone."""
    mask = labels != -100
    rows = (x[mask] @ w).logsumexp(-1) - labels[mask]
    return x.new_zeros(mask.shape).masked_scatter(mask, rows), rows.shape[0]


def layers(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        mask = labels >= 0
        return x.masked_scatter(mask[..., None], torch.tanh(x[mask] @ w))

    for _ in range(3):
        x = checkpoint(layer, x, w, use_reentrant=False)
    return x


def by_other_indices(x: Tensor, w: Tensor, labels: Tensor) -> Any:
    mask = labels != -100
    rows = x.flatten(0, 1)[mask.flatten()]
    return x[mask, 1:] @ w[1:], x[mask, 2], x[mask, None].sum(1), x[..., 0][mask], x[mask[:, 0]], rows


@pytest.mark.quick(1)
@pytest.mark.parametrize("program", [head, layers, by_other_indices])
def test_the_positions_come_from_the_prologue(program: Any) -> None:
    record = assert_same(program, BATCHES, "aot_eager")
    assert "nonzero" in hoisted(record) and "not:" not in hoisted(record)


def test_they_are_computed_once_per_batch_whatever_the_number_of_layers() -> None:
    assert asked_per_step(layers) == 1


def test_a_mask_that_depends_on_activations_stays() -> None:
    def program(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        return x[(labels != -100) & (x[..., 0] > 0)] @ w

    assert "nonzero" not in hoisted(assert_same(program, BATCHES[:2], "aot_eager"))


def test_a_mask_that_changes_between_two_indices() -> None:
    def program(x: Tensor, w: Tensor, labels: Tensor) -> Any:
        mask = labels != -100
        before = x.detach()[mask] @ w
        mask[:, -1] = False
        return before, x[mask] @ w

    assert_same(program, BATCHES, "aot_eager")


def test_a_row_that_is_written_to() -> None:
    def program(x: Tensor, w: Tensor, labels: Tensor) -> Any:
        mask, out = labels != -100, x @ w
        out[mask] += 1
        out[mask] = out[mask] * 2
        return out

    assert_same(program, BATCHES, "aot_eager")
