"""One tensor for two operands of an autograd function: one graph, with both gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import assert_same, compiled

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
    """Tells that it was given one tensor twice."""

    @staticmethod
    def forward(ctx: Any, query_mask: Tensor, key_mask: Tensor, query: Tensor, key: Tensor, scale: float) -> Tensor:
        return Attention.forward(ctx, query_mask, key_mask, query, key, 5.0 if query is key else scale)


class Cube(torch.autograd.Function):
    """Of one tensor three times; the second has no gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, c)
        return a * b * c

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b, c = ctx.saved_tensors
        return grad * b * c, None, 2 * grad * a * b


class Narrow(torch.autograd.Function):
    """Returns gradients that autograd has to convert."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * grad, grad.double()


def masks_twice(x: Tensor, mask: Tensor) -> Tensor:
    return Attention.apply(mask, mask, x, x * 2, 0.5)


def all_twice(x: Tensor, mask: Tensor) -> Tensor:
    return Attention.apply(mask, mask, x, x, 0.5)


def an_intermediate(x: Tensor, mask: Tensor) -> Tensor:
    y = x.sin()
    return Attention.apply(mask, mask.cos(), y, y, 0.5) + y.sum()


def three_times(x: Tensor, mask: Tensor) -> Tensor:
    return Cube.apply(x, x, x) * mask[:, None]


def compared(x: Tensor, mask: Tensor) -> Tensor:
    return Compares.apply(mask, mask, x, x, 0.5)


def without_gradients(x: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        return Compares.apply(mask, mask, x, x, 0.5)


def in_checkpoints(x: Tensor, mask: Tensor) -> Tensor:
    for _ in range(2):
        x = checkpoint(lambda x: Attention.apply(mask, mask, x, x, 0.5) @ x, x, use_reentrant=False)
    return x


@pytest.mark.parametrize(
    "program",
    [masks_twice, all_twice, an_intermediate, three_times, compared, without_gradients, in_checkpoints],
)
def test_one_graph(program: Any) -> None:
    record = assert_same(program, [(X, MASK), (X, MASK + 1)], "aot_eager", fullgraph=True, tolerance=1e-6)
    assert len(record.graphs) == 1


@pytest.mark.skipif(torch.__version__ < "2.12", reason="stock PyTorch captures it with a wrong gradient")
def test_gradients_that_autograd_converts_are_stocks() -> None:
    assert_same(lambda x, mask: Narrow.apply(x, x), [(X, MASK)], "aot_eager")


@pytest.mark.skipif(torch.__version__ < "2.12", reason="stock PyTorch captures it with a wrong gradient")
def test_a_subclass_is_stocks() -> None:
    def run(program: Any) -> Tensor:
        x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged, requires_grad=True)
        program(x).values().sum().backward()
        return x.grad.values()

    def program(x: Tensor) -> Tensor:
        return Cube.apply(x, x, x)

    assert torch.equal(run(compiled(program, "aot_eager")), run(program))
