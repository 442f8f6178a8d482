"""Grouped products against a loop over the groups: equal bit for bit in float32 on the CPU, forward and gradients."""

import itertools

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

from fxpasses.experts.runtime import grouped_ways
from fxpasses.experts.runtime.grouped_linear import (
    gather_rows,
    grouped_expand,
    grouped_mm,
    grouped_mm_covering,
    grouped_mm_list,
    grouped_outer,
    grouped_outer_covering,
    grouped_outer_list,
    grouped_sum,
    offsets_on_host,
)
from tests.support import events

pytestmark = pytest.mark.all_cases

GROUPS = {
    "mixed": [3, 0, 8, 7],
    "one_row": [0, 1, 0, 0],
    "all_in_one": [0, 0, 18, 0],
    "empty": [0, 0, 0, 0],
    "large": [65, 130, 0, 1],
}
WIDTHS = [(16, 32), (16, 24), (17, 13)]  # whole cache lines, results that start anywhere, and all rows do
FORMS = list(itertools.product(["stacked", "list"], [False, True], [False, True]))


class Case:
    """Operands of a grouped product; `weights` is one tensor or a list, `leaves` are what has a gradient."""

    def __init__(self, form, transposed, with_bias, sizes, widths=(17, 13), trailing=2, dtype=torch.float32):
        depth, width = widths
        shape = (width, depth) if transposed else (depth, width)
        self.transposed, self.sizes = transposed, sizes
        self.offsets = torch.tensor(sizes).cumsum(0)
        self.rows = torch.randn(sum(sizes) + trailing, depth, dtype=dtype, requires_grad=True)
        self.bias = torch.randn(len(sizes), width, dtype=dtype, requires_grad=True) if with_bias else None
        if form == "list":
            self.weights = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in sizes]
        else:
            self.weights = torch.randn(len(sizes), *shape, dtype=dtype, requires_grad=True)

    @property
    def leaves(self):
        weights = self.weights if isinstance(self.weights, list) else [self.weights]
        return [self.rows, *weights, *([] if self.bias is None else [self.bias])]

    @property
    def operator(self):
        return grouped_mm_list if isinstance(self.weights, list) else grouped_mm

    @property
    def operands(self):
        return self.rows, self.weights, self.offsets, self.bias, self.transposed

    def grouped(self):
        return self.operator(*self.operands)

    def loop(self):
        """As people write it: each group's rows are gathered, multiplied, and added to the result."""
        out, start = None, 0
        for group, size in enumerate(self.sizes):
            index = torch.arange(start, start + size)
            weight, part = self.weights[group], self.rows[index]
            if self.transposed:
                y = F.linear(part, weight, None if self.bias is None else self.bias[group])
            else:
                y = part @ weight if self.bias is None else torch.addmm(self.bias[group], part, weight)
            out = y.new_zeros(self.rows.shape[0], y.shape[1]) if out is None else out
            out = out.index_add(0, index, y)
            start += size
        return out


def gradients(output, leaves):
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return torch.autograd.grad(output, leaves, direction, allow_unused=True, materialize_grads=True)


def assert_same_as_loop(case, equal=torch.equal):
    actual, expected = case.grouped(), case.loop()
    assert actual.dtype == expected.dtype
    assert equal(actual, expected)
    for one, other in zip(gradients(actual, case.leaves), gradients(expected, case.leaves), strict=True):
        assert one.dtype == other.dtype
        assert equal(one, other)


# Against the loop


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("sizes", GROUPS)
def test_equals_the_loop_bit_for_bit(form, widths, sizes):
    assert_same_as_loop(Case(*form, GROUPS[sizes], widths, trailing=0))
    assert_same_as_loop(Case(*form, GROUPS[sizes], widths, trailing=2))


@pytest.mark.parametrize(("widths", "calls"), [((16, 32), 3), ((17, 13), 0)], ids=str)
def test_products_of_whole_cache_lines_are_called_from_cpp(widths, calls):
    """The product, and the gradients of its rows and weights; other widths are aligned group by group, in Python."""
    case = Case("stacked", True, False, [3, 0, 8, 7], widths)
    assert events(lambda: case.grouped().square().sum().backward())["aten::_grouped_mm"] == calls


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_is_close_to_the_loop_in_bfloat16(form):
    def close(one, other):
        return torch.allclose(one, other, rtol=2e-2, atol=2e-2)

    assert_same_as_loop(Case(*form, GROUPS["mixed"], dtype=torch.bfloat16), close)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_what_it_does_to_the_loop(form, dtype):
    def close(one, other):
        return torch.allclose(one, other, rtol=2e-2, atol=2e-2)

    case = Case(*form, GROUPS["mixed"])
    with torch.autocast("cpu", dtype):
        assert case.grouped().dtype == dtype
        assert_same_as_loop(case, close)
    double = Case(*form, GROUPS["mixed"], dtype=torch.float64)
    with torch.autocast("cpu", dtype):
        assert double.grouped().dtype == torch.float64


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("view", ["chunk", "swapped"])
def test_equals_the_loop_on_views_of_weights(view, transposed):
    """A gradient is laid out, and so rounded, by the strides of the weight that the loop multiplies with."""
    case = Case("stacked", transposed, False, GROUPS["mixed"])
    groups, first, second = case.weights.shape
    if view == "chunk":
        parameter = torch.randn(groups, first, 2 * second, requires_grad=True)
        case.weights = parameter.chunk(2, dim=-1)[1]
    else:
        parameter = torch.randn(groups, second, first, requires_grad=True)
        case.weights = parameter.transpose(1, 2)
    assert torch.equal(case.grouped(), case.loop())
    for one, other in zip(
        gradients(case.grouped(), [case.rows, parameter]),
        gradients(case.loop(), [case.rows, parameter]),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_and_gradients_may_be_views(form):
    case = Case(*form, GROUPS["mixed"])
    wide = torch.randn(case.rows.shape[0], 3 * case.rows.shape[1], requires_grad=True)
    case.rows = wide[:, 17:34]
    leaves = [wide, *case.leaves[1:]]
    for reduce in (torch.sum, lambda y: y.t().contiguous().t().square().sum(), lambda y: y[:, ::2].sum()):
        actual = torch.autograd.grad(reduce(case.grouped()), leaves)
        expected = torch.autograd.grad(reduce(case.loop()), leaves)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_weights_used_twice_collect_both_gradients(form):
    case = Case(*form, GROUPS["mixed"], widths=(16, 16))

    def twice(multiply):
        first = multiply()
        case.rows, rows = first.tanh(), case.rows
        second = multiply()
        case.rows = rows
        return second

    actual, expected = twice(case.grouped), twice(case.loop)
    assert torch.equal(actual, expected)
    assert all(map(torch.equal, gradients(actual, case.leaves), gradients(expected, case.leaves)))


@pytest.mark.parametrize("form", ["stacked", "list"])
def test_groups_without_rows_have_a_gradient_of_zeros(form):
    case = Case(form, True, True, [0, 4, 0, 0])
    grads = gradients(case.grouped(), case.leaves)[1:]
    per_group = grads[0] if form == "stacked" else grads[:-1]
    for group in (0, 2, 3):
        assert not per_group[group].any() and not grads[-1][group].any()


def test_only_what_needs_a_gradient_gets_one():
    case = Case("list", True, False, GROUPS["mixed"])
    case.weights[2].requires_grad_(False)
    case.rows = case.rows.detach()
    case.grouped().sum().backward()
    assert [weight.grad is not None for weight in case.weights] == [True, True, False, True]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_expanded_biases_equal_the_loop(widths):
    """`rows @ weight + bias[e]`, as two operators: GPT-OSS."""
    case = Case("stacked", False, True, GROUPS["large"], widths, trailing=0)
    bias, case.bias = case.bias, None
    actual = case.grouped() + grouped_expand(bias, case.offsets, case.rows.shape[0])
    index = torch.repeat_interleave(torch.tensor(case.sizes))
    parts = [case.rows[index == e] @ case.weights[e] + bias[e] for e in range(len(case.sizes))]
    expected = torch.zeros_like(actual)
    for e, part in enumerate(parts):
        expected = expected.index_add(0, torch.where(index == e)[0], part)
    assert torch.equal(actual, expected)
    leaves = [*case.leaves, bias]
    assert all(map(torch.equal, gradients(actual, leaves), gradients(expected, leaves)))


@pytest.mark.parametrize("top", [1, 2, 3, 5])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("activation, width", [(F.relu, 13), (F.silu, 32)])
def test_a_whole_layer_equals_the_loop(top, listed, activation, width):
    """With `gather_rows` a token's gradients are added in the order of the loop's backward pass.

    `silu` itself is not the same on other shapes: PyTorch's CPU kernel rounds the elements beyond the last whole vector
    differently, so that widths that are no multiple of 32 differ in a few elements.
    """
    tokens, experts, hidden = 40, 6, 17
    x = torch.randn(tokens, hidden, requires_grad=True)
    up, down = (torch.randn(experts, *shape, requires_grad=True) for shape in ((width, hidden), (hidden, width)))
    scores, idx = torch.randn(tokens, experts).softmax(-1).topk(top)
    scores.requires_grad_()

    def loop(x):
        out = torch.zeros_like(x)
        for e in range(experts):
            token, slot = torch.where(idx == e)
            y = F.linear(activation(F.linear(x[token], up[e])), down[e])
            out.index_add_(0, token, y * scores[token, slot, None])
        return out

    def grouped(x):
        in_order, order = torch.sort(idx.flatten(), stable=True)
        offsets = torch.searchsorted(in_order, torch.arange(experts), right=True, out_int32=True)
        token = order // top
        multiply = grouped_mm_list if listed else grouped_mm
        ups, downs = (list(w.unbind()) if listed else w for w in (up, down))
        hidden_rows = activation(multiply(gather_rows(x, token), ups, offsets, None, True))
        y = multiply(hidden_rows, downs, offsets, None, True) * scores.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, y)

    actual, expected = grouped(x.sin()), loop(x.sin())
    assert torch.equal(actual, expected)
    leaves = [x, up, down, scores]
    assert all(map(torch.equal, gradients(actual, leaves), gradients(expected, leaves)))


# As operators


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_of_both_orders_are_right(form):
    case = Case(*form, [2, 0, 1], widths=(3, 2), trailing=1, dtype=torch.float64)

    def multiply(rows, *rest):
        bias = rest[-1] if case.bias is not None else None
        weights = list(rest[:3]) if isinstance(case.weights, list) else rest[0]
        return case.operator(rows, weights, case.offsets, bias, case.transposed)

    assert torch.autograd.gradcheck(multiply, case.leaves)
    assert torch.autograd.gradgradcheck(multiply, case.leaves)


def operator_calls():
    offsets = torch.tensor([2, 2, 5], dtype=torch.int32)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    left, right, values = (torch.randn(*shape, requires_grad=True) for shape in ((6, 4), (6, 3), (3, 4)))
    calls = {
        "outer": (grouped_outer, (left, right, offsets)),
        "outer_list": (grouped_outer_list, (left, right, offsets)),
        "covering": (grouped_mm_covering, (left, torch.randn(3, 4, 5, requires_grad=True), ends)),
        "outer, covering": (grouped_outer_covering, (left, right, ends)),
        "sum": (grouped_sum, (left, offsets)),
        "expand": (grouped_expand, (values, offsets, 6)),
        "offsets": (offsets_on_host, (offsets,)),
        "gather": (gather_rows, (left, torch.tensor([5, 0, 0, 3]))),
    }
    for form in FORMS:
        case = Case(*form, [2, 0, 3])
        calls[str(form)] = (case.operator, case.operands)
    return calls


@pytest.mark.parametrize("name", operator_calls())
def test_opcheck(name):
    torch.library.opcheck(*operator_calls()[name])


@pytest.mark.parametrize("name", ["outer", "outer_list", "sum", "expand", "gather"])
def test_gradients_of_the_other_operators_are_right(name):
    operator, operands = operator_calls()[name]
    operands = [
        o.detach().double().requires_grad_() if torch.is_tensor(o) and o.is_floating_point() else o for o in operands
    ]
    assert torch.autograd.gradcheck(operator, operands)
    assert torch.autograd.gradgradcheck(operator, operands)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_with_any_number_of_rows(form, autocast):
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=graphs, fullgraph=True, dynamic=True)
    def multiply(operator, operands):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return operator(*operands).float().tanh()

    for sizes in (GROUPS["mixed"], GROUPS["large"]):
        case = Case(*form, sizes)
        actual = multiply(case.operator, case.operands)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = case.grouped().float().tanh()
        assert torch.equal(actual, expected)
        assert all(map(torch.equal, gradients(actual, case.leaves), gradients(expected, case.leaves)))
    assert graphs.frame_count == 1


@pytest.mark.parametrize("operator", [grouped_mm, grouped_mm_list])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"weights": (3, 5, 2)}, "3 groups need as many weights|rows are 4 wide, but the weights take 5"),
        ({"weights": (2, 4, 2)}, "3 groups need as many weights, but there are 2"),
        ({"bias": (3, 4)}, r"bias must be \(3, 2\), but is \(3, 4\)"),
        ({"bias": (3, 2, torch.float64)}, r"one dtype, but have \['torch.float32', 'torch.float64'\]"),
        ({"offsets": [2, 1, 5]}, r"offsets must rise from 0 to at most the 6 rows, but they are \[2, 1, 5\]"),
        ({"offsets": [2, 3, 7]}, "at most the 6 rows"),
    ],
)
def test_operands_that_do_not_fit(operator, change, message):
    def tensor(shape):
        return torch.randn(*[n for n in shape if isinstance(n, int)]).to(
            next((d for d in shape if isinstance(d, torch.dtype)), torch.float32)
        )

    weights = tensor(change.get("weights", (3, 4, 2)))
    bias = tensor(change["bias"]) if "bias" in change else None
    offsets = torch.tensor(change.get("offsets", [2, 3, 5]))
    given = list(weights.unbind()) if operator is grouped_mm_list else weights
    with pytest.raises(ValueError, match=message):
        operator(torch.randn(6, 4), given, offsets, bias)


def test_weights_of_several_sizes_do_not_fit():
    weights = [torch.randn(4, 2), torch.randn(4, 3)]
    with pytest.raises(ValueError, match=r"one size, but have \[\(4, 2\), \(4, 3\)\]"):
        grouped_mm_list(torch.randn(6, 4), weights, torch.tensor([2, 6]))


# On a device


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("sizes", GROUPS)
def test_the_way_of_grouped_kernels(form, sizes, monkeypatch):
    """What a device does, tried with the `F.grouped_mm` of the CPU: layouts, empty groups, rows after the last."""

    monkeypatch.setattr(grouped_ways, "way_of", lambda device, dtype, *widths: grouped_ways.Way.LIBRARY)
    for trailing in (0, 2):
        case = Case(*form, GROUPS[sizes], (32, 48), trailing, torch.bfloat16)
        assert_same_as_loop(case, lambda one, other: torch.allclose(one, other, rtol=3e-2, atol=3e-2))
        assert not case.grouped()[sum(case.sizes) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("widths", [(32, 48), (17, 13)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_grouped_kernels_agree_with_the_loop_and_wait_for_nothing(form, widths, dtype):
    for sizes in GROUPS.values():
        case = Case(*form, sizes, widths, dtype=dtype)
        expected = case.loop()
        leaves = [leaf.detach().cuda().requires_grad_() for leaf in case.leaves]
        direction = torch.ones(expected.shape, dtype=dtype)
        gradients_expected = torch.autograd.grad(expected, case.leaves, direction, materialize_grads=True)
        case.rows, case.offsets, direction = leaves[0], case.offsets.cuda(), direction.cuda()
        case.weights = leaves[1 : 1 + len(sizes)] if form[0] == "list" else leaves[1]
        case.bias = None if case.bias is None else leaves[-1]
        has_kernel = grouped_ways.way_of(leaves[0].device, dtype, *widths) is not grouped_ways.Way.EACH
        if has_kernel:
            torch.autograd.grad(case.grouped(), leaves, direction)  # compiles
        torch.cuda.set_sync_debug_mode("error" if has_kernel else "default")
        try:
            actual = case.grouped()
            found = torch.autograd.grad(actual, leaves, direction)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(actual.cpu(), expected, rtol=3e-2, atol=3e-2)
        for one, other in zip(found, gradients_expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=3e-2, atol=3e-1)
