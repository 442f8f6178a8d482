"""Scores scattered to a matrix [T, E]: an expert has the tokens whose element of its column is not zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.experts.layer import EXPERTS, Layer, check, level_of, written

pytestmark = pytest.mark.usefixtures("capture_flags")

LOW = 0.3  # some scores are below it, and some above


def scattered(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    return torch.zeros(len(x), EXPERTS).scatter(1, idx, weights)


def written_after(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    dense = torch.zeros(len(x), EXPERTS).scatter_(1, idx, weights)
    dense[0] = 1
    return dense


def twice_in_one_expert(x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    idx[:, 1] = idx[:, 0]
    return scattered(x, weights, idx)


MATRICES = {
    "scattered": scattered,
    "in place": lambda x, weights, idx: x.new_zeros(len(x), EXPERTS).scatter_(-1, idx, weights),
    "with zeros": lambda x, weights, idx: scattered(x, (weights - LOW).relu(), idx),
    "all zero": lambda x, weights, idx: scattered(x, weights * 0, idx),
}
OTHER_MATRICES = {
    "filled before": lambda x, weights, idx: torch.zeros(len(x), EXPERTS).fill_(0.5).scatter_(1, idx, weights),
    "written after": written_after,
    "twice in one expert": twice_in_one_expert,
    "ones": lambda x, weights, idx: torch.ones(len(x), EXPERTS).scatter(1, idx, weights),
}


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
@pytest.mark.parametrize("matrix", MATRICES)
def test_pairs_without_a_score_are_of_no_expert(matrix: str, mask: str) -> None:
    assert level_of(check(loop(MATRICES[matrix], MASKS[mask]))) == 2


@pytest.mark.parametrize("mask", TAKE_ZEROS)
def test_elements_without_a_pair_pass(mask: str) -> None:
    """There may be more rows than pairs."""
    assert level_of(check(loop(scattered, TAKE_ZEROS[mask]))) < 2


@pytest.mark.parametrize("matrix", OTHER_MATRICES)
def test_other_matrices(matrix: str) -> None:
    assert level_of(check(loop(OTHER_MATRICES[matrix], MASKS["!="]))) < 2


def test_nan_is_not_zero() -> None:
    program = written(
        "(tok,) = torch.where(dense[:, e] != 0); out.index_add_(0, tok, x[tok] @ w[e])",
        f"dense = torch.zeros(len(x), EXPERTS).scatter(1, idx, torch.where(weights > {LOW}, weights, torch.nan))",
    )
    assert level_of(check(program)) == 2


def test_no_token_is_of_the_experts_of_this_rank() -> None:
    """There are no rows at all; an index by the expert's number stays one of an expert's."""
    program = written(
        "tok, _ = torch.where(idx == e); out.index_add_(0, tok, (x[tok] @ w[e]) * dense[tok, e, None])",
        "_, idx = torch.arange(EXPERTS, 0, -1.0).expand(len(x), EXPERTS).topk(2, dim=-1); "
        "dense = torch.zeros(len(x), EXPERTS).scatter(1, idx, weights)",
        experts="range(2, EXPERTS)",
    )
    assert level_of(check(program)) == 2
