"""Sizes of activations are known where the batch determines them, so that what is cut to them is metadata."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import assert_same

Cut = Callable[[Tensor, Tensor], Tensor]


def by_a_number(x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, : lengths.max().item()]


def by_a_tensor(x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, : lengths.max()]


def the_last(x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, -lengths.max() :]


def every_second(x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, : lengths.max()][:, ::2]


def padded(x: Tensor, lengths: Tensor) -> Tensor:
    return F.pad(x[:, : lengths.min()], (0, 0, 1, 0))


def joined(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat((x[:, : lengths.min()], x[:, : lengths.max()]), 1)[:, : x.shape[1]]


def by_a_mask(x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, torch.arange(x.shape[1]) < lengths.max()]


CUTS = [by_a_number, by_a_tensor, the_last, every_second, padded, joined, by_a_mask]


@pytest.mark.quick(2)
@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("cut", CUTS)
def test_a_branch_on_what_is_cut_alike(capture_flags: None, cut: Cut, lowering: str) -> None:
    """Eager mode gives no gradient to the head of a batch without labels, and one graph for both branches would."""

    def program(x: Tensor, head: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        x = cut(x, lengths)
        kept = labels[:, : x.shape[1]] > 0
        scores = x[kept] @ head
        return scores if kept.any() else x * 0

    def batch(*lengths: int, label: int) -> tuple[Tensor, ...]:
        x, head = torch.randn(2, 9, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
        return x, head, torch.tensor(lengths), torch.tensor([[0, 0, label] * 3, [label] * 9])

    torch.manual_seed(0)
    batches = [batch(6, 4, label=1), batch(7, 3, label=1), batch(5, 3, label=0), batch(4, 5, label=0)]
    record = assert_same(program, batches, lowering, 1e-5, fullgraph=True)
    assert len(record.graphs) == 2
