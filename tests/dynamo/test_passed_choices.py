"""What a graph break passes to the next frame: a router's choice stays one, and the batch's metadata stay metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpasses.inspect
from fxpasses.dynamo import variants
from fxpasses.metadata.runtime import batch_cache
from tests.support import assert_same, compiled, host_reads, results

EXPERTS, HIDDEN, TOKENS = 4, 8, 12


@pytest.fixture(autouse=True)
def nothing_is_remembered(capture_flags: None) -> None:
    batch_cache.batch_cache.clear()
    variants.forget()


class Experts(torch.nn.Module):
    """Counts its calls of experts, so that no pass can prove that an expert without tokens changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))
        self.calls = 0

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            tok, slot = torch.where(idx == e)
            if tok.numel() == 0:
                continue
            self.calls += 1
            out.index_add_(0, tok, x[tok] @ self.w[e] * weights[tok, slot, None])
        return out


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        weights, idx = torch.topk((self.router(x) + bias).softmax(-1), 2, dim=-1)
        torch._dynamo.graph_break()
        return self.experts(x, idx, weights)


def biases() -> list[Tensor]:
    """Those that leave one expert without tokens, each another one."""
    return [torch.zeros(EXPERTS).index_fill(0, torch.tensor([e]), -20.0) for e in range(EXPERTS)]


def test_a_guard_repeats_no_query_of_a_router() -> None:
    """No more host reads than eager mode's, and one graph for all routings."""
    model, x = Mixture(), torch.randn(TOKENS, HIDDEN)
    program = compiled(model)
    many = []
    for bias in biases():
        with fxpasses.inspect.record() as record:
            torch.testing.assert_close(results(program, (x, bias)), results(model, (x, bias)), rtol=0, atol=0)
        many.append(len(record.graphs))
    bias = biases()[0]
    assert many[2:] == [0, 0], many  # the second call may still find that a size varies
    assert host_reads(lambda: program(x, bias)) <= host_reads(lambda: model(x, bias))
    assert "assumed" not in str(record)


def of_numbers(x: Tensor, lengths: Tensor, weight: Tensor) -> Tensor:
    return lengths * 2


def of_a_size(x: Tensor, lengths: Tensor, weight: Tensor) -> Tensor:
    return torch.ones_like(x @ weight, dtype=torch.long)[:2, 0] * lengths


@pytest.mark.parametrize("computes", [of_numbers, of_a_size])
def test_metadata_are_answered_after_a_break(computes: Callable[..., Tensor]) -> None:
    def program(x: Tensor, lengths: Tensor, weight: Tensor) -> Any:
        found, y = computes(x, lengths, weight), x @ weight
        torch._dynamo.graph_break()
        return y.sin() if found.max() > 6 else y.cos()

    weight = torch.randn(HIDDEN, HIDDEN, requires_grad=True)
    record = assert_same(program, [(torch.randn(TOKENS, HIDDEN), torch.tensor([8, 4]), weight)])
    assert len(record.graphs) == 2
    assert "assumed" in str(record)
