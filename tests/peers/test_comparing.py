"""The comparison with eager mode and stock notices what it is there to notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxpasses
from tests.peers.comparing import Function, Program, Tally, compare, fastpack

X, Y = torch.linspace(-1, 2, 6).requires_grad_(), torch.ones(6)


def tally(function: Function, ours: Callable[[Function], Function] = fastpack) -> Tally:
    return compare([Program("it", lambda: (function, (X, Y), {}))], ours)


def double(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def test_one_graph_with_eager_modes_numbers_is_whole() -> None:
    found = tally(double)
    assert (found.compared, found.whole, found.not_compared, found.worse) == (["it"], ["it"], {}, {})


def test_fastpack_compiles_what_is_compared() -> None:
    with fxpasses.inspect.record() as record:
        tally(double)
    assert len(record.graphs) == 1


def other_value(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2.0001


def other_gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2 + (x - x.detach())


def other_input(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y.add_(1)
    return x.sin() * 2


@pytest.mark.parametrize("wrong", [other_value, other_gradient, other_input])
def test_other_numbers_are_worse(wrong: Function) -> None:
    assert tally(double, lambda function: torch.compile(wrong, backend="aot_eager")).worse == {"it": "other numbers"}


def test_an_error_is_worse() -> None:
    def failing(function: Function) -> Function:
        def fail(*arguments: Any) -> None:
            raise RuntimeError("it fails")

        return fail

    assert tally(double, failing).worse == {"it": "RuntimeError: it fails"}


def test_a_graph_break_that_stock_has_not_is_worse() -> None:
    def broken(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x * 2

    found = tally(double, lambda function: torch.compile(broken, backend="aot_eager"))
    assert found.worse == {"it": "graphs 2 > 1 or breaks 1 > 0"}
    assert not tally(broken).worse


def test_what_fails_in_eager_mode_is_not_compared() -> None:
    found = tally(lambda x, y: x.reshape(7))
    assert not found.compared and found.not_compared["it"].startswith("eager mode: RuntimeError")


def test_what_differs_from_call_to_call_is_not_compared() -> None:
    calls: list[None] = []

    def counting(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return x * len(calls)

    assert tally(counting).not_compared == {"it": "eager mode: other numbers each time"}
