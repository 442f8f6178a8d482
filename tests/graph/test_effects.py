"""What one node does to memory, as a run on fake tensors shows; and what is refused, with which reason."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg

from fxpasses.graph.effects import Effects, Touch, observe, touch
from fxpasses.graph.refusals import Refused
from fxpasses.report import Reason
from tests.graph.nodes import call


def on_fakes(function: Any, node: Node, *more: Any) -> Any:
    """`observe` or `touch` a node: `x` is float [4, 3], `y` float [3], and `z` [4, 3], but laid out by columns."""
    mode = FakeTensorMode()
    with mode:
        fakes = {"x": torch.ones(4, 3), "y": torch.ones(3), "z": torch.ones(3, 4).t()}
    args, kwargs = map_arg((node.args, node.kwargs), lambda operand: fakes[operand.name])
    return function(node, args, kwargs, mode, *more)


def observed(node: Node, *more: Any) -> Effects:
    return on_fakes(observe, node, *more)


# A call; for each tensor that it gives, the position of the operand in whose memory it lies, or None; whether it is
# that operand itself; and the positions of the operands that are written.
EFFECTS: dict[str, tuple[Node, tuple[int | None, ...], tuple[bool, ...], tuple[int, ...]]] = {
    "new": (call(torch.add, "x", "y"), (None,), (False,), ()),
    "a view": (call("view", "x", -1), (0,), (False,), ()),
    "a view where it can be": (call("reshape", "x", 2, 6), (0,), (False,), ()),
    "a copy where it has to be": (call("reshape", "z", 2, 6), (None,), (False,), ()),
    "itself where it can be": (call("contiguous", "x"), (0,), (True,), ()),
    "a copy else": (call("contiguous", "z"), (None,), (False,), ()),
    "in place": (call("add_", "x", "y"), (0,), (True,), (0,)),
    "in place, by operator": (call(operator.iadd, "x", "y"), (0,), (True,), (0,)),
    "in place, by keyword": (call(F.relu, "x", inplace=True), (0,), (True,), (0,)),
    "a part in place": (call(operator.setitem, "x", 0, "y"), (), (), (0,)),
    "out": (call(torch.sin, "z", out="x"), (1,), (True,), (1,)),
    "several views": (call("unbind", "y"), (0, 0, 0), (False, False, False), ()),
    "several": (call("sort", "x"), (None, None), (False, False), ()),
    "views of two operands": (call(torch.broadcast_tensors, "x", "y"), (0, 1), (True, False), ()),
    "running statistics": (call(F.batch_norm, "x", "y", "y", training=True), (None,), (False,), (1, 2)),
    "one operand twice": (call(torch.add, "y", "y", out="y"), (0,), (True,), (0, 1, 2)),
    "no tensor": (call("dim", "x"), (), (), ()),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_whose_memory_results_lie_in_and_what_is_written(name: str) -> None:
    node, aliases, same, writes = EFFECTS[name]
    effects = observed(node)
    assert (effects.aliases, effects.same, effects.writes) == (aliases, same, writes)


def test_the_result_is_known_by_its_shape_and_dtype() -> None:
    output = observed(call(torch.matmul, "x", "y")).output
    assert (output.shape, output.dtype) == ((4,), torch.float32)


def test_autocast_around_the_node_decides_dtypes() -> None:
    autocast = [("cpu", torch.bfloat16, True, True)]
    assert observed(call(torch.matmul, "x", "y"), autocast).output.dtype is torch.bfloat16


def of_the_user(x: torch.Tensor) -> torch.Tensor:
    return x


REFUSED: dict[str, tuple[Node, Reason, str]] = {
    "random": (call(torch.rand_like, "x"), Reason.RANDOM, "draws random numbers"),
    "random below": (call(F.dropout, "x", 0.5, True), Reason.RANDOM, "draws random numbers"),
    "a size in place": (call("resize_", "x", 2), Reason.UNKNOWN_OPERATOR, "changes more than values"),
    "a function of the user": (call(of_the_user, "x"), Reason.UNKNOWN_OPERATOR, "not known to be pure"),
    "a state of the process": (call(torch.cuda.set_device, 0), Reason.UNKNOWN_OPERATOR, "not known to be pure"),
    "an assertion": (call(torch._assert, True, ""), Reason.UNKNOWN_OPERATOR, "not known to be pure"),
    "a body": (call(torch.ops.higher_order.cond, "x"), Reason.HIGHER_ORDER, "has a body"),
    "other ranks": (
        call(torch.ops._c10d_functional.all_reduce.default, "x", "sum", "0"), Reason.COLLECTIVE, "issued once",
    ),
    "an error": (call(torch.matmul, "x", "x"), Reason.UNKNOWN_OPERATOR, "cannot be evaluated"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_certain_is_refused(name: str) -> None:
    node, reason, text = REFUSED[name]
    with pytest.raises(Refused, match=text) as refused:
        observed(node)
    assert refused.value.reason is reason


def test_an_operator_of_another_library_is_not_known_to_be_pure() -> None:
    with torch.library._scoped_library("fxpasses_test_effects", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        with pytest.raises(Refused, match="not an operator of PyTorch"):
            observed(call(torch.ops.fxpasses_test_effects.twice.default, "x"))


@pytest.mark.parametrize(
    ("example", "text"),
    [
        (torch.ones(4, 3, dtype=torch.float64), r"float64 on cpu in 2 dimensions in the program"),
        (torch.ones(4, 3, 1), r"float32 on cpu in 2 dimensions here and torch\.float32 on cpu in 3 dimensions"),
    ],
)
def test_a_result_unlike_that_of_the_program_is_refused(example: torch.Tensor, text: str) -> None:
    """A state of the process that is not known here would show."""
    node = call(torch.add, "x", "y")
    node.meta["example_value"] = example
    with pytest.raises(Refused, match=text):
        observed(node)


def test_nodes_that_stay_where_they_are_may_do_what_they_like() -> None:
    """What they touch is all that matters; it counts positions, and a random draw is no obstacle."""
    assert on_fakes(touch, call(torch.add, "x", "y")) == Touch(frozenset(), frozenset())
    assert on_fakes(touch, call(F.dropout, "x", 0.5, True)) == Touch(frozenset(), frozenset())
    assert on_fakes(touch, call("bernoulli_", "x")) == Touch(frozenset({0}), frozenset({0}))
    assert on_fakes(touch, call("expand_as", "y", "x")) == Touch(frozenset(), frozenset({0}))
    assert on_fakes(touch, call("requires_grad_", "x")) == Touch(frozenset({0}), frozenset({0}))  # more than values


def test_nothing_is_known_of_what_cannot_be_evaluated() -> None:
    assert on_fakes(touch, call(torch.matmul, "x", "x")) is None
