"""Loops in which some experts do something else than the others: LongCat-Flash's, which return their input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.experts.layer import EXPERTS, Layer, check, level_of
from tests.support import compiled, events

pytestmark = pytest.mark.usefixtures("capture_flags")


def of_kinds(kinds: str, skips: bool = True, functional: bool = False, one_routing: bool = False) -> Any:
    """A kind for each expert: m multiplies, t too, but otherwise, i returns its input, and h half of it."""

    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        if one_routing:
            weights, idx = weights[:1].expand_as(weights), idx[:1].expand_as(idx).contiguous()
        out = torch.zeros_like(x)
        hot = torch.nn.functional.one_hot(idx, EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            slot, tok = torch.where(hot[e])
            if skips and tok.numel() == 0:
                continue
            rows = x[tok]
            if kinds[e] in "mt":
                rows = torch.relu(rows @ layer.w[e]) if kinds[e] == "m" else torch.tanh(rows @ layer.w[e])
            elif kinds[e] == "h":
                rows = rows * 0.5
            y = rows * weights[tok, slot, None]
            if functional:
                out = out.index_add(0, tok, y)
            else:
                out.index_add_(0, tok, y)
        return out

    return loop


@pytest.mark.parametrize("skips", [False, True], ids=["all", "skipping"])
@pytest.mark.parametrize("kinds", ["mmii", "mmmi", "immi", "mmih", "imii"])
def test_one_family_multiplies(kinds: str, skips: bool) -> None:
    """The gradient of x adds up family by family, so it may differ in the last bit."""
    record = check(of_kinds(kinds, skips), tolerance=1e-6)
    families = sum(one != other for one, other in zip(kinds, " " + kinds, strict=False))
    assert len(record.graphs) == 1 and record.figures("group_experts")["loops_grouped"] == families


@pytest.mark.parametrize("kinds", ["mmii", "immi"])
def test_a_family_without_tokens(kinds: str) -> None:
    assert level_of(check(of_kinds(kinds, one_routing=True), tolerance=1e-6)) == 2


@pytest.mark.parametrize("kinds", ["mmtt", "mtmt", "imim"])
def test_several_families_that_multiply_stay(kinds: str) -> None:
    """Each would multiply the rows of all, which is more work than the loop does."""
    assert level_of(check(of_kinds(kinds, skips=False), tolerance=1e-6)) == 1


def test_a_chain_of_sums_stays() -> None:
    assert level_of(check(of_kinds("mmii", skips=False, functional=True), tolerance=1e-6)) == 1


def test_no_query_at_run_time() -> None:
    layer = Layer(of_kinds("mmii"))
    x = torch.randn(10, layer.w.shape[1], requires_grad=True)
    program = compiled(layer, "eager")
    program(x).sum().backward()
    seen = events(lambda: program(x).sum().backward())
    assert seen["aten::nonzero"] == seen["aten::one_hot"] == 0
    assert seen["aten::_local_scalar_dense"] == seen["aten::_assert_async"]
