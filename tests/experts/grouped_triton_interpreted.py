"""Grouped products in Triton's interpreter, against one `mm` for each group: forward and gradients.

Triton reads TRITON_INTERPRET as it is imported, so these run in a process of their own: `test_grouped_triton.py` starts
it. By hand: TRITON_INTERPRET=1 python -m pytest tests/experts/grouped_triton_interpreted.py
"""

import itertools

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from fxpasses.experts.runtime import grouped_kernels, grouped_triton, grouped_ways
from fxpasses.experts.runtime.grouped_linear import (
    grouped_expand,
    grouped_mm,
    grouped_mm_list,
    grouped_outer,
    grouped_sum,
)
from fxpasses.experts.runtime.grouped_ways import Way

GROUPS = {
    "mixed": [3, 0, 8, 7],
    "several_tiles": [65, 130, 0, 1],
    "whole_tiles": [64, 0, 128, 0],
    "one": [20],
    "one_row_each": [1, 1, 1, 1],
    "all_in_one": [0, 0, 18, 0],
    "empty": [0, 0, 0, 0],
    "many": [0, 2, 1, 0] * 6,
}
DEPTH, WIDTH = 41, 70  # no multiples of any block, and more than one of them
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.float16: (1e-2, 5e-2), torch.bfloat16: (2e-2, 3e-1)}
FORMS = list(itertools.product(["stacked", "list"], [False, True], [False, True]))


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch):
    """The interpreter holds bfloat16 as uint16, and multiplies these (Triton 3.6 to 3.9)."""
    create_dot = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar == tl.bfloat16:
            handle.data = (handle.data.astype(np.uint32) << 16).view(np.float32)
            handle.dtype = tl.float32
        return handle

    def dot(self, one, other, *rest):
        return create_dot(self, widened(one), widened(other), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def backwards(builder, *place, set_grid_idx=InterpreterBuilder.set_grid_idx):
    set_grid_idx(builder, *(size - 1 - index for size, index in zip(builder.grid_dim, place, strict=True)))


def both_ways(monkeypatch, program):
    """The results of `program()` by Triton, and with one `mm` for each group."""

    def run(way):
        with monkeypatch.context() as patches:
            patches.setattr(grouped_ways, "way_of", lambda device, dtype, *widths: way)
            return program()

    return run(Way.TRITON), run(Way.EACH)


def assert_close(actual, expected, dtype):
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute)


def operands(form, transposed, with_bias, sizes, dtype=torch.float32, trailing=2):
    shape = (WIDTH, DEPTH) if transposed else (DEPTH, WIDTH)
    rows = torch.randn(sum(sizes) + trailing, DEPTH).to(dtype).requires_grad_()
    weights = torch.randn(len(sizes), *shape).to(dtype)
    weights = [w.clone().requires_grad_() for w in weights] if form == "list" else weights.requires_grad_()
    bias = torch.randn(len(sizes), WIDTH).to(dtype).requires_grad_() if with_bias else None
    return rows, weights, torch.tensor(sizes).cumsum(0), bias, transposed


def outputs_and_gradients(rows, weights, offsets, bias, transposed):
    operator = grouped_mm_list if isinstance(weights, list) else grouped_mm
    out = operator(rows, weights, offsets, bias, transposed)
    leaves = [rows, *(weights if isinstance(weights, list) else [weights]), *([] if bias is None else [bias])]
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out, *torch.autograd.grad(out, leaves, direction)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forward_and_gradients(form, dtype, monkeypatch):
    given = operands(*form, GROUPS["mixed"], dtype)
    actual, expected = both_ways(monkeypatch, lambda: outputs_and_gradients(*given))
    assert_close(actual, expected, dtype)
    assert not actual[0][sum(GROUPS["mixed"]) :].any()


@pytest.mark.parametrize("sizes", GROUPS)
@pytest.mark.parametrize("form", [("stacked", False, True), ("list", True, False)], ids=str)
@pytest.mark.parametrize("order", ["first to last", "last to first"])
def test_any_groups(form, sizes, order, monkeypatch):
    """Programs run one after the other here, and at once on a device: none may depend on what another one writes."""
    if order == "last to first":
        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", backwards)
    given = operands(*form, GROUPS[sizes], trailing=0 if form[0] == "list" else 2)
    actual, expected = both_ways(monkeypatch, lambda: outputs_and_gradients(*given))
    assert_close(actual, expected, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_either_dtype(dtype):
    rows, weights, offsets, *_ = operands("stacked", False, False, GROUPS["mixed"])
    rows, weights = rows.detach(), weights.detach()
    actual = grouped_triton.matmul(rows, weights, offsets.to(dtype), None, False)
    assert_close(actual, grouped_kernels.matmul(rows, weights, offsets, None, False), torch.float32)


@pytest.mark.parametrize("layout", ["columns of a wider tensor", "transposed", "every other row", "expanded"])
def test_rows_of_any_strides(layout, monkeypatch):
    rows, weights, offsets, bias, _ = operands("stacked", False, True, GROUPS["mixed"])
    with torch.no_grad():
        if layout == "columns of a wider tensor":
            rows = torch.randn(rows.shape[0], 3 * DEPTH)[:, DEPTH : 2 * DEPTH]
        elif layout == "transposed":
            rows = torch.randn(DEPTH, rows.shape[0]).t()
        elif layout == "every other row":
            rows = torch.randn(2 * rows.shape[0], DEPTH)[::2]
        else:
            rows = torch.randn(1, DEPTH).expand(rows.shape[0], DEPTH)

    def program():
        product = grouped_mm(rows, weights, offsets, bias, False)
        return product, grouped_outer(rows, product, offsets), grouped_outer(product, rows, offsets)

    actual, expected = both_ways(monkeypatch, program)
    assert_close(actual, expected, torch.float32)


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_of_any_strides(transposed, monkeypatch):
    rows, weights, offsets, _, _ = operands("stacked", transposed, False, GROUPS["mixed"])
    wide = torch.cat([weights, weights], -1).chunk(2, -1)[1]
    swapped = weights.mT.contiguous().mT
    mixed = [w.t().contiguous().t() if e % 2 else w for e, w in enumerate(weights)]
    for given in (wide, swapped, list(wide.unbind()), list(swapped.unbind()), mixed):
        operator = grouped_mm_list if isinstance(given, list) else grouped_mm
        actual, expected = both_ways(
            monkeypatch, lambda op=operator, given=given: op(rows, given, offsets, None, transposed)
        )
        assert_close(actual, expected, torch.float32)


def test_more_weights_than_a_kernel_takes_addresses(monkeypatch):
    monkeypatch.setattr(grouped_triton, "MOST_LISTED", 2)
    given = operands("list", True, True, GROUPS["mixed"])
    actual, expected = both_ways(monkeypatch, lambda: outputs_and_gradients(*given))
    assert_close(actual, expected, torch.float32)


def test_gradients_of_a_list_share_no_memory():
    rows, _, offsets, *_ = operands("list", True, True, GROUPS["mixed"])
    products = grouped_triton.outer_list(rows.detach(), rows.detach(), offsets)
    assert len({product.untyped_storage().data_ptr() for product in products}) == len(products)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_taken_in_float32(dtype):
    """In bfloat16 256 + 1 is 256, and in float16 2048 + 1 is 2048."""
    length = 2304
    offsets, ones = torch.tensor([length]), torch.ones(length, 16, dtype=dtype)
    expected = torch.tensor(length, dtype=dtype)
    assert (grouped_triton.total(ones, offsets) == expected).all()
    assert (grouped_triton.outer(ones, ones, offsets) == expected).all()
    long_rows = torch.ones(3, length, dtype=dtype)
    products = grouped_triton.matmul(long_rows, torch.ones(1, length, 16, dtype=dtype), torch.tensor([3]), None, False)
    assert (products == expected).all()


@pytest.mark.parametrize("shape", [(0, DEPTH, WIDTH), (5, 0, WIDTH), (5, DEPTH, 0)], ids=str)
def test_nothing_to_multiply(shape, monkeypatch):
    size, depth, width = shape
    offsets = torch.tensor([size, size])
    rows, weights, grad = torch.randn(size, depth), torch.randn(2, depth, width), torch.randn(size, width)

    def program():
        return grouped_mm(rows, weights, offsets), grouped_outer(rows, grad, offsets), grouped_sum(grad, offsets)

    actual, expected = both_ways(monkeypatch, program)
    assert_close(actual, expected, torch.float32)
    assert_close(grouped_triton.matmul(rows, weights, offsets, None, False), expected[0], torch.float32)


def test_offsets_outside_of_the_rows_reach_no_other_memory():
    rows, weights, *_ = operands("stacked", False, False, [4, 4], trailing=0)
    outside, inside = torch.tensor([-3, 1000]), torch.tensor([0, 8])
    for function in (
        lambda offsets: grouped_triton.matmul(rows, weights, offsets, None, False),
        lambda offsets: grouped_triton.outer(rows, rows, offsets),
        lambda offsets: grouped_triton.total(rows, offsets),
    ):
        assert torch.equal(function(outside), function(inside))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_host_reads_no_offsets(form, monkeypatch):
    def read(*args):
        raise AssertionError("the host reads the offsets")

    given = operands(*form, GROUPS["mixed"])
    monkeypatch.setattr(grouped_ways, "way_of", lambda device, dtype, *widths: Way.TRITON)
    monkeypatch.setattr(grouped_kernels, "_sizes", read)
    for name in ("tolist", "item", "__int__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, read)
    outputs_and_gradients(*given)
    values = torch.randn(4, WIDTH, requires_grad=True)
    grouped_expand(values, given[2], given[0].shape[0]).sum().backward()


def test_the_gradients_of_groups_that_are_skipped_are_negative_zeros():
    """A constant of -0.0 in Triton is 0.0."""
    rows, offsets = torch.randn(6, 16), torch.tensor([0, 6, 6])
    products, sums = grouped_triton.outer_list(rows, rows, offsets, -0.0), grouped_triton.total(rows, offsets, -0.0)
    assert torch.equal(products[1], grouped_triton.outer(rows, rows, offsets)[1])
    for group, skipped in enumerate((True, False, True)):
        assert torch.signbit(products[group]).all() == torch.signbit(sums[group]).all() == skipped
