"""Programs that were found by trying to break loops over parts: each gave wrong numbers, lost an error, or failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpasses.sequences.one_by_one import Body, Input, Result, loop_over_parts, register
from tests.sequences.comparing import WIDTH, Batch, Program, assert_eager_modes, batches

pytestmark = pytest.mark.usefixtures("capture_flags")


def a_write_after_copies(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    """Each part in the second dimension is copied; the whole is contiguous already."""
    whole = torch.stack([x, y]).detach().clone()
    copies = [part.contiguous() for part in whole.split(lengths.tolist(), dim=1)]
    whole.mul_(2)
    return torch.cat(copies, 1)


def a_bias_of_the_part(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat([F.linear(part, w, part.sum(0)) for part in x.split(lengths.tolist())])


def a_counter_of_another_loop(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes, made, number = lengths.tolist(), [], 0
    for part in x.split(sizes):
        made.append(part.cumsum(0) * number)
        number += 1  # noqa: SIM113
    number = 0
    return torch.cat(made), torch.cat([part.sort(0).values for part in y.split(sizes)])


def no_dimensions(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sums = [(part @ w).sum() for part in x.split(lengths.tolist())]
    return torch.stack([each.squeeze(-1) + each.softmax(0) + each.mean(0) for each in sums])


def attention_to_others(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    keys = w.view(1, 1, WIDTH, WIDTH).expand(1, 2, -1, -1)
    queries = [part.view(1, 1, -1, WIDTH).expand(1, 2, -1, -1) for part in x.split(lengths.tolist())]
    return torch.cat([F.scaled_dot_product_attention(query, keys, keys) for query in queries], 2)


ONES = batches([[2, 0], [3, 0, 0], [0, 1, 1]])  # as many parts as rows


@pytest.mark.parametrize(
    ("program", "given"),
    [
        (a_write_after_copies, None),
        (a_bias_of_the_part, ONES),
        (a_counter_of_another_loop, None),
        pytest.param(no_dimensions, None, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_results_are_eager_modes(program: Program, given: list[Batch] | None) -> None:
    assert_eager_modes(program, given or batches([[3, 4, 2], [2, 5, 1, 3], [4, 2, 3, 1, 2]]), "aot_eager")


@pytest.mark.slow
def test_attention_without_dropout_draws_nothing() -> None:
    record = assert_eager_modes(attention_to_others, batches([[3, 4], [2, 5, 3], [1, 1, 2, 6]]), "aot_eager")
    assert len(record.graphs) == 2


def rows_that_a_mask_lacks(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    mask = torch.zeros(4, 10)
    for number, size in enumerate(lengths.tolist()):
        mask[number, :size] = 1
    return mask, x @ w


def an_error_that_is_caught(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    try:
        parts = x.split(lengths.tolist())
    except RuntimeError:
        parts = (x,)
    return torch.cat([part - part.mean(0) for part in parts])


def parts_that_are_only_counted(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return x * len(x.split(lengths.tolist()))


def a_sum_of_nothing(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    total: Any = 0
    for part in x.split(lengths.tolist()):
        total = total + part.sum(0)
    return total


def a_stack_of_nothing(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.stack([part.sum(0) for part in x.split(lengths.tolist())])


def too_short() -> Batch:
    (batch,) = batches([[2, 3, 4]])
    return batch._replace(lengths=torch.tensor([2, 3, 3]))


EMPTY = batches([[]])[0]._replace(lengths=torch.tensor([], dtype=torch.int64))


@pytest.mark.parametrize(
    ("program", "last"),
    [
        (rows_that_a_mask_lacks, batches([[4, 2, 3, 1, 2]])[0]),
        (an_error_that_is_caught, too_short()),
        (parts_that_are_only_counted, too_short()),
        (a_sum_of_nothing, EMPTY),
        pytest.param(a_stack_of_nothing, EMPTY, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_errors_and_empty_batches_are_eager_modes(program: Program, last: Batch) -> None:
    assert_eager_modes(program, [*batches([[3, 4, 2], [2, 5, 1, 3]]), last], strict=False)


def test_results_of_the_operator_have_the_strides_that_were_promised() -> None:
    """`cat` keeps the strides of images whose channels lie last."""

    def function(part: Tensor) -> tuple[Tensor, ...]:
        return (part.contiguous(memory_format=torch.channels_last),)

    sizes = ((1, 0), (1, 1), (1, 2), (1, 3))
    result = Result(sizes, torch.float64, torch.device("cpu"), 0)
    name = register(Body(function, (Input("part", 1, 0, 0),), (result,), ()))
    images = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    (found,) = loop_over_parts(name, [torch.tensor([2, 3]), images], [])
    assert found.is_contiguous()
    torch.testing.assert_close(found, images)
