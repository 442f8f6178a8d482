"""An operator that asks for a number of the batch takes any number: another batch may have another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import assert_same

pytestmark = pytest.mark.usefixtures("capture_flags")

Program = Callable[[Tensor, int], Tensor]

OF_NUMBERS: dict[str, Program] = {
    "linspace": lambda x, n: x * torch.linspace(0, 1, n).sum(),
    "one_hot": lambda x, n: x[:, :2] @ F.one_hot(torch.arange(2), n).float(),
    "split": lambda x, n: torch.stack([part.sum() for part in x[0].split(n)]),
    "chunk": lambda x, n: torch.stack([part.sum() for part in x[0].chunk(n)]),
    "unfold": lambda x, n: x.unfold(0, n, 1).sin(),
    "adaptive pooling": lambda x, n: F.adaptive_avg_pool1d(x[None], n),
}
OF_SLICES: dict[str, Program] = {
    "unbind": lambda x, n: torch.stack([row * place for place, row in enumerate(x[:n].unbind())]),
    "split": lambda x, n: torch.stack([part.sum() for part in x[:n].split(3)]),
    "linspace": lambda x, n: x[:n].sum() * torch.linspace(0, 1, x[:n].shape[0]),
    "hann_window": lambda x, n: x[:n].sum() * torch.hann_window(x[:n].shape[0]),
    "one_hot": lambda x, n: x[:n].sum() * F.one_hot(torch.arange(2), x[:n].shape[0]),
    "max_pool1d": lambda x, n: F.max_pool1d(x[None, :, :n], 2).sum() * F.max_pool1d(x[None, :, :n], 2).shape[-1],
    "block_diag": lambda x, n: torch.block_diag(x[:n], x[:2]),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    x = torch.linspace(-1, 2, 64).view(8, 8).requires_grad_()
    return [(x, torch.tensor([2, n])) for n in (8, 5, 4)]


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_a_number_that_an_operator_takes(name: str) -> None:
    """Before, the next batch raised `MetadataError`: a number inside an operator was taken for a check of sizes."""
    assert_same(lambda x, lengths: OF_NUMBERS[name](x, lengths.max().item()), batches(), "aot_eager")


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", OF_SLICES)
def test_the_size_of_a_slice_that_an_operator_takes(name: str) -> None:
    """Before, the next batch had the first one's size."""
    assert_same(lambda x, lengths: OF_SLICES[name](x, lengths.max().item()), batches(), "aot_eager")


def test_the_number_of_selected_rows() -> None:
    def program(x: Tensor, mask: Tensor) -> Tensor:
        return torch.stack([row * place for place, row in enumerate(x[mask].unbind())])

    x = torch.linspace(-1, 2, 12).view(4, 3).requires_grad_()
    assert_same(program, [(x, torch.arange(4) < n) for n in (2, 3, 4, 2)], "aot_eager")


def test_a_number_that_is_none() -> None:
    """The mean of no lengths; an internal error of Dynamo's before."""

    def program(x: Tensor, lengths: Tensor) -> Tensor:
        mean = lengths[lengths > 5].float().mean().item()
        return x * 2 if mean > 6 else x.sin()

    x = torch.ones(2, requires_grad=True)
    assert_same(program, [(x, torch.tensor([1, n])) for n in (7, 2, 8)], "aot_eager")


def test_a_mask_selects_from_what_it_broadcasts() -> None:
    def program(x: Tensor, mask: Tensor) -> Tensor:
        return torch.linspace(0, 1, 3).masked_select(mask).sum() * x[mask].sum()

    x = torch.linspace(-1, 2, 12).view(4, 3).requires_grad_()
    assert_same(program, [(x, torch.arange(12).view(4, 3) < n) for n in (12, 5)], "aot_eager")


def test_a_mask_may_have_as_many_elements_as_one_batch_selects_from() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        return x[: lengths.max()].masked_select(torch.arange(8) % 3 == 0)

    x = torch.linspace(-1, 2, 64).view(8, 8).requires_grad_()
    assert_same(program, [(x, torch.tensor([n])) for n in (1, 8, 5)], "aot_eager")
