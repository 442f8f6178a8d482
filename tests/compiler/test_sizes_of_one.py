"""Dimensions that are known to be 1 have the size 1 in what compilers get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from fxpasses.compiler import lowering
from tests.support import ASSIGNS_SLICES, assert_same, slices_to_the_longest

pytestmark = pytest.mark.usefixtures("capture_flags")


def first_token(x: Tensor, lengths: Tensor) -> Tensor:
    h = x[:, : lengths.max()]
    return h - h[:, :1] * h[:, -1:]


def of_the_longest(x: Tensor, lengths: Tensor) -> Tensor:
    return F.layer_norm(x * x[:, : lengths.max()][:, :1].sin(), (4,))


def written_to(x: Tensor, lengths: Tensor) -> Tensor:
    y = x * 1
    y[:, : lengths.max()][:, :1] += y.mean(1, keepdim=True)
    return y


def in_a_checkpoint(x: Tensor, lengths: Tensor) -> Tensor:
    return checkpoint(of_the_longest, x, lengths, use_reentrant=False)


def into_a_checkpoint(x: Tensor, lengths: Tensor) -> Tensor:
    first = x[:, : lengths.max()][:, :1]
    return checkpoint(lambda x, first: x.tanh() - first, x, first, use_reentrant=False)


def batch(*lengths: int) -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 64).view(2, 8, 4).requires_grad_(), torch.tensor(lengths)


@pytest.mark.parametrize("program", [first_token, of_the_longest, written_to, in_a_checkpoint, into_a_checkpoint])
def test_results_are_eager_modes(program: Any) -> None:
    assert_same(program, [batch(8, 3), batch(1, 1), batch(5, 2)], "aot_eager", tolerance=1e-6)


@slices_to_the_longest
def test_inductor_broadcasts_them() -> None:
    """Before, it read other elements, in silence."""
    assert_same(first_token, [batch(8, 3), batch(1, 1)], "inductor", tolerance=1e-6)


@pytest.mark.skipif(not ASSIGNS_SLICES, reason="torch 2.11 gives each such slice a size of its own")
def test_only_the_operator_that_makes_one_is_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[GraphModule] = []

    def aot_eager(gm: GraphModule, *args: Any) -> Any:
        seen.append(gm)
        return gm

    monkeypatch.setattr(lowering, "_aot_eager", aot_eager)
    assert_same(of_the_longest, [batch(8, 3)], "aot_eager")
    targets = [node.target for node in seen[-1].graph.nodes]
    assert (targets.count("select"), targets.count("unsqueeze")) == (1, 1)
    assert targets.index("sin") == targets.index("unsqueeze") + 1
