"""One tensor for two operands of an autograd function: one graph, with both gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from tests.support import assert_same

pytestmark = pytest.mark.usefixtures("capture_flags")

X = torch.linspace(-1, 2, 12).view(3, 4).requires_grad_()
MASK = torch.tensor([1.0, 0.0, 1.0])


class Attention(torch.autograd.Function):
    """As YOSO's: masks that get no gradient, and a backward of its own."""

    @staticmethod
    def forward(ctx: Any, query_mask: Tensor, key_mask: Tensor, query: Tensor, key: Tensor, scale: float) -> Tensor:
        weights = (query @ key.T) * query_mask[:, None] * key_mask[None, :]
        ctx.save_for_backward(query_mask, key_mask, query, key)
        ctx.scale = scale
        return weights * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query_mask, key_mask, query, key = ctx.saved_tensors
        grad = grad * query_mask[:, None] * key_mask[None, :] * ctx.scale
        return None, None, grad @ key, 3 * grad.T @ query, None


class Compares(Attention):
    @staticmethod
    def forward(ctx: Any, query_mask: Tensor, key_mask: Tensor, query: Tensor, key: Tensor, scale: float) -> Tensor:
        return Attention.forward(ctx, query_mask, key_mask, query, key, 5.0 if query is key else scale)


def masks_twice(x: Tensor, mask: Tensor) -> Tensor:
    return Attention.apply(mask, mask, x, x * 2, 0.5)


def all_twice(x: Tensor, mask: Tensor) -> Tensor:
    return Attention.apply(mask, mask, x, x, 0.5)


def an_intermediate(x: Tensor, mask: Tensor) -> Tensor:
    y = x.sin()
    return Attention.apply(mask, mask.cos(), y, y, 0.5) + y.sum()


def in_checkpoints(x: Tensor, mask: Tensor) -> Tensor:
    for _ in range(2):
        x = checkpoint(lambda x: Attention.apply(mask, mask, x, x, 0.5) @ x, x, use_reentrant=False)
    return x


@pytest.mark.parametrize("program", [masks_twice, all_twice, an_intermediate, in_checkpoints])
def test_one_graph(program: Any) -> None:
    record = assert_same(program, [(X, MASK), (X, MASK + 1)], "aot_eager", fullgraph=True, tolerance=1e-6)
    assert len(record.graphs) == 1


@pytest.mark.skipif(torch.__version__ < "2.12", reason="stock PyTorch captures it with a wrong gradient")
def test_a_function_that_compares_its_operands_is_stocks() -> None:
    def program(x: Tensor, mask: Tensor) -> Tensor:
        return Compares.apply(mask, mask, x, x, 0.5)

    counters.clear()
    torch.compile(program, backend="aot_eager")(X, MASK)
    breaks = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    counters.clear()
    assert_same(program, [(X, MASK)], "aot_eager")
    assert sum(counters["graph_break"].values()) == breaks
