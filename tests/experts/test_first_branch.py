"""Branches that the first one does not stand for, or whose operators are not row-wise although they look so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.experts.layer import (
    EXPERTS,
    PAIRS,
    TOKENS,
    WIDTH,
    Layer,
    add_all,
    check,
    level_of,
    looping,
    product,
    written,
)
from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")

# Branches of one text that are not of one type


def types_of_each(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    """One expert rounds its rows to bfloat16."""
    like = torch.zeros(1, dtype=torch.bfloat16 if e == 1 else torch.float32)
    return product(layer, e, x, tok).type_as(like).float()


def biases_of_each_dtype(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    biases = [torch.full((WIDTH,), 1 / 3, dtype=torch.float64 if e == 1 else torch.float32) for e in range(EXPERTS)]
    return add_all(
        layer, x, weights, idx, step=lambda layer, e, x, tok: (product(layer, e, x, tok) + biases[e]).float()
    )


def heads_of_each(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    """One expert takes the softmax of other heads."""
    heads = (2, WIDTH // 2) if e == 1 else (WIDTH // 2, 2)
    return product(layer, e, x, tok).reshape(-1, *heads).softmax(-1).flatten(1)


def repeats_of_each(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    return product(layer, e, x, tok)[:, None].expand(-1, 3 if e == 1 else 2, -1).sum(1)


OTHER_TYPES = {
    "types of each": looping(types_of_each),
    "biases of each dtype": biases_of_each_dtype,
    "heads of each": looping(heads_of_each),
    "repeats of each": looping(repeats_of_each),
}


@pytest.mark.parametrize("name", OTHER_TYPES)
def test_branches_of_other_types_or_shapes(name: str) -> None:
    assert level_of(check(OTHER_TYPES[name])) == 1


# Branches that the first one does not stand for, or that are not row-wise


def halves(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    half = WIDTH // 2
    return (x[tok].reshape(-1, half) @ layer.w[e][:half, :half]).reshape(-1, WIDTH)


def bits(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    return (x[tok] @ layer.w[e]).detach().view(torch.int32).add(4096).view(torch.float32)


def one_view_without_gradient(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    views = []
    for e in range(EXPERTS):
        with torch.set_grad_enabled(e != 1):
            views.append(x.view(-1, WIDTH))
    return add_all(layer, x, weights, idx, step=lambda layer, e, x, tok: views[e][tok] @ layer.w[e])


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
    return add_all(layer, x, weights, idx, step=lambda layer, e, x, tok: states[e][tok].float() @ layer.w[e])


def other_dimensions(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    both = torch.stack([x.t(), x.t() * 2])
    return both[..., tok].softmax(-1).sum(0).t() @ layer.w[0]


NOT_ONE_PROGRAM = {
    "alpha": written(f"{PAIRS}; out[tok] = torch.add(out[tok], y, alpha=-1)"),
    "halves of rows": looping(halves),
    "bits": looping(bits),
    "a gate without gradient": written(
        "tok, _ = torch.where(idx == e); out.index_add_(0, tok, (x[tok] @ w[e]) * gates[e][tok])",
        "with torch.no_grad(): gates = [(weights * (idx == e)).sum(-1, keepdim=True) for e in range(EXPERTS)]",
    ),
    "frozen": written(
        f"{PAIRS.replace('w[e]', 'experts[e]')}; out.index_add_(0, tok, y)",
        "with torch.no_grad(): experts = [w[e] for e in range(EXPERTS)]",
    ),
    "one view without gradient": one_view_without_gradient,
    "orders of writes": looping(written_in_other_orders),
    "an alias in one": looping(one_alias),
    "written between": written_between,
    "other dimensions": looping(other_dimensions),
    "broadcast over features": written(
        "tok, slot = torch.where(idx == e); "
        "out[tok] += (x[tok] @ w[e]).sum(-1, keepdim=True) * weights[tok, slot, None]"
    ),
    "by name": looping(lambda layer, e, x, tok: F.linear(x[tok], weight=layer.w[e])),
}


@pytest.mark.parametrize("name", NOT_ONE_PROGRAM)
def test_what_the_first_branch_does_not_stand_for(name: str) -> None:
    assert level_of(check(NOT_ONE_PROGRAM[name])) < 2


@pytest.mark.parametrize("gradients", [True, False])
def test_the_token_before_and_the_bias_of_the_expert_before(gradients: bool) -> None:
    def step(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
        return (x[tok] + x[tok - 1]) @ layer.w[e] + layer.w[e - 1][0]

    with torch.set_grad_enabled(gradients):
        layer, x = Layer(looping(step)), torch.linspace(-1, 2, TOKENS * WIDTH).view(TOKENS, WIDTH)
        torch.testing.assert_close(compiled(layer, "aot_eager")(x), layer(x))


def test_a_sum_by_names() -> None:
    check(written(f"{PAIRS}; out = torch.index_add(input=out, dim=0, index=tok, source=y)"))
