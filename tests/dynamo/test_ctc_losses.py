"""The CTC loss: one graph where its lengths are tensors, with eager mode's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import assert_same, compiled
from tests.support import results as numbers

pytestmark = pytest.mark.usefixtures("capture_flags")

LABELS = torch.tensor([[1, 2, -1], [3, 4, 1]])
X = torch.linspace(-2, 3, 8 * 2 * 5).sin().view(8, 2, 5).requires_grad_()


def loss(x: Tensor, labels: Tensor, **options: Any) -> Tensor:
    mask = labels >= 0
    targets = labels.masked_select(mask)
    with torch.backends.cudnn.flags(enabled=False):
        return F.ctc_loss(x.log_softmax(-1), targets, torch.tensor([8, 7]), mask.sum(-1), **options)


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_one_graph(reduction: str, lowering: str) -> None:
    def program(x: Tensor, labels: Tensor) -> Tensor:
        return loss(x * 2, labels, reduction=reduction)

    record = assert_same(program, [(X, LABELS), (X, LABELS.flip(0))], lowering, fullgraph=True)
    assert len(record.graphs) == 1


def test_targets_that_cannot_be_aligned_have_no_loss_and_no_gradient() -> None:
    labels = torch.tensor([[1] * 5, [2, 3, -1, -1, -1]])

    def program(x: Tensor, labels: Tensor) -> Tensor:
        return loss(x, labels, zero_infinity=True)

    assert_same(program, [(X, labels)], "aot_eager", fullgraph=True)
    assert numbers(program, (X, labels))["gradients"][0][:, 0].count_nonzero() == 0


def test_padded_targets_and_lengths_in_lists() -> None:
    def padded(x: Tensor, labels: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), labels.clamp_min(1), torch.tensor([8, 8]), (labels >= 0).sum(-1))

    def listed(x: Tensor, labels: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), labels.clamp_min(1), [8, 8], [2, 3])

    assert_same(padded, [(X, LABELS)], "aot_eager", fullgraph=True)
    assert_same(listed, [(X, LABELS)], "aot_eager")


def test_a_wrong_length_is_eager_modes_error() -> None:
    def program(x: Tensor, labels: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), labels.clamp_min(1), torch.tensor([8, 9]), (labels >= 0).sum(-1))

    for run in (program, compiled(program, "aot_eager")):
        with pytest.raises(RuntimeError, match="Expected input_lengths to have value at most 8"):
            run(X, LABELS)


def test_lengths_in_a_buffer_that_is_used_again() -> None:
    """Eager mode takes the lengths' numbers in the forward pass."""

    def program(x: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        return F.ctc_loss(x.log_softmax(-1), labels.clamp_min(1), lengths, (labels >= 0).sum(-1))

    def gradient(run: Any) -> Tensor:
        lengths, losses = torch.tensor([8, 8]), []
        for length in (8, 5):
            lengths.numpy().fill(length)  # as by a data loader that keeps its memory
            losses.append(run(X, LABELS, lengths))
        return torch.autograd.grad(sum(losses), X)[0]

    torch.testing.assert_close(gradient(compiled(program, "aot_eager")), gradient(program), rtol=0, atol=0)
