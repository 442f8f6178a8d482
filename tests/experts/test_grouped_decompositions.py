"""Grouped products under Inductor: one call from C++ where nothing is left to check, with the same numbers."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.compiler.lowering import _decompositions
from fxpasses.experts.runtime.grouped_linear import grouped_mm, grouped_mm_covering

LIBRARY = "aten._grouped_mm.default"
OURS = {"fxpasses.grouped_mm.default", "fxpasses.grouped_outer.default"}
SIZES = [3, 0, 8, 7]


def step(operator, transposed):
    """A product of each group and its gradients, of rows [18, K] and weights [4, K, M] or [4, M, K]."""

    def function(rows, weights, offsets):
        out = operator(rows, weights, offsets, transposed=transposed)
        return out, *torch.autograd.grad(out.sin().sum(), (rows, weights))

    return function


def operands(transposed, widths, dtype=torch.bfloat16):
    depth, width = widths
    shape = (width, depth) if transposed else (depth, width)
    rows = torch.randn(sum(SIZES), depth, dtype=dtype, requires_grad=True)
    weights = torch.randn(len(SIZES), *shape, dtype=dtype, requires_grad=True)
    return rows, weights, torch.tensor(SIZES).cumsum(0).to(torch.int32)


def table():
    """The decompositions that Inductor gets for a graph with a product."""
    return _decompositions(torch.fx.symbolic_trace(lambda x: grouped_mm_covering(x, x, x)), {})["decompositions"]


def called(gm):
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_library_calls(transposed):
    inputs, function = operands(transposed, (32, 64)), step(grouped_mm_covering, transposed)
    gm = make_fx(function, decomposition_table=table())(*inputs)
    assert called(gm).count(LIBRARY) == 3 and not any("fxpasses" in name for name in called(gm))
    for loop, operator, found in zip(
        step(grouped_mm, transposed)(*inputs), function(*inputs), gm(*inputs), strict=True
    ):
        assert torch.equal(loop, operator) and torch.equal(loop, found)


def test_one_graph_for_any_number_of_rows():
    graphs = []

    def compiler(gm, _):
        graphs.append(called(gm))
        return make_boxed_func(gm.forward)

    def loss(rows, weights, offsets):
        return grouped_mm_covering(rows, weights, offsets).sin().sum()

    rows, weights, offsets = operands(False, (32, 64))
    torch._dynamo.mark_static(weights)
    compiled = torch.compile(loss, backend=aot_autograd(fw_compiler=compiler, decompositions=table()), dynamic=False)
    for count in (18, 11, 2):
        given = rows[:count].detach().requires_grad_(), weights, offsets.clamp(max=count)
        torch._dynamo.mark_dynamic(given[0], 0)
        expected, found = (torch.autograd.grad(f(*given), given[:2]) for f in (loss, compiled))
        assert all(map(torch.equal, expected, found))
    assert [names.count(LIBRARY) for names in graphs] == [1, 2]


@pytest.mark.parametrize(
    ("widths", "dtype"),
    [
        ((32, 64), torch.float32),  # PyTorch has no rule of its sizes
        ((40, 64), torch.bfloat16),  # rows that start anywhere round differently
    ],
    ids=["float32", "not aligned"],
)
def test_others_stay(widths, dtype):
    inputs, function = operands(True, widths, dtype), step(grouped_mm_covering, True)
    gm = make_fx(function, decomposition_table=table())(*inputs)
    assert set(called(gm)) >= OURS and LIBRARY not in called(gm)
    for expected, found in zip(step(grouped_mm, True)(*inputs), gm(*inputs), strict=True):
        assert torch.equal(expected, found)


def test_a_gradient_that_is_expanded_stays_and_the_rest_does_not():
    def function(rows, weights, offsets):
        return torch.autograd.grad(grouped_mm_covering(rows, weights, offsets).sum(), (rows, weights))

    inputs = operands(False, (32, 64))
    gm = make_fx(function, decomposition_table=table())(*inputs)
    assert all(map(torch.equal, function(*inputs), gm(*inputs)))


def test_inductor_gets_its_own_table_where_there_is_no_product():
    assert _decompositions(torch.fx.symbolic_trace(lambda x: x.sin()), {}) == {}
