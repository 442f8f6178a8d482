"""Masks of attention that a batch brings as floating-point tensors are metadata; other such inputs are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.attention.test_sparsify_attention import NAME, TOKENS, documents
from tests.support import assert_same, compiled, events, reports_of, results

LEAST = torch.finfo(torch.float32).min


def attend(x: Tensor, mask: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    mask = mask[:, :, :, : q.shape[-2]].to(q.dtype)
    return F.scaled_dot_product_attention(q.sin(), q, q.cos(), mask).transpose(1, 2).flatten(2)


def layers(x: Tensor, mask: Tensor) -> Tensor:
    return x + checkpoint(attend, x + attend(x, mask), mask, use_reentrant=False)


def hidden(least: float, *lengths: int) -> Tensor:
    """0 where a token sees another, `least` elsewhere: [1, 1, TOKENS, TOKENS]."""
    return torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~documents(torch.tensor(lengths)), least)


BATCHES = {
    "packed": hidden(LEAST, 100, 188),
    "packed otherwise": hidden(LEAST, 30, 20, 40, 100, 98),
    "one text": hidden(LEAST, 288),
    "infinite": hidden(-torch.inf, 100, 188),
    "not hidden, but unlikely": hidden(-20.0, 100, 188),
    "a bias": hidden(LEAST, 100, 188) + torch.randn(TOKENS, TOKENS),
    "a bias of all pairs": torch.randn(1, 1, TOKENS, TOKENS),
    "nothing is hidden": torch.zeros(1, 1, TOKENS, TOKENS),
    "all is hidden": torch.full((1, 1, TOKENS, TOKENS), LEAST),
}


def inputs(mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.randn(1, TOKENS, 16, requires_grad=True), mask


def test_one_graph_by_plan_for_whatever_the_mask_holds() -> None:
    record = assert_same(layers, map(inputs, BATCHES.values()), "aot_eager", tolerance=5e-6)
    assert [len(report.changes) for report in reports_of(record, NAME)] == [2]


def test_it_is_read_once_per_batch() -> None:
    step = compiled(layers, "aot_eager")
    results(step, inputs(BATCHES["packed"]))
    batch = inputs(BATCHES["packed otherwise"])
    assert events(lambda: results(step, batch))["fxpasses::attention_plan"] == 1


def test_a_mask_that_is_written_to_is_read_anew() -> None:
    x, mask = inputs(BATCHES["packed"].clone())

    def step(program: Callable[..., Tensor]) -> list[Tensor]:
        first = program(x, mask)
        mask.copy_(BATCHES["packed otherwise"])
        second = program(x, mask)
        mask.copy_(BATCHES["packed"])
        return [first, second]

    torch.testing.assert_close(step(compiled(layers)), step(layers))


@pytest.mark.parametrize(
    "program",
    [
        lambda x, mask: attend(x, mask) + mask.sum(),
        lambda x, mask: attend(x, mask) + F.scaled_dot_product_attention(mask, mask, mask).sum(),
        lambda x, mask: attend(x, mask * 2),
        lambda x, mask: (attend(x, mask), mask + 1),
        lambda x, mask: attend(x, mask) * (mask == 0).sum().item(),
    ],
    ids=["its sum", "a query too", "a multiple", "a result", "a number that is read after attention"],
)
def test_what_is_read_otherwise_is_data(program: Callable[..., Tensor]) -> None:
    record = assert_same(program, [inputs(BATCHES["packed"]), inputs(BATCHES["a bias"])], tolerance=5e-6)
    assert [report.changes for report in reports_of(record, NAME)] == [[]]


def test_a_mask_that_learns_has_its_gradient() -> None:
    batch = inputs(hidden(-5.0, 100, 188).requires_grad_())
    record = assert_same(layers, [batch], "aot_eager", tolerance=5e-6)
    assert [report.changes for report in reports_of(record, NAME)] == [[]]
