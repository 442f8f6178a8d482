"""Grouped products under Inductor: one call from C++ where nothing is left to check, with the same numbers."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.lowering import _decompositions
from fxpasses.runtime.grouped_linear import grouped_mm, grouped_mm_list

OURS = ("fxpasses.grouped_mm.default", "fxpasses.grouped_mm_list.default", "fxpasses.grouped_outer.default")
SIZES = [3, 0, 8, 7]


def step(operator, transposed, with_bias, **more):
    """A product of each group and its gradients, of rows [18, K] and weights [4, K, M] or [4, M, K]."""

    def function(rows, weights, offsets, bias):
        given = list(weights.unbind(0)) if operator is grouped_mm_list else weights
        out = operator(rows, given, offsets, bias if with_bias else None, transposed, **more)
        return out, *torch.autograd.grad(out.sin().sum(), (rows, weights))

    return function


def operands(transposed, widths, dtype=torch.bfloat16):
    depth, width = widths
    shape = (width, depth) if transposed else (depth, width)
    rows = torch.randn(sum(SIZES), depth, dtype=dtype, requires_grad=True)
    ends = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    weights = torch.randn(len(SIZES), *shape, dtype=dtype, requires_grad=True)
    return rows, weights, ends, torch.randn(len(SIZES), width, dtype=dtype)


def table():
    """The decompositions that Inductor gets for a graph with a product."""
    return _decompositions(torch.fx.symbolic_trace(lambda x: grouped_mm(x, x, x)), {})["decompositions"]


def traced(function, inputs):
    return make_fx(function, decomposition_table=table())(*inputs)


def called(gm):
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("transposed", [False, True])
def test_products_whose_offsets_cover_all_rows_are_library_calls(transposed):
    inputs, function = operands(transposed, (32, 64)), step(grouped_mm, transposed, False, covers=True)
    gm = traced(function, inputs)
    assert called(gm).count("aten._grouped_mm.default") == 3 and not set(OURS) & set(called(gm))
    for expected, found in zip(function(*inputs), gm(*inputs), strict=True):
        assert torch.equal(expected, found)


def test_one_graph_for_any_number_of_rows():
    graphs = []

    def compiler(gm, _):
        graphs.append(called(gm))
        return make_boxed_func(gm.forward)

    def loss(rows, weights, offsets):
        return grouped_mm(rows, weights, offsets, covers=True).sin().sum()

    rows, weights, offsets, _ = operands(False, (32, 64))
    torch._dynamo.mark_static(weights)
    backend = aot_autograd(fw_compiler=compiler, decompositions=table())
    compiled = torch.compile(loss, backend=backend, dynamic=False)
    for count in (18, 11, 2):
        given = rows[:count].detach().requires_grad_(), weights, offsets.clamp(max=count)
        torch._dynamo.mark_dynamic(given[0], 0)
        expected, found = (torch.autograd.grad(f(*given), given[:2]) for f in (loss, compiled))
        assert all(map(torch.equal, expected, found))
    assert [names.count("aten._grouped_mm.default") for names in graphs] == [1, 2]


@pytest.mark.parametrize(
    ("operator", "widths", "with_bias", "dtype", "more"),
    [
        (grouped_mm, (32, 64), False, torch.bfloat16, {}),  # offsets of the user's, which are checked
        (grouped_mm, (32, 64), True, torch.bfloat16, {"covers": True}),
        (grouped_mm, (32, 64), False, torch.float32, {"covers": True}),  # PyTorch has no rule of its sizes
        (grouped_mm, (40, 64), False, torch.bfloat16, {"covers": True}),  # rows that start anywhere round differently
        (grouped_mm_list, (32, 64), False, torch.bfloat16, {}),  # weights that lie apart are not copied together
    ],
    ids=["not known to cover", "bias", "float32", "not aligned", "listed"],
)
def test_others_stay(operator, widths, with_bias, dtype, more):
    inputs, function = operands(True, widths, dtype), step(operator, True, with_bias, **more)
    gm = traced(function, inputs)
    assert set(OURS) & set(called(gm))
    assert with_bias or "aten._grouped_mm.default" not in called(gm)  # gradients have no bias
    for expected, found in zip(function(*inputs), gm(*inputs), strict=True):
        assert torch.equal(expected, found)


def test_inductor_gets_its_own_table_where_there_is_no_product():
    assert _decompositions(torch.fx.symbolic_trace(lambda x: x.sin()), {}) == {}
