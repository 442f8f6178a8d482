"""Programs made to trap `group_experts`: each is equal to eager mode, with its gradients, or stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpasses.dynamo import flags
from tests import rounding
from tests.experts.layer import EXPERTS, TOKENS, WIDTH, Layer, check, level_of
from tests.support import assert_same, compiled

pytestmark = pytest.mark.usefixtures("capture_flags")


def add_all(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor, experts: Any = range(EXPERTS)) -> Tensor:
    out = torch.zeros_like(x)
    for e in experts:
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * weights[tok, slot, None])
    return out


# Which experts, and in which order

ORDERS = {
    "all": (range(EXPERTS), 2),
    "permuted": ([2, 0, 3, 1], 1),
    "one skipped": ([0, 1, 3], 1),
    "one twice": ([0, 1, 1, 2], 1),
    "out of range": (range(EXPERTS + 2), 2),
    "a slice": (range(1, 3), 2),
    "far apart": ([0, 3], 1),
}


@pytest.mark.parametrize("name", ORDERS)
def test_which_experts(name: str) -> None:
    experts, level = ORDERS[name]

    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in experts:
            tok, slot = torch.where(idx == e)
            out.index_add_(0, tok, (x[tok] @ layer.w[e % EXPERTS]) * weights[tok, slot, None])
        return out

    assert level_of(check(loop)) == (level if name != "out of range" else 1)


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


def norm_of_rows(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(1, 3):
        tok, slot = torch.where(idx == e)
        h = x[tok] @ layer.w[e]
        out.index_add_(0, tok, h / h.norm(dim=-1, keepdim=True) * weights[tok, slot, None])
    return out


def root_of_rows(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(1, 3):
        tok, slot = torch.where(idx == e)
        h = (x[tok] @ layer.w[e]).square().sum(-1, keepdim=True).sqrt()
        out.index_add_(0, tok, x[tok] / h * weights[tok, slot, None])
    return out


@pytest.mark.parametrize("loop", [norm_of_rows, root_of_rows])
def test_rows_of_no_expert_do_not_divide_by_zero(loop: Any) -> None:
    """A row of zeros would have a gradient of 0/0, which no mask takes away."""
    assert level_of(check(loop, tolerance=1e-6)) == 2


def test_no_token_at_all() -> None:
    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        return norm_of_rows(layer, x, weights, torch.zeros_like(idx))

    for level in ("auto", "slices"):
        assert level_of(check(loop, level=level)) >= 1


# Sums that are used before they are complete


def used_in_between(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out, between = torch.zeros_like(x), torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        out = out.index_add(0, tok, (x[tok] @ layer.w[e]) * weights[tok, slot, None])
        if e == 1:
            between = out * 2
    return out + between


def seen_by_a_view(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    view, between = out.view(-1), x.new_zeros(())
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * weights[tok, slot, None])
        if e == 1:
            between = view.sum()
    return out * between


def into_a_view(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    buffer = torch.zeros(2 * TOKENS, WIDTH)
    out = buffer[:TOKENS]
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * weights[tok, slot, None])
    return buffer


@pytest.mark.parametrize("loop", [seen_by_a_view, into_a_view])
def test_sums_with_onlookers(loop: Any) -> None:
    assert level_of(check(loop)) == 1


def test_a_sum_in_the_middle_of_a_chain_ends_one_loop_and_begins_another() -> None:
    assert check(used_in_between).figures("group_experts")["loops_grouped"] == 2


# What is written, and when


def mask_is_written(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    masks = [idx == e for e in range(EXPERTS)]
    for mask in masks:
        mask[0] = False
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(masks[e])
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * weights[tok, slot, None])
    return out


def one_hot_is_written(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    mask = F.one_hot(idx, EXPERTS).permute(2, 1, 0)
    mask[:, :, 0] = 0
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        slot, tok = torch.where(mask[e])
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * weights[tok, slot, None])
    return out


def ids_are_written_first(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    idx[:3] = EXPERTS  # dropped tokens
    idx[4, 1] = idx[4, 0]
    return add_all(layer, x, weights, idx)


def ids_are_written_after_the_masks(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    masks = [idx == e for e in range(EXPERTS)]
    idx.zero_()
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(masks[e])
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * weights[tok, slot, None])
    return out


def a_copy_of_ids_is_stale(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    small = idx.to(torch.int32)
    masks = []
    for e in range(EXPERTS):
        masks.append(small.long() == e)
        small[e] = 0
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(masks[e])
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * weights[tok, slot, None])
    return out


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


def two_experts_a_branch(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        others = torch.where(idx == EXPERTS - 1 - e)[0]
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * weights[tok, slot, None])
        out.index_add_(0, others, x[others] * 0.5)
    return out


def slots_without_tokens(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    """`any` over the tokens: the slots in which the expert is met."""
    out = torch.zeros(2, WIDTH)
    for e in range(EXPERTS):
        slot = (idx == e).any(0).nonzero().squeeze(-1)
        out.index_add_(0, slot, x[slot] @ layer.w[e])
    return out


def dense_is_written_between(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    dense = torch.zeros(TOKENS, EXPERTS).scatter_(1, idx, 1.0)
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok = dense[:, e].nonzero().squeeze(1)
        out.index_add_(0, tok, x[tok] @ layer.w[e])
        dense[0] = 1.0
    return out


WRITES = {
    mask_is_written: 0,
    one_hot_is_written: 1,  # as columns of whatever it holds
    ids_are_written_first: 2,
    ids_are_written_after_the_masks: 0,
    a_copy_of_ids_is_stale: 0,
    scores_are_written_first: 1,
    places_are_written: 1,
    two_experts_a_branch: 1,
    slots_without_tokens: 0,
    dense_is_written_between: 0,
}


@pytest.mark.parametrize("loop", WRITES, ids=lambda loop: loop.__name__)
def test_what_is_written(loop: Any) -> None:
    assert level_of(check(loop)) <= WRITES[loop]


@pytest.mark.parametrize("loop", [loop for loop, level in WRITES.items() if level], ids=lambda loop: loop.__name__)
def test_what_is_written_with_slices(loop: Any) -> None:
    assert level_of(check(loop, level="slices")) == 1


# Ways to ask


def argwhere_first(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = idx == e
        other = torch.argwhere(mask)
        tok, slot = torch.where(mask)
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * weights[tok, slot, None] + other[:, :1])
    return out


def where_used_whole(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        pair = torch.where(idx == e)
        tok = pair[0]
        out[tok] += (x[tok] @ layer.w[e]) * weights[pair][:, None]
    return out


def count_nonzero(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = (idx == e).any(-1)
        out[mask] += (x[mask] @ layer.w[e]) / (mask.sum() + 1)
    return out


def three_dims(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    ids = idx.view(2, TOKENS // 2, 2)
    batch = x.view(2, TOKENS // 2, WIDTH)
    out = torch.zeros_like(batch)
    for e in range(EXPERTS):
        b, t, slot = torch.where(ids == e)
        out.index_put_((b, t), batch[b, t] @ layer.w[e] * weights.view(2, -1, 2)[b, t, slot, None], accumulate=True)
    return out


def ge_mask_of_matrix(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    dense = torch.zeros(TOKENS, EXPERTS).scatter(1, idx, weights)
    hit = dense.t() > 0.3
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = hit[e]
        out[mask] = out[mask] + x[mask] @ layer.w[e] * dense[mask, e, None]
    return out


def masked_put(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = x.clone()
    for e in range(EXPERTS):
        mask = (idx == e).any(-1)
        out = torch.index_put(out, (mask,), x[mask] @ layer.w[e])
    return out


def mask_in_tuple(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = idx[:, 0] == e
        out[mask, 2:6] += (x[mask, :4] @ layer.w[e][:4, :4]) * weights[mask, 0, None]
    return out


def none_first(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros(1, TOKENS, WIDTH)
    for e in range(EXPERTS):
        mask = idx[:, 0] == e
        out[:, mask] += x[None][:, mask] @ layer.w[e]
    return out


def uneven_shared(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok = torch.where(idx == e)[0]
        half = tok[: tok.shape[0] // 2]
        out.index_add_(0, half, x[half] @ layer.w[e])
    return out


def bool_ids(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    side = idx[:, 0] > 1
    out = torch.zeros_like(x)
    for e in (0, 1):
        tok = torch.where(side == e)[0]
        out[tok] = x[tok] @ layer.w[e]
    return out


ASKS = [
    where_used_whole, count_nonzero, three_dims, ge_mask_of_matrix, masked_put, mask_in_tuple, none_first,
    uneven_shared, bool_ids,
]  # fmt: skip


@pytest.mark.parametrize("loop", [*ASKS, argwhere_first], ids=lambda loop: loop.__name__)
def test_ways_to_ask(loop: Any) -> None:
    """But for `argwhere`, which asks the same mask in a way that is not known, so that the mask stays."""
    assert level_of(check(loop, level="slices")) == (loop in ASKS)


# What becomes of the tokens that a query found


def gives_tokens_away(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Any:
    out, found = torch.zeros_like(x), []
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        found.append(tok)
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * weights[tok, slot, None])
    return out, found


def test_tokens_given_away_are_memory_of_their_own() -> None:
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


@pytest.mark.parametrize("loop", [norm_of_rows, root_of_rows])
def test_no_token_of_these_experts_and_a_first_token_of_zeros(loop: Any) -> None:
    """The rows of no expert were copies of the first token, whose norm has no gradient."""

    def elsewhere(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        return loop(layer, x, weights, idx % 2 * 3) + x

    x = torch.randn(TOKENS, WIDTH)
    x[0] = 0
    record = assert_same(Layer(elsewhere), [(x.requires_grad_(),)], experts="auto")
    assert level_of(record) == 2


def test_values_that_an_autocast_around_them_computes() -> None:
    """At the end of the loop they would have another dtype: CUDA's autocast computes `exp` in float32."""

    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            scaled = [(x * (e + 1)).exp() for e in (1, 1, 1, 1)]
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            tok, slot = torch.where(idx == e)
            out.index_add_(0, tok, (scaled[e][tok] @ layer.w[e]) * weights[tok, slot, None])
        return out

    assert level_of(check(loop)) == 1
