"""Rows that are written in place, memory that is filled, and values that are used on both sides of a write or of a
switch of gradients: as in eager mode, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rows.models import ATTENTIONS, WIDTH, Exit, Model, capped
from tests.rows.test_live_rows import BATCHES, check, loss


def write_after_a_token_was_taken(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    y = x * 2
    token = y[:, 0]
    y += 1.5
    return loss(model, y, seen, labels) + token.square().sum()


def write_to_a_token(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    y = x * 2
    y[:, 0].zero_()
    return loss(model, y, seen, labels)


def write_to_a_view_of_a_token(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    y = x * 2
    y[:, 0][:, :4].mul_(3)
    return loss(model, y, seen, labels)


def view_of_memory_before_it_is_filled(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    memory = x.new_zeros(x.shape[0], x.shape[1], 2 * WIDTH)
    half = memory[..., :WIDTH]
    memory[..., :WIDTH] = x.tanh()
    memory[..., WIDTH:] = x
    return loss(model, half, seen, labels) + memory[:, 0].sum()


def token_of_memory_before_it_is_filled(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    memory = x.new_zeros(x.shape)
    token = memory[:, 0]
    memory[..., :] = x.tanh()
    return loss(model, memory, seen, labels) + token.sum()


def part_of_memory_before_it_is_filled(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    memory = x.new_zeros(x.shape)
    part = memory[:, :-1]
    memory[..., :8] = x.tanh()[..., :8]
    memory[..., 8:] = x[..., :8]
    return F.cross_entropy(model.head(part).flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize(
    "exit",
    [
        write_after_a_token_was_taken,
        write_to_a_token,
        write_to_a_view_of_a_token,
        view_of_memory_before_it_is_filled,
        token_of_memory_before_it_is_filled,
        part_of_memory_before_it_is_filled,
    ],
)
def test_writes_by_another_name(exit: Exit) -> None:
    check(Model(exit), BATCHES[:2], taken=False)


def scaled(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """Scales each token without gradients, as layers of few bits do."""
    y = x * 2
    with torch.no_grad():
        largest = y.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return loss(model, y / largest, seen, labels) + (y * seen[..., None]).sum()


def test_what_is_selected_without_gradients_is_not_used_with_them() -> None:
    check(Model(scaled), BATCHES[:3])


def twice_without_gradients(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    with torch.no_grad():
        first = capped(q, k, v, mask, is_causal, bias)
    return capped(q, k, v, mask, is_causal, bias) - 0.5 * first


def twice_with_a_write(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    v = v * 1.0
    first = capped(q, k, v, mask, is_causal, bias)
    v.mul_(3.0)
    return capped(q, k, v, mask, is_causal, bias) - 0.5 * first


@pytest.mark.parametrize("attention", [twice_without_gradients, twice_with_a_write])
def test_what_is_unpacked_twice(attention: Any) -> None:
    ATTENTIONS["twice"] = attention
    check(Model(loss, spelling="twice"), BATCHES[:2])


def added_in_place(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    y = x * 2
    z = y * 3
    y += z
    y.mul_(model.positions.weight[: x.shape[1]])
    return loss(model, y + z, seen, labels)


def written_through_a_view(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    y = x * 2
    y[..., :4] *= 3
    return loss(model, y, seen, labels)


@pytest.mark.parametrize(("exit", "taken"), [(added_in_place, True), (written_through_a_view, False)])
def test_writes_in_place(exit: Exit, taken: bool) -> None:
    check(Model(exit), BATCHES[:3], taken)


def test_memory_that_is_filled_by_parts() -> None:
    """As multi-head latent attention writes keys: into new memory, by slices of the features."""

    def filled_by_parts(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
        memory = x.new_empty(x.shape[0], x.shape[1], 2 * WIDTH)
        memory[..., :WIDTH] = x.tanh()
        memory[..., WIDTH:] = x[..., :1]
        return loss(model, memory[..., WIDTH // 2 : -WIDTH // 2], seen, labels) + memory[:, 0].sum()

    check(Model(filled_by_parts), BATCHES[:3])


def test_memory_that_is_read_before_it_is_written() -> None:
    def read_first(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
        memory = x.new_zeros(x.shape)
        before = memory + x
        memory[..., :2] = x[..., 1:3]
        return loss(model, before + memory, seen, labels)

    check(Model(read_first), BATCHES[:3], taken=False)


def marked_by_index(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """As a router limits its groups: the largest features of each row."""
    largest = x.topk(3, -1).indices
    kept = torch.zeros_like(x).scatter_(-1, largest, 1.0)
    added = torch.full_like(x, 0.5).scatter_add(-1, largest, x.gather(-1, largest))
    return loss(model, x * kept + added.scatter(2, largest[..., :1], x[..., :1]), seen, labels)


def marked_for_other_rows(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    return loss(model, x * torch.zeros_like(x).scatter(1, x.argsort(1)[:, :2], 1.0), seen, labels)


def marked_in_some_rows(model: Model, x: Tensor, seen: Tensor, labels: Tensor) -> Tensor:
    """The index has fewer rows than what it writes to."""
    return loss(model, torch.zeros_like(x).scatter(-1, x.argsort(-1)[:, :2], 1.0) + x, seen, labels)


@pytest.mark.parametrize(
    ("exit", "taken"), [(marked_by_index, True), (marked_for_other_rows, False), (marked_in_some_rows, False)]
)
def test_features_that_are_written_by_index(exit: Exit, taken: bool) -> None:
    check(Model(exit), BATCHES[:3], taken)
