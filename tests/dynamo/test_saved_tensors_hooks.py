"""Hooks for saved tensors around a compiled program see the same in its first call as in later ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import compiled


def attention(x: Tensor, document: Tensor) -> Tensor:
    """The pass replaces it by an operator, which it runs on fake tensors."""
    allowed = (document[:, None] == document) & torch.ones(len(document), len(document)).tril().bool()
    scores = (x @ x.transpose(-1, -2) * 0.25).masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1) @ x


def batch() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 2 * 288 * 8, dtype=torch.float64).view(1, 2, 288, 8).clone().requires_grad_()
    return x, torch.arange(3).repeat_interleave(torch.tensor([100, 88, 100]))


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_no_hook_sees_a_fake_tensor(lowering: str) -> None:
    program, seen = compiled(attention, lowering), []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(type(tensor).__name__)
        return tensor

    counts = []
    for _ in range(2):
        seen.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            program(*batch())
        counts.append(len(seen))
        assert set(seen) <= {"Tensor", "Parameter"}
    assert counts[0] == counts[1] > 0


def test_the_first_call_may_be_inside_a_checkpoint() -> None:
    program = compiled(attention, "aot_eager")

    def gradient(of: Any) -> Tensor:
        x, document = batch()
        checkpoint(of, x, document, use_reentrant=False).sum().backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(gradient(program), gradient(attention))
