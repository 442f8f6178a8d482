"""Programs made to trap `group_experts`: each is equal to eager mode, with its gradients, or stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpasses.capture import flags
from tests.passes.expert_layer import EXPERTS, TOKENS, WIDTH, Layer, check, level_of
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


# Branches of one text that are not of one type


def types_of_each(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    """One expert rounds its rows to bfloat16."""
    like = [torch.zeros(1, dtype=torch.bfloat16 if e == 1 else torch.float32) for e in range(EXPERTS)]
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        h = (x[tok] @ layer.w[e]).type_as(like[e]).float()
        out.index_add_(0, tok, h * weights[tok, slot, None])
    return out


def biases_of_each_dtype(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    biases = [torch.full((WIDTH,), 1 / 3, dtype=torch.float64 if e == 1 else torch.float32) for e in range(EXPERTS)]
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        h = (x[tok] @ layer.w[e] + biases[e]).float()
        out.index_add_(0, tok, h * weights[tok, slot, None])
    return out


def heads_of_each(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    """One expert takes the softmax of other heads."""
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        h = (x[tok] @ layer.w[e]).reshape(-1, *((2, WIDTH // 2) if e == 1 else (WIDTH // 2, 2)))
        out.index_add_(0, tok, h.softmax(-1).flatten(1) * weights[tok, slot, None])
    return out


def repeats_of_each(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        h = (x[tok] @ layer.w[e])[:, None].expand(-1, 3 if e == 1 else 2, -1)
        out.index_add_(0, tok, h.sum(1) * weights[tok, slot, None])
    return out


@pytest.mark.parametrize("loop", [types_of_each, biases_of_each_dtype, heads_of_each, repeats_of_each])
def test_branches_of_other_types_or_shapes(loop: Any) -> None:
    assert level_of(check(loop)) == 1


# Branches that the first one does not stand for, or that are not row-wise


def ordinary(step: Any) -> Any:
    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            tok, slot = torch.where(idx == e)
            out.index_add_(0, tok, step(layer, e, x, tok) * weights[tok, slot, None])
        return out

    return loop


def subtracted(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        out[tok] = torch.add(out[tok], (x[tok] @ layer.w[e]) * weights[tok, slot, None], alpha=-1)
    return out


def halves(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    half = WIDTH // 2
    return (x[tok].reshape(-1, half) @ layer.w[e][:half, :half]).reshape(-1, WIDTH)


def bits(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    return (x[tok] @ layer.w[e]).detach().view(torch.int32).add(4096).view(torch.float32)


def gate_without_gradient(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        with torch.no_grad():
            gate = (weights * (idx == e)).sum(-1, keepdim=True)
        tok, _ = torch.where(idx == e)
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * gate[tok])
    return out


def frozen(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    with torch.no_grad():
        experts = [layer.w[e] for e in range(EXPERTS)]
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, (x[tok] @ experts[e]) * weights[tok, slot, None])
    return out


def one_view_without_gradient(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    views = []
    for e in range(EXPERTS):
        with torch.set_grad_enabled(e != 1):
            views.append(x.view(-1, WIDTH))
    return ordinary(lambda layer, e, x, tok: views[e][tok] @ layer.w[e])(layer, x, weights, idx)


def written_in_other_orders(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    h = x[tok] @ layer.w[e]
    if e % 2:
        tripled = h * 3
        return tripled + h.mul_(2)
    doubled = h.mul_(2)
    return h * 3 + doubled


def one_alias(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    h = x[tok]
    g = (h if e == 0 else x[tok]).relu_()
    return (g + h) @ layer.w[e]


def written_between(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    states, state = [], x.detach().clone()
    for _ in range(EXPERTS):
        states.append(state.to(torch.float64))
        state.mul_(2)
    return ordinary(lambda layer, e, x, tok: states[e][tok].float() @ layer.w[e])(layer, x, weights, idx)


def other_dimensions(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    both = torch.stack([x.t(), x.t() * 2])
    return both[..., tok].softmax(-1).sum(0).t() @ layer.w[0]


def broadcast_over_features(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        out[tok] += (x[tok] @ layer.w[e]).sum(-1, keepdim=True) * weights[tok, slot, None]
    return out


NOT_ONE_PROGRAM = {
    "alpha": subtracted,
    "halves of rows": ordinary(halves),
    "bits": ordinary(bits),
    "a gate without gradient": gate_without_gradient,
    "frozen": frozen,
    "one view without gradient": one_view_without_gradient,
    "orders of writes": ordinary(written_in_other_orders),
    "an alias in one": ordinary(one_alias),
    "written between": written_between,
    "other dimensions": ordinary(other_dimensions),
    "broadcast": broadcast_over_features,
    "by name": ordinary(lambda layer, e, x, tok: F.linear(x[tok], weight=layer.w[e])),
}


@pytest.mark.parametrize("name", NOT_ONE_PROGRAM)
def test_what_the_first_branch_does_not_stand_for(name: str) -> None:
    assert level_of(check(NOT_ONE_PROGRAM[name])) < 2


@pytest.mark.parametrize("gradients", [True, False])
def test_the_token_before_and_the_bias_of_the_expert_before(gradients: bool) -> None:
    def step(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
        return (x[tok] + x[tok - 1]) @ layer.w[e] + layer.w[e - 1][0]

    with torch.set_grad_enabled(gradients):
        layer, x = Layer(ordinary(step)), torch.linspace(-1, 2, TOKENS * WIDTH).view(TOKENS, WIDTH)
        torch.testing.assert_close(compiled(layer, "aot_eager")(x), layer(x))


def test_a_sum_by_names() -> None:
    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            tok, slot = torch.where(idx == e)
            y = (x[tok] @ layer.w[e]) * weights[tok, slot, None]
            out = torch.index_add(input=out, dim=0, index=tok, source=y)
        return out

    check(loop)


@pytest.mark.parametrize("loop", [norm_of_rows, root_of_rows])
def test_no_token_of_these_experts_and_a_first_token_of_zeros(loop: Any) -> None:
    """The rows of no expert were copies of the first token, whose norm has no gradient."""

    def elsewhere(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        return loop(layer, x, weights, idx % 2 * 3) + x

    x = torch.randn(TOKENS, WIDTH)
    x[0] = 0
    record = assert_same(Layer(elsewhere), [(x.requires_grad_(),)], experts="auto")
    assert level_of(record) == 2
