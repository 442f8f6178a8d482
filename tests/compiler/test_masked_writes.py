"""`x[mask] = number` as `where`: with eager mode's numbers, gradients and strides, and nothing else is rewritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, symbolic_trace
from torch.utils.checkpoint import checkpoint

from fxpasses.compiler import lowering, masked_writes
from tests.support import assert_same, results

aten = torch.ops.aten
ROWS = torch.tensor([True, False, True, False])
SQUARE = torch.arange(24).view(4, 6) % 3 == 0


def make_x() -> Tensor:
    return torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()


def calls_of(program: Callable[..., Any], inputs: tuple[Any, ...]) -> set[Any]:
    """The operators of forward and backward, as Inductor would get them. Results and gradients are eager mode's."""
    found: set[Any] = set()

    def note(gm: GraphModule, examples: list[Any]) -> Any:
        found.update(node.target for node in gm.graph.nodes)
        return make_boxed_func(gm.forward)

    def backend(gm: GraphModule, examples: list[Any]) -> Any:
        return aot_autograd(fw_compiler=note, decompositions=masked_writes.decompositions(gm))(gm, examples)

    expected, actual = results(program, inputs), results(torch.compile(program, backend=backend), inputs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for one, other in zip(actual["outputs"], expected["outputs"], strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
    return found


def written(x: Tensor, mask: Any, values: Any, accumulate: bool = False) -> Tensor:
    y = x * 2
    if accumulate:
        y.index_put_((mask,), values, accumulate=True)
    else:
        y[mask] = values
    return y


def written_to(x: Tensor, mask: Tensor) -> Tensor:
    x[mask] = 3.0
    return x.sin()


def put(x: Tensor, mask: Tensor) -> Tensor:
    return torch.index_put(x, (mask,), torch.tensor(2.5))


REWRITTEN: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a number": (written, (make_x(), ROWS, 3.0)),
    "a number in a tensor": (written, (make_x(), ROWS, torch.tensor(3.0))),
    "one in a dimension": (written, (make_x(), ROWS, torch.tensor([3.0]))),
    "one in more dimensions": (written, (make_x(), ROWS, torch.tensor([[3.0]]))),
    "added": (written, (make_x(), ROWS, torch.tensor(3.0), True)),
    "a mask of elements": (written, (make_x(), SQUARE, 3.0)),
    "a mask of nothing": (written, (make_x(), torch.zeros(4, dtype=torch.bool), 3.0)),
    "a mask without dimensions": (put, (make_x(), torch.tensor(True))),
    "no rows": (written, (torch.zeros(0, 6), torch.zeros(0, dtype=torch.bool), 3.0)),
    "bfloat16": (written, (make_x().detach().bfloat16().requires_grad_(), ROWS, torch.tensor(0.1).bfloat16())),
    "another dtype of floats": (written, (make_x(), ROWS, torch.tensor(0.1, dtype=torch.float64))),
    "a float among integers": (put, (torch.arange(24).view(4, 6), SQUARE)),
    "truth values": (written, (SQUARE, ROWS, True)),
    "truth values, added": (lambda x, mask, value: x.index_put((mask,), value, True), (SQUARE, ROWS, ROWS[0])),
    "complex numbers": (
        lambda x, mask: torch.view_as_real(written(torch.complex(x, x), mask, 1 + 2j)),
        (make_x(), ROWS),
    ),
    "a function": (put, (make_x(), SQUARE)),
    "transposed": (lambda x, mask: written(x.t(), mask, 3.0).t().view(24), (make_x(), SQUARE.t().contiguous())),
    "channels last": (
        lambda x, mask: written(x.view(1, 4, 3, 2).to(memory_format=torch.channels_last), mask, 3.0),
        (make_x(), SQUARE.view(1, 4, 3, 2)),
    ),
    "a view": (lambda x, mask: (y := x * 2, written_to(y[:, 1:3], mask), y * x), (make_x(), ROWS)),
    "an input": (lambda x, mask: (written_to(x, mask), x * 2), (make_x().detach(), ROWS)),
    "an input through an alias": (lambda x, mask: (written_to(x.t(), mask), x * 2), (make_x().detach(), SQUARE.t())),
    "in a checkpoint": (lambda *args: checkpoint(written, *args, 3.0, use_reentrant=False), (make_x(), ROWS)),
}


def selects(found: set[Any]) -> bool:
    """Whether elements are selected, by our decomposition or by that which AOTAutograd has from torch 2.15 on."""
    return aten.where.self in found or aten.masked_fill.Scalar in found or aten.masked_fill.Tensor in found


@pytest.mark.parametrize("case", REWRITTEN)
def test_one_number_at_one_mask_is_selected(case: str) -> None:
    if torch.__version__ >= "2.15" and case in ("transposed", "channels last", "an input through an alias"):
        pytest.skip("Dynamo of torch 2.15 gives the written tensor other strides, under every backend")
    found = calls_of(*REWRITTEN[case])
    assert selects(found) and aten.index_put.default not in found


LEFT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a row that is repeated": (written, (make_x(), ROWS, torch.arange(6.0))),
    "a column that is repeated": (written, (make_x(), ROWS, torch.ones(2, 1))),
    "an element each": (written, (make_x(), SQUARE, torch.arange(8.0))),
    "positions": (written, (make_x(), torch.tensor([2, 0, 2]), torch.tensor(3.0))),
    "positions, added": (written, (make_x(), torch.tensor([2, 0, 2]), torch.tensor(3.0), True)),
    "two index tensors": (written, (make_x(), (ROWS, torch.tensor([1, 2])), 3.0)),
    "a mask of columns": (lambda x, mask: written(x, (slice(None), mask), 3.0), (make_x(), torch.arange(6) > 2)),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("case", LEFT)
def test_other_writes_by_index_stay(case: str) -> None:
    found = calls_of(*LEFT[case])
    assert (aten.index_put.default in found) != selects(found)
    if torch.__version__ < "2.15":
        assert not selects(found)


@pytest.mark.parametrize("mask", [torch.ones(1, dtype=torch.bool), torch.ones(4, 1, dtype=torch.bool)])
def test_a_mask_of_another_shape_is_not_broadcast(mask: Tensor) -> None:
    with pytest.raises(Exception, match="shape of the mask"):
        calls_of(put, (make_x(), mask))


def test_a_mask_on_another_device_is_left_to_the_operator() -> None:
    elsewhere = torch.empty(4, 6, device="meta")
    assert masked_writes.index_put(elsewhere, (ROWS,), torch.tensor(3.0)) is NotImplemented


def test_a_graph_without_writes_by_index_has_no_decompositions() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x.sin() + 1)
    assert masked_writes.decompositions(graph) == {}


def test_a_masked_write_follows_the_scatter_before_it_in_inductors_code() -> None:
    """Inductor has its own masked write overtake an addition to the buffer that it writes to."""

    def gradient(x: Tensor, index: Tensor) -> Tensor:
        d = x.exp().scatter_add(1, index, -torch.ones(8, 1))
        d[index[:, 0] > 3] = 0
        return d

    batch = torch.linspace(-1, 1, 96).view(8, 12), torch.arange(8)[:, None]
    assert_same(gradient, [batch], "inductor", tolerance=1e-6)


def test_a_graph_with_own_decompositions_has_a_key_in_inductors_cache() -> None:
    from torch._inductor import compile_fx
    from torch._inductor.codecache import FxGraphCachePickler

    wrapper = getattr(compile_fx, "_ConstantDecompTable", None)
    if wrapper is None:
        pytest.skip("Inductor's keys do not cover decompositions before torch 2.13")

    def key(gm: GraphModule) -> str:
        table = lowering._decompositions(gm, {})["decompositions"]
        return FxGraphCachePickler(gm).get_hash(wrapper(table))

    def writes(x: Tensor) -> Tensor:
        return x.index_put((x > 0,), torch.tensor(1.0))

    assert key(symbolic_trace(writes)) == key(symbolic_trace(writes))
