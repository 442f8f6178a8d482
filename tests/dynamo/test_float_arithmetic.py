"""Numbers that a program computes in floating point are Python's: in its questions, in guards and in generated code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import assert_same, compiled

EXPRESSIONS: dict[str, Callable[[Any], Any]] = {
    "a product": lambda n: n * 0.7 * 10,
    "a product from the right": lambda n: 3 * (0.15 * n),
    "a sum": lambda n: n * 0.1 + 0.2 + 0.3,
    "a difference": lambda n: n * 0.1 - 0.3 - 0.1,
    "a square": lambda n: (n * 0.1) * (n * 0.1) * 10,
    "terms": lambda n: n * 0.1 + n * 0.7,
    "the number itself": lambda n: n * 1.1 - n,
    "a quotient": lambda n: n / 3 / 7 * 21,
    "roots": lambda n: n**0.5 * n**0.5,
    "factors of integers": lambda n: (n + 1) * 0.1 * (n + 2),
    "bounds": lambda n: min(max(n * 0.1 * 3, 0.3), 20.1) * 10,
    "a negative": lambda n: 50 - n * 0.7 * 10,
    "a sum of a list": lambda n: sum([n * 0.1, n * 0.2, n * 0.3]),
}
NUMBERS = range(1, 65)


def batch(number: int) -> tuple[Tensor, Tensor]:
    return torch.ones(2, dtype=torch.float64, requires_grad=True), torch.tensor([1, number])


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_branch_is_pythons(name: str) -> None:
    expression = EXPRESSIONS[name]
    threshold = sorted(map(expression, NUMBERS))[30]

    def program(x: Tensor, lengths: Tensor) -> Tensor:
        return x * 2 if expression(lengths.max().item()) >= threshold else x

    record = assert_same(program, map(batch, NUMBERS))
    assert len(record.graphs) == 2


def values(x: Tensor, lengths: Tensor) -> list[Tensor]:
    n = lengths.max().item()
    numbers = [expression(n) for expression in EXPRESSIONS.values()]
    return [x * whole(number) for number in numbers for whole in (int, math.ceil)]


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_values_are_pythons(lowering: str) -> None:
    assert len(assert_same(values, map(batch, NUMBERS), lowering).graphs) == 1


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_capacities_and_sizes_are_pythons(lowering: str) -> None:
    def program(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        n = lengths.max().item()
        return x * int(n * 0.15 * 3), torch.ones(int(n * 0.1 * 3) + 2)

    assert len(assert_same(program, map(batch, NUMBERS), lowering).graphs) == 1


@pytest.mark.parametrize("capture", ["on", "off"])
def test_numbers_of_sizes_and_activations_are_pythons(capture: str) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        of_size, of_values = x.shape[0] * 0.15 * 3, x.sum().item() * 0.15 * 3
        return x * int(of_size) if of_size >= 0.9 else x, x * int(of_values)

    program_compiled = compiled(program, "aot_eager", dynamic=True, capture=capture)
    for size in (2, 3, 7, 59, 60, 61, 80):
        x = torch.ones(size, dtype=torch.float64)
        torch.testing.assert_close(program_compiled(x), program(x), rtol=0, atol=0)
