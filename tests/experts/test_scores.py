"""Scores scattered to a matrix [T, E]: an expert has the tokens whose element of its column is not zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.experts.layer import EXPERTS, Layer, check, level_of

pytestmark = pytest.mark.usefixtures("capture_flags")

LOW = 0.3  # some scores are below it, and some above


def scattered(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    return torch.zeros(len(x), EXPERTS).scatter(1, idx, weights)


def in_place(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    return x.new_zeros(len(x), EXPERTS).scatter_(-1, idx, weights)


def with_zeros(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    return scattered(x, (weights - LOW).relu(), idx)


def all_zero(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    return scattered(x, weights * 0, idx)


def with_nan(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    return scattered(x, torch.where(weights > LOW, weights, torch.nan), idx)


def filled_before(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    zeros = torch.zeros(len(x), EXPERTS)
    zeros.fill_(0.5)
    return zeros.scatter_(1, idx, weights)


def written_after(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    dense = torch.zeros(len(x), EXPERTS).scatter_(1, idx, weights)
    dense[0] = 1
    return dense


def twice_in_one_expert(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    idx[:, 1] = idx[:, 0]
    return scattered(x, weights, idx)


def ones(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    return torch.ones(len(x), EXPERTS).scatter(1, idx, weights)


def loop(dense_of: Callable[..., Tensor], mask_of: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def program(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        dense, out = dense_of(x, weights, idx), torch.zeros_like(x)
        for e in range(EXPERTS):
            (tok,) = torch.where(mask_of(dense[:, e]))
            out.index_add_(0, tok, (x[tok] @ layer.w[e]) * dense[tok, e, None])
        return out

    return program


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "not zero": lambda column: column,
    "!=": lambda column: column != 0,
    ">": lambda column: column > 0,
    "above a limit": lambda column: column > LOW,
    "bool": lambda column: column.bool(),
}
TAKE_ZEROS: dict[str, Callable[[Tensor], Tensor]] = {
    ">=": lambda column: column >= 0,
    "below a limit": lambda column: column < LOW,
    "none": lambda column: column == 0,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dense_of", [scattered, in_place, with_zeros, all_zero], ids=lambda f: f.__name__)
def test_pairs_without_a_score_are_of_no_expert(dense_of: Any, mask: str) -> None:
    assert level_of(check(loop(dense_of, MASKS[mask]))) == 2


@pytest.mark.parametrize("mask", TAKE_ZEROS)
def test_elements_without_a_pair_pass(mask: str) -> None:
    """There may be more rows than pairs."""
    assert level_of(check(loop(scattered, TAKE_ZEROS[mask]))) < 2


@pytest.mark.parametrize(
    "dense_of", [filled_before, written_after, twice_in_one_expert, ones], ids=lambda f: f.__name__
)
def test_other_matrices(dense_of: Any) -> None:
    assert level_of(check(loop(dense_of, MASKS["!="]))) < 2


def test_nan_is_not_zero() -> None:
    def program(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        dense, out = with_nan(x, weights, idx), torch.zeros_like(x)
        for e in range(EXPERTS):
            (tok,) = torch.where(dense[:, e] != 0)
            out.index_add_(0, tok, x[tok] @ layer.w[e])
        return out

    assert level_of(check(program)) == 2


def test_no_token_is_of_the_experts_of_this_rank() -> None:
    """There are no rows at all; an index by the expert's number stays one of an expert's."""

    def program(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        _, idx = torch.arange(EXPERTS, 0, -1.0).expand(len(x), EXPERTS).topk(2, dim=-1)
        dense, out = scattered(x, weights, idx), torch.zeros_like(x)
        for e in range(2, EXPERTS):
            tok, _ = torch.where(idx == e)
            out.index_add_(0, tok, (x[tok] @ layer.w[e]) * dense[tok, e, None])
        return out

    assert level_of(check(program)) == 2
