"""What branches of a loop have in common: what is shared, what is a constant of each, what is a family, what parts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from fxpasses.experts.anti_unification import Constants, Mismatch, Template, Unifier, members

EXPERTS = 3
Branch = Callable[[dict[str, Node], Callable[..., Node], int], Any]


def branches(branch: Branch) -> list[Node]:
    """The last node of each branch, in one graph with the inputs `x`, `w`, `w0`, `w1` and `w2`."""
    graph = Graph()
    inputs = {name: graph.placeholder(name) for name in ("x", "w", "w0", "w1", "w2")}

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        return graph.create_node("call_method" if isinstance(target, str) else "call_function", target, args, kwargs)

    return [branch(inputs, call, e) for e in range(EXPERTS)]


def unified(branch: Branch, unifier: Unifier | None = None) -> Any:
    return (unifier or Unifier()).unify(branches(branch))


def test_the_program_of_the_docstring() -> None:
    """silu(x[tok] @ w[e]), where each branch asks for its own tokens."""

    def branch(i: dict[str, Node], call: Any, e: int) -> Node:
        tok = call("nonzero", call(operator.eq, i["x"], e))
        weight = call(operator.getitem, i["w"], e)
        return call(F.silu, call(torch.matmul, call(operator.getitem, i["x"], tok), weight))

    silu = unified(branch)
    assert [family.name for family in members([silu])] == ["eq", "nonzero", "getitem", "getitem", "matmul", "silu"]
    (matmul,) = silu.args
    rows, weight = matmul.args
    assert rows.args[0].name == "x" and weight.args[0].name == "w"  # shared by all branches
    assert weight.args[1] == Constants((0, 1, 2))
    (equal,) = rows.args[1].args
    assert equal.args[1] == Constants((0, 1, 2))
    assert [len(family.nodes) for family in members([silu])] == [EXPERTS] * 6


def test_what_all_branches_look_at_is_shared() -> None:
    shared: list[Node] = []

    def branch(i: dict[str, Node], call: Any, e: int) -> Node:
        shared.append(shared[0] if shared else call(torch.tanh, i["x"]))
        return call(torch.mul, shared[0], e)

    family = unified(branch)
    assert family.args == (shared[0], Constants((0, 1, 2)))


def test_inputs_of_each_branch_are_a_family_without_arguments() -> None:
    family = unified(lambda i, call, e: call(torch.mul, i["x"], i[f"w{e}"])).args[1]
    assert family.is_input and [node.name for node in family.nodes] == ["w0", "w1", "w2"]


def test_what_each_branch_computes_anew_is_one_node() -> None:
    family = unified(lambda i, call, e: call(torch.mul, call("flatten", i["x"]), e))
    assert isinstance(family.args[0], Node) and family.args[0].target == "flatten"


def test_what_may_not_be_repeated_stays_a_family() -> None:
    family = unified(lambda i, call, e: call(torch.mul, call(torch.rand_like, i["x"]), e))
    assert isinstance(family.args[0], Template)


def test_a_family_is_made_once() -> None:
    def branch(i: dict[str, Node], call: Any, e: int) -> Node:
        part = call(torch.mul, i["x"], e)
        return call(torch.add, part, part)

    one, other = unified(branch).args
    assert one is other


def test_keywords_lists_and_slices_are_unified_part_by_part() -> None:
    family = unified(lambda i, call, e: call(torch.add, i["x"], [1, e], alpha=e, key=(slice(None), slice(e, 9))))
    assert family.args[1] == [1, Constants((0, 1, 2))]
    assert family.kwargs["alpha"] == Constants((0, 1, 2))
    everything, part = family.kwargs["key"]
    assert everything == slice(None) and part.stop == 9 and part.start == Constants((0, 1, 2))


def test_slices_that_the_caller_knows_are_what_it_says() -> None:
    seen: list[Any] = []
    known = Constants(("first", "second", "third"))

    def slices(values: Any) -> Constants | None:
        seen.append(tuple(values))
        return known

    family = unified(lambda i, call, e: call(operator.getitem, i["x"], slice(e, e + 1)), Unifier(slices))
    assert family.args[1] is known and seen == [(slice(0, 1), slice(1, 2), slice(2, 3))]


PARTS: dict[str, tuple[Branch, str]] = {
    "other operator": (lambda i, call, e: call(torch.sin if e else torch.cos, i["x"]), "in one branch is `sin`"),
    "input and result": (lambda i, call, e: call("sin", i["w0"] if e else call("cos", i["x"])), "`cos` in one branch"),
    "node and number": (lambda i, call, e: call("add", i["x"], i["w"] if e else 2), "one branch has 2 where another"),
    "number and truth": (lambda i, call, e: call("sum", i["x"], e == 1 or 0), "one branch has 0 where another"),
    "more arguments": (lambda i, call, e: call("view", i["x"], *[1] * (e + 1)), "different numbers of arguments"),
    "other arguments": (lambda i, call, e: call("sum", i["x"], **{"dim" if e else "axis": 0}), "different arguments"),
    "in an operand": (lambda i, call, e: call("exp", call("sin" if e else "cos", i["x"])), "in one branch is `sin`"),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("name", PARTS)
def test_where_branches_part_is_said(name: str) -> None:
    branch, text = PARTS[name]
    with pytest.raises(Mismatch, match=text):
        unified(branch)
