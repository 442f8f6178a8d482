"""Top-k in two stages: the values and gradients of one stage, and indices that point at these values."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fxpasses.report import Reason
from fxpasses.topk.blocks import block_length
from tests.support import assert_same, captured, compiled, reports_of

COLUMNS = 250_003  # in no way a multiple
split = torch.ops.fxpasses.split_topk


def values_of(x):
    return torch.topk(x, 5).values


def run(program, x, **options):
    return assert_same(program, [(x,)], topk="split", **options)


def refusals(record):
    return [refusal.reason for report in reports_of(record, "split_topk") for refusal in report.refusals]


def changes(record):
    return sum(len(report.changes) for report in reports_of(record, "split_topk"))


def test_values_and_gradients_are_those_of_one_stage():
    x = torch.randn(3, COLUMNS, requires_grad=True)
    record = run(values_of, x)
    assert changes(record) == 1
    run(values_of, x, lowering="aot_eager")


def test_the_graph_before_and_after():
    """That of the pass's docstring."""
    from fxpasses.options import Options
    from fxpasses.passes.pipeline import run_passes
    from fxpasses.topk.split_topk import SplitTopk

    gm = captured(lambda x: torch.topk(x, 5)[0], torch.randn(2, COLUMNS))
    examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    after = run_passes([SplitTopk()], gm, examples, Options(topk="split", strict=True)).gm
    calls = [node for node in after.graph.nodes if node.op == "call_function"]
    assert calls[0].target is split.default and calls[0].args[1:] == (5, -1, True, True)
    assert not [node for node in after.graph.nodes if node.target in (torch.topk, "topk")]


@pytest.mark.parametrize(
    "spelling",
    [
        lambda x: x.topk(5)[0],
        lambda x: torch.topk(x, k=5, dim=1, largest=False).values,
        lambda x: x.topk(5, -1, True, sorted=True).values,
        lambda x: x.view(2, 3, -1).topk(5, dim=-1).values,
        lambda x: checkpoint(lambda y: y.exp().topk(5)[0], x, use_reentrant=False),
        lambda x: x.detach().t().topk(5, 0)[0],
    ],
)
def test_spellings(spelling):
    assert changes(run(spelling, torch.randn(6, COLUMNS, requires_grad=True))) == 1


def test_without_the_option_nothing_changes():
    record = assert_same(values_of, [(torch.randn(3, COLUMNS),)])
    assert changes(record) == 0 and not refusals(record)


@pytest.mark.parametrize(
    ("program", "x", "reason"),
    [
        (values_of, torch.randn(4, 1000), Reason.NO_GAIN),
        (lambda x: x.topk(3000).values, torch.randn(4, 30_000), Reason.NO_GAIN),
        (lambda x: x.topk(5, dim=0).values, torch.randn(100_000, 3), Reason.NO_GAIN),
        (lambda x: torch.vmap(lambda row: row.topk(5).values)(x), torch.randn(3, COLUMNS), Reason.HIGHER_ORDER),
        (lambda x: x.long().topk(5, largest=False).values, torch.randn(3, COLUMNS) * 1e6, Reason.NO_GAIN),
    ],
    ids=["short rows", "most of a row", "not along memory", "vmap", "minimum of int64"],
)
def test_what_is_left_alone(program, x, reason):
    record = run(program, x)
    assert changes(record) == 0 and set(refusals(record)) == {reason}


def test_a_size_that_only_the_data_tells_is_left_alone():
    record = run(lambda x: x[x > 0].topk(5).values, torch.randn(COLUMNS))
    assert changes(record) == 0 and Reason.UNKNOWN_SIZE in refusals(record)


def test_dynamic_sizes_ask_for_each_call():
    program = compiled(values_of, topk="split", dynamic=True)
    for columns in (COLUMNS, 200_000, 50, 7):
        x = torch.randn(2, columns)
        assert torch.equal(program(x), values_of(x))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_nan_is_the_greatest_and_infinities_are_numbers(special, largest):
    x = torch.randn(2, COLUMNS)
    x[0, torch.randperm(COLUMNS)[:3]] = special
    x[1, ::2] = special
    x[1, -1] = special  # behind the last whole block
    check(x, 7, -1, largest)


def test_rows_of_one_value():
    check(torch.full((2, COLUMNS), -float("inf")), 9, -1, True)
    check(torch.zeros(2, COLUMNS, dtype=torch.int32), 9, -1, False)


def test_the_winners_may_lie_behind_the_last_whole_block():
    x = torch.arange(2 * COLUMNS, dtype=torch.float64).view(2, COLUMNS)
    check(x, 9, -1, True)
    check(x.flip(1), 9, -1, False)


def check(x, k, dim, largest, in_order=True):
    expected = torch.topk(x, k, dim, largest, True)
    values, indices = split(x, k, dim, largest, in_order)
    assert values.is_contiguous() and indices.is_contiguous() and values.shape == expected.values.shape
    torch.testing.assert_close(x.gather(dim, indices), values, rtol=0, atol=0, equal_nan=True)
    if not in_order:
        values = values.sort(dim, descending=largest).values
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
    ordered = indices.sort(dim).values
    assert not (ordered.diff(dim=dim) == 0).any()  # no element stands twice


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8)  # fmt: skip


def random_case(number):
    choose = random.Random(number)
    rows = choose.choice((1, 2, 3, 5, 8))
    columns = max(250_000 // rows + 1, choose.randint(10_000, 150_000))
    dtype = choose.choice(DTYPES)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(number)) * choose.choice((1, 30, 1000))
    x = x.clamp(0, 100).to(dtype) if not dtype.is_floating_point else x.to(dtype)
    if dtype.is_floating_point and choose.random() < 0.3:
        x[:, choose.sample(range(columns), choose.randint(1, 9))] = float("nan")
    k = choose.choice((1, 2, 7, 30, max(1, columns // 4096), max(1, columns // 1024)))
    dim = -1
    form = choose.choice(("rows", "middle", "transposed", "apart"))
    if form == "middle" and rows == 8:
        x = x.view(2, 4, columns)
    elif form == "transposed":
        x, dim = x.t(), 0
    elif form == "apart":
        x = torch.cat([x, x], -1)[:, :columns]
    return x, k, dim, choose.random() < 0.6, choose.random() < 0.7


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(20, 200, 20))])
def test_random_cases(first):
    acted = 0
    for number in range(first, first + 20):
        x, k, dim, largest, in_order = random_case(number)
        check(x, k, dim, largest, in_order)
        columns = x.shape[dim]
        acted += block_length(x.numel() // columns, columns, k, x.dtype, largest) > 0
        if x.is_floating_point():
            leaf = x.detach().requires_grad_()
            weights = torch.randn(split(leaf, k, dim, largest, True)[0].shape).to(x.dtype)
            found, expected = (
                torch.autograd.grad((f(leaf, k, dim, largest, True)[0].nan_to_num(0) * weights).sum(), leaf)[0]
                for f in (split, torch.topk)
            )
            assert torch.equal(found.sort(dim).values, expected.sort(dim).values)
            if len(leaf.detach().unique()) == leaf.numel():
                assert torch.equal(found, expected)
    assert acted >= 8


@pytest.mark.slow
def test_under_inductor():
    x = torch.randn(3, COLUMNS, requires_grad=True)
    assert changes(run(lambda x: (x * 2).topk(5).values.exp(), x, lowering="inductor", tolerance=1e-6)) == 1
