"""Products written into memory that is not contiguous, `torch.mm(a, b, out=tile)`, in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")

ROWS, WIDTH, COLUMNS, TILE = 6, 5, 14, 4


def product(hidden: Tensor, weight: Tensor) -> Tensor:
    """The largest logit of each row, tile by tile in one buffer, as in TRL's fused head."""
    buffer = torch.empty(hidden.shape[0], TILE)
    largest = torch.full((hidden.shape[0],), -torch.inf)
    for start in range(0, COLUMNS, TILE):
        part = weight[start : start + TILE]
        tile = buffer[:, : part.shape[0]]
        torch.mm(hidden, part.t(), out=tile)
        tile.mul_(2)
        largest = torch.maximum(largest, tile.amax(-1))
    return largest


class Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(hidden, weight)
        return product(hidden, weight), None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        columns = torch.empty(hidden.shape[0], 2 * WIDTH)[:, :WIDTH]
        torch.mm(gradients[0][:, None].expand(-1, COLUMNS), weight, out=columns)
        return columns * columns.stride(0), None


def results(program: Any, *inputs: Any) -> list[Any]:
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    found = program(*leaves)
    if found.requires_grad:
        found.square().sum().backward()
    return [found.detach(), *leaves, *(leaf.grad for leaf in leaves)]


def breaks(program: Any, *batches: Any) -> int:
    """How often the graph breaks; results and gradients are eager mode's, bit for bit."""
    counters.clear()
    run = compiled(program, "aot_eager")
    for inputs in batches:
        torch.testing.assert_close(results(run, *inputs), results(program, *inputs), rtol=0, atol=0)
    return sum(counters["graph_break"].values())


def inputs(rows: int = ROWS, requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, WIDTH, requires_grad=requires_grad), torch.randn(COLUMNS, WIDTH)


def test_tiles_of_one_buffer() -> None:
    assert breaks(product, inputs(), inputs(9), inputs(7)) == 0


def test_in_a_function_with_its_own_gradient() -> None:
    def program(hidden: Tensor, weight: Tensor) -> Tensor:
        return Head.apply(hidden, weight)[0]

    assert breaks(program, inputs(requires_grad=True), inputs(9, requires_grad=True)) == 0


def test_the_rest_of_the_buffer_and_other_views_are_left_as_they_are() -> None:
    def program(hidden: Tensor, weight: Tensor) -> Tensor:
        buffer = torch.ones(ROWS + 2, COLUMNS + 3)
        column = buffer[:, 1]
        returned = torch.mm(hidden, weight.t(), out=buffer[1:-1, 1:-2])
        return torch.cat([buffer.flatten(), column, returned.flatten()])

    assert breaks(program, inputs()) == 0


@pytest.mark.parametrize("columns", [1, 2, 33])
def test_products_that_are_summed_as_their_strides_ask(columns: int) -> None:
    def program(hidden: Tensor, weight: Tensor) -> Tensor:
        wide = torch.empty(hidden.shape[0], columns + 3)[:, :columns]
        tall = torch.empty(columns, 64)[:, : hidden.shape[0]].t()
        with torch.autocast("cpu", torch.bfloat16):  # leaves calls with `out` alone
            torch.mm(hidden, weight, out=wide)
        return wide + torch.mm(hidden, weight, out=tall)

    torch.manual_seed(0)
    batches = [(torch.randn(n, k), torch.randn(k, columns)) for n, k in ((2, 33), (33, 64), (7, 128), (64, 200))]
    assert breaks(program, *batches) == 0


def overlapping(hidden: Tensor, weight: Tensor) -> Tensor:
    buffer = torch.zeros(WIDTH + 2, WIDTH + 2) + weight[0, 0]
    torch.mm(weight[:WIDTH], buffer[:WIDTH, :WIDTH] * 1, out=buffer[1:-1, 1:-1])
    return torch.mm(weight[:WIDTH], buffer[1:-1, 1:-1], out=buffer[:WIDTH, :WIDTH]) * 1


def resized(hidden: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(0, 2)[:, :1]
    return torch.mm(hidden, weight.t(), out=out) * 1


def added(hidden: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(ROWS, COLUMNS, 2)[..., 0]
    return torch.addmm(weight[:, 0], hidden, weight.t(), out=out) * 1


@pytest.mark.parametrize("program", [overlapping, resized, added])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_dynamo_decides(program: Any) -> None:
    breaks(program, inputs())


def test_a_gradient_of_it_is_eager_modes_error() -> None:
    for run in (product, compiled(product, "aot_eager")):
        with pytest.raises(RuntimeError, match=r"don't support automatic differentiation"):
            run(*inputs(requires_grad=True))


class Turning(torch.autograd.Function):
    """Its gradient has the strides that autograd gives it, of which tracing knows nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        copy = torch.empty_like(gradients[0])
        return (gradients[0] + copy.stride(0) + gradients[0].stride(0)).t(), None


def test_the_strides_of_a_gradient_are_stock_pytorchs() -> None:
    given = inputs(requires_grad=True)
    ours = results(compiled(Turning.apply, "aot_eager"), *given)
    torch._dynamo.reset()
    torch.testing.assert_close(ours, results(torch.compile(Turning.apply, backend="aot_eager"), *given))
