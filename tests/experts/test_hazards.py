"""Programs made to trap `group_experts`: each is equal to eager mode, with its gradients, or stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpasses.dynamo import flags
from tests import rounding
from tests.experts.layer import (
    ADD,
    EXPERTS,
    PAIRS,
    TOKENS,
    WIDTH,
    Layer,
    Loop,
    add_all,
    check,
    level_of,
    looping,
    product,
    written,
)
from tests.support import assert_same, compiled

pytestmark = pytest.mark.usefixtures("capture_flags")


# Which experts, and in which order

ORDERS = {
    "all": (range(EXPERTS), 2),
    "permuted": ([2, 0, 3, 1], 1),
    "one skipped": ([0, 1, 3], 1),
    "one twice": ([0, 1, 1, 2], 1),
    "out of range": (range(EXPERTS + 2), 1),
    "a slice": (range(1, 3), 2),
    "far apart": ([0, 3], 1),
}


@pytest.mark.parametrize("name", ORDERS)
def test_which_experts(name: str) -> None:
    experts, level = ORDERS[name]
    loop = looping(lambda layer, e, x, tok: x[tok] @ layer.w[e % EXPERTS], experts)
    assert level_of(check(loop)) == level


def test_ids_of_a_small_dtype() -> None:
    """`idx.to(torch.uint8)` is an index that PyTorch takes for a mask, and too small for the number of experts."""

    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        return add_all(layer, x, weights, idx.to(torch.uint8), range(1, 3))

    for level in ("auto", "slices"):
        assert level_of(check(loop, level=level)) >= 1


# Rows of no expert


@pytest.mark.skipif(not rounding.IS_KNOWN, reason="this torch has no `torch.library.get_kernel`")
def test_each_product_has_the_rows_that_it_has_in_the_loop() -> None:
    """Pairs of other experts are in none: a library may compute a row otherwise where there are more."""
    with rounding.by_sizes():
        assert level_of(check(lambda *given: add_all(*given, range(1, 3)))) == 2


def norm_of_rows(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    h = product(layer, e, x, tok)
    return h / h.norm(dim=-1, keepdim=True)


def root_of_rows(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    return x[tok] / product(layer, e, x, tok).square().sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("step", [norm_of_rows, root_of_rows])
def test_rows_of_no_expert_do_not_divide_by_zero(step: Any) -> None:
    """A row of zeros would have a gradient of 0/0, which no mask takes away."""
    assert level_of(check(looping(step, range(1, 3)), tolerance=1e-6)) == 2


@pytest.mark.parametrize("level", ["auto", "slices"])
def test_no_token_at_all(level: str) -> None:
    loop = looping(norm_of_rows, range(1, 3))
    record = check(lambda layer, x, weights, idx: loop(layer, x, weights, torch.zeros_like(idx)), level=level)
    assert level_of(record) >= 1


# Sums that are used before they are complete


SEEN_BY_A_VIEW = written(
    f"{ADD}; between = view.sum() if e == 1 else between", "view, between = out.view(-1), None", "out * between"
)


def into_a_view(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    buffer = torch.zeros(2 * TOKENS, WIDTH)
    add_all(layer, x, weights, idx, out=buffer[:TOKENS])
    return buffer


@pytest.mark.parametrize("loop", [SEEN_BY_A_VIEW, into_a_view], ids=["seen by a view", "into a view"])
def test_sums_with_onlookers(loop: Loop) -> None:
    assert level_of(check(loop)) == 1


def test_a_sum_in_the_middle_of_a_chain_ends_one_loop_and_begins_another() -> None:
    body = f"{PAIRS}; out = out.index_add(0, tok, y); between = out * 2 if e == 1 else between"
    assert check(written(body, "between = None", "out + between")).figures("group_experts")["loops_grouped"] == 2


# What is written, and when


def mask_is_written(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    masks = [idx == e for e in range(EXPERTS)]
    for mask in masks:
        mask[0] = False
    return add_all(layer, x, weights, idx, masks=masks)


def one_hot_is_written(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    mask = F.one_hot(idx, EXPERTS).permute(2, 0, 1)
    mask[:, 0] = 0
    return add_all(layer, x, weights, idx, masks=mask)


def ids_are_written_first(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    idx[:3] = EXPERTS  # dropped tokens
    idx[4, 1] = idx[4, 0]
    return add_all(layer, x, weights, idx)


def ids_are_written_after_the_masks(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    masks = [idx == e for e in range(EXPERTS)]
    idx.zero_()
    return add_all(layer, x, weights, idx, masks=masks)


def a_copy_of_ids_is_stale(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    small = idx.to(torch.int32)
    masks = []
    for e in range(EXPERTS):
        masks.append(small.long() == e)
        small[e] = 0
    return add_all(layer, x, weights, idx, masks=masks)


def scores_are_written_first(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    weights = weights * 1.0
    scales = [(weights * (idx == e)).sum(-1) for e in range(EXPERTS)]
    with torch.no_grad():
        weights.zero_()
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok = (idx == e).any(-1).nonzero().squeeze(-1)
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * scales[e][tok].unsqueeze(-1).detach())
    return out


def places_are_written(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    flat, twice = idx.flatten(), x.detach().repeat_interleave(2, 0)
    out = torch.zeros_like(twice)
    for e in range(EXPERTS):
        own = torch.where(flat == e)[0]
        rows = twice[own] @ layer.w[e]
        own += 1
        own %= 2 * TOKENS
        again = torch.where(flat == e)[0]
        out.index_add_(0, own, rows)
        out.index_add_(0, again, rows)
    return out


# The most that the loop may become.
WRITES: dict[str, tuple[Loop, int]] = {
    "masks": (mask_is_written, 0),
    "one_hot": (one_hot_is_written, 1),  # as columns of whatever it holds
    "ids, first": (ids_are_written_first, 2),
    "ids, after the masks": (ids_are_written_after_the_masks, 0),
    "a copy of ids is stale": (a_copy_of_ids_is_stale, 0),
    "scores, first": (scores_are_written_first, 1),
    "places": (places_are_written, 1),
    "two experts a branch": (
        written(f"others = torch.where(idx == EXPERTS - 1 - e)[0]; {ADD}; out.index_add_(0, others, x[others] * 0.5)"),
        1,
    ),
    # `any` over the tokens: the slots in which the expert is met.
    "slots without tokens": (
        written(
            "slot = (idx == e).any(0).nonzero().squeeze(-1); out.index_add_(0, slot, x[slot] @ w[e])",
            start="torch.zeros(2, WIDTH)",
        ),
        0,
    ),
    "scattered ones, between": (
        written(
            "tok = dense[:, e].nonzero().squeeze(1); out.index_add_(0, tok, x[tok] @ w[e]); dense[0] = 1.0",
            "dense = torch.zeros(TOKENS, EXPERTS).scatter_(1, idx, 1.0)",
        ),
        0,
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written(name: str) -> None:
    loop, most = WRITES[name]
    assert level_of(check(loop)) <= most


@pytest.mark.parametrize("name", [name for name, (_, most) in WRITES.items() if most])
def test_what_is_written_with_slices(name: str) -> None:
    assert level_of(check(WRITES[name][0], level="slices")) == 1


# Ways to ask


ASKS = {
    "where, used whole": written(
        "pair = torch.where(idx == e); tok = pair[0]; out[tok] += (x[tok] @ w[e]) * weights[pair][:, None]"
    ),
    "a mask's sum": written("mask = (idx == e).any(-1); out[mask] += (x[mask] @ w[e]) / (mask.sum() + 1)"),
    "three dimensions": written(
        "b, t, slot = torch.where(ids == e); y = batch[b, t] @ w[e] * weights.view(2, -1, 2)[b, t, slot, None]; "
        "out.index_put_((b, t), y, accumulate=True)",
        "ids, batch = idx.view(2, -1, 2), x.view(2, -1, WIDTH)",
        start="torch.zeros(2, TOKENS // 2, WIDTH)",
    ),
    "rows of a matrix of masks": written(
        "mask = hit[e]; out[mask] = out[mask] + x[mask] @ w[e] * dense[mask, e, None]",
        "dense = torch.zeros(TOKENS, EXPERTS).scatter(1, idx, weights); hit = dense.t() > 0.3",
    ),
    "index_put by a mask": written(
        "mask = (idx == e).any(-1); out = torch.index_put(out, (mask,), x[mask] @ w[e])", start="x.clone()"
    ),
    "a mask and a slice": written(
        "mask = idx[:, 0] == e; out[mask, 2:6] += (x[mask, :4] @ w[e][:4, :4]) * weights[mask, 0, None]"
    ),
    "a mask of the second dimension": written(
        "mask = idx[:, 0] == e; out[:, mask] += x[None][:, mask] @ w[e]", start="torch.zeros(1, TOKENS, WIDTH)"
    ),
    "half of the tokens": written(
        "tok = torch.where(idx == e)[0]; half = tok[: tok.shape[0] // 2]; out.index_add_(0, half, x[half] @ w[e])"
    ),
    "truths as ids": written(
        "tok = torch.where(side == e)[0]; out[tok] = x[tok] @ w[e]", "side = idx[:, 0] > 1", experts="(0, 1)"
    ),
}


@pytest.mark.parametrize("name", ASKS)
def test_ways_to_ask(name: str) -> None:
    assert level_of(check(ASKS[name], level="slices")) == 1


def test_a_mask_that_is_asked_in_another_way_too_stays() -> None:
    """By `argwhere`, which is not known."""
    pairs = PAIRS.replace("idx == e", "mask")
    loop = written(f"mask = idx == e; other = torch.argwhere(mask); {pairs}; out.index_add_(0, tok, y + other[:, :1])")
    assert level_of(check(loop, level="slices")) == 0


# What becomes of the tokens that a query found


def test_tokens_given_away_are_memory_of_their_own() -> None:
    gives_tokens_away = written(f"{ADD}; found.append(tok)", "found = []", "out, found")
    record = check(gives_tokens_away)
    assert level_of(record) == 1
    torch._dynamo.reset()
    _, found = compiled(Layer(gives_tokens_away), "eager")(torch.randn(TOKENS, WIDTH))
    assert len({tok.untyped_storage().data_ptr() for tok in found}) == EXPERTS


@pytest.mark.parametrize("capacity", [11, 1], ids=["holds", "broken"])
def test_the_programs_own_assertions_are_kept(capacity: int) -> None:
    def loop(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
        weights, idx = torch.topk(logits.softmax(-1), 2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(4):
            tok, slot = torch.where(idx == e)
            torch._check(tok.numel() <= capacity)
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
        return out

    inputs = torch.randn(12, 8), torch.randn(12, 4), torch.randn(4, 8, 8)
    with flags.scoped():
        if capacity == 1:
            with pytest.raises(RuntimeError):
                compiled(loop, "eager")(*inputs)
        else:
            torch.testing.assert_close(compiled(loop, "eager")(*inputs), loop(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("step", [norm_of_rows, root_of_rows])
def test_no_token_of_these_experts_and_a_first_token_of_zeros(step: Any) -> None:
    """The rows of no expert were copies of the first token, whose norm has no gradient."""

    def elsewhere(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        return looping(step, range(1, 3))(layer, x, weights, idx % 2 * 3) + x

    x = torch.randn(TOKENS, WIDTH)
    x[0] = 0
    record = assert_same(Layer(elsewhere), [(x.requires_grad_(),)], experts="auto")
    assert level_of(record) == 2


def test_values_that_an_autocast_around_them_computes() -> None:
    """At the end of the loop they would have another dtype: CUDA's autocast computes `exp` in float32."""

    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            scaled = [(x * (e + 1)).exp() for e in (1, 1, 1, 1)]
        return add_all(layer, x, weights, idx, step=lambda layer, e, x, tok: scaled[e][tok] @ layer.w[e])

    assert level_of(check(loop)) == 1
