"""The canonical view of an operator call: one name and one set of parameters for all spellings."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from fxpasses.graph.calls import OperatorCall, argument, operator_of
from fxpasses.graph.traits import is_pointwise
from tests.graph.nodes import call


def of_the_user(x):
    return x


of_the_user.__name__ = of_the_user.__qualname__ = "topk"


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("eq", [operator.eq, torch.eq, "eq", "__eq__", torch.ops.aten.eq.Scalar, torch.ops.aten.eq]),
        ("gt", [operator.gt, torch.gt, torch.greater, "gt", "greater", "__gt__"]),
        ("numel", ["numel", "nelement", torch.numel]),
        ("add_", [operator.iadd, "add_", "__iadd__", torch.ops.aten.add_.Tensor]),
        ("div", [operator.truediv, torch.div, torch.true_divide, "divide"]),
        ("floor_divide", [operator.floordiv, torch.floor_divide, "__floordiv__"]),
        ("bitwise_and", [operator.and_, torch.bitwise_and, "__and__"]),
        ("bitwise_and_", [operator.iand, "bitwise_and_", "__iand__"]),
        ("cat", [torch.cat, torch.concat, torch.concatenate]),
        ("scaled_dot_product_attention", [F.scaled_dot_product_attention]),
        ("sym_size", [torch.ops.aten.sym_size.int]),
        ("getitem", [operator.getitem, "__getitem__"]),
        ("index_add_", ["index_add_"]),
        ("__rand__", ["__rand__"]),
    ],
)
def test_spellings_of_one_operator_have_one_name(name, spellings):
    assert {operator_of(call(target, "x")) for target in spellings} == {name}


def test_other_functions_and_libraries_are_not_taken_for_operators_of_pytorch():
    assert operator_of(call(of_the_user, "x")) == f"{__name__}.topk"
    with torch.library._scoped_library("fxpasses_test_calls", "DEF") as library:
        library.define("sum(Tensor x) -> Tensor")
        assert operator_of(call(torch.ops.fxpasses_test_calls.sum.default, "x")) == "fxpasses_test_calls::sum"
        assert operator_of(call(torch.ops.fxpasses_test_calls.sum, "x")) == "fxpasses_test_calls::sum"
    assert operator_of(Graph().placeholder("sum")) == ""


@pytest.mark.parametrize(
    ("node", "parameter", "expected"),
    [
        (call("sum", "x", -1), "dim", -1),
        (call("sum", "x", dim=-1), "dim", -1),
        (call(torch.sum, "x", axis=-1), "dim", -1),
        (call("sum", "x", -1, True), "keepdim", True),
        (call("max", "x", 1), "dim", 1),
        (call(F.softmax, "x", 1), "dim", 1),
        (call(F.softmax, "x", dim=1), "dim", 1),
        (call(F.dropout, "x", 0.5, False), "training", False),
        (call(F.relu, "x", True), "inplace", True),
        (call("split", "x", [1, 2], 0), "split_size", [1, 2]),
        (call(torch.split, "x", split_size_or_sections=[1, 2]), "split_size", [1, 2]),
        (call(torch.full, (2, 2), 7), "fill_value", 7),
        (call(F.scaled_dot_product_attention, "x", "x", "x", 4), "attn_mask", 4),
        (call(F.scaled_dot_product_attention, "x", "x", "x", scale=2.0), "scale", 2.0),
        (call("topk", "x", 2), "k", 2),
        (call("nonzero", "x", as_tuple=True), "as_tuple", True),
        (call("repeat_interleave", "x", 2, dim=1), "dim", 1),
        (call("repeat_interleave", "x", 2, dim=1), "repeats", 2),
        (call("repeat_interleave", "x", 2, 1), "repeats", 2),
        (call(torch.repeat_interleave, "x", 2), "repeats", 2),
        (call("sum", "x"), "dim", None),
    ],
)
def test_arguments_are_found_by_place_and_by_name(node, parameter, expected):
    assert argument(node, parameter) == expected


def test_sizes_are_given_as_one_sequence_or_one_by_one():
    for node in (call("view", "x", 2, 3), call("view", "x", (2, 3)), call(torch.reshape, "x", (2, 3))):
        parameter = "size" if operator_of(node) == "view" else "shape"
        assert OperatorCall.of(node).sequence(parameter) == (2, 3)
    assert OperatorCall.of(call("permute", "x", 1, 0)).sequence("dims") == (1, 0)
    assert OperatorCall.of(call("permute", "x", dims=(1, 0))).sequence("dims") == (1, 0)


def test_further_arguments_are_noticed():
    assert OperatorCall.of(call("cumsum", "x", 0)).has_only("input", "dim")
    assert OperatorCall.of(call("cumsum", "x", dim=0)).has_only("input", "dim")
    assert not OperatorCall.of(call("cumsum", "x", dim=0, dtype=torch.int64)).has_only("input", "dim")
    assert not OperatorCall.of(call("sum", "x", 0, True)).has_only("input", "dim")


def test_pointwise_operators_are_those_whose_overloads_all_are():
    for name in ("add", "mul_", "silu", "masked_fill", "where", "floor_divide", "bitwise_and", "logsigmoid"):
        assert is_pointwise(name), name
    for name in ("max", "equal", "rrelu", "sum", "softmax", "to", "getitem", "einops.rearrange", ""):
        assert not is_pointwise(name), name
