"""`mask[rows, cols]` with tuples of integer tensors: one graph, with eager mode's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import assert_same, compiled, host_reads, results

pytestmark = pytest.mark.usefixtures("capture_flags")

PAIRS = torch.tensor([[0, 1], [2, 3], [3, 0], [2, 3]])
X = torch.linspace(-1, 2, 16).view(4, 4).requires_grad_()


def assigned(x: Tensor, pairs: Tensor) -> Tensor:
    """As UDOP marks the patches of an image that lie in a box of text."""
    inside = torch.zeros_like(x, dtype=torch.bool)
    rows, cols = zip(*pairs, strict=True)
    inside[rows, cols] = True
    return x.masked_fill(inside, 0.5)


def read(x: Tensor, pairs: Tensor) -> Tensor:
    rows, cols = zip(*pairs, strict=True)
    return x[rows, cols] * 2


def a_list_beside_a_slice(x: Tensor, pairs: Tensor) -> Tensor:
    return x[:, list(pairs[:, 1])] + x[None, tuple(pairs[:, 0])].squeeze(0)


def in_rows_of_a_view(x: Tensor, pairs: Tensor) -> Tensor:
    y = x.clone()
    y[1:][[pairs[0, 1]], [pairs[3, 0], pairs[0, 0]]] += 1
    return y


@pytest.mark.parametrize("program", [assigned, read, a_list_beside_a_slice, in_rows_of_a_view])
def test_one_graph(program: Any) -> None:
    batches = [(X, PAIRS), (X, PAIRS.flip(0) % 3)]
    record = assert_same(program, batches, "aot_eager", fullgraph=True)
    assert len(record.graphs) == 1


def test_nothing_is_read() -> None:
    program = compiled(assigned, "aot_eager", fullgraph=True)
    results(program, (X, PAIRS))
    assert host_reads(lambda: results(program, (X, PAIRS))) == 0
    assert host_reads(lambda: results(assigned, (X, PAIRS))) > 0


def test_a_tuple_that_is_itself_the_index_is_stocks() -> None:
    """It means `x[i, j]`."""

    def program(x: Tensor, pairs: Tensor) -> Tensor:
        return x[tuple(pairs[1])].sin()

    assert_same(program, [(X, PAIRS)], "aot_eager")
