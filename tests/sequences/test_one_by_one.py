"""Loops over parts for which there is no rule run part by part, for any number of parts, once that has changed."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fxpasses.sequences.one_by_one import Body, Input, Result, loop_over_parts, register
from tests.sequences.comparing import FEW, SEVERAL, WIDTH, Program, assert_eager_modes, batches
from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")


# Bodies of rows


def a_convolution(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    kernel = w[:, :, None].expand(-1, -1, 3)
    return torch.cat([F.conv1d(part.T[None], kernel, padding=1)[0].T for part in x.split(lengths.tolist())])


def the_first_and_the_largest(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes = lengths.tolist()
    return torch.stack([part[0] + part.amax(0) * size for part, size in zip(x.split(sizes), sizes, strict=True)])


def writes_to_its_own_memory(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    total: Any = 0
    rows = []
    for part in x.split(lengths.tolist()):
        found = part @ w
        found[0] = 1
        found.mul_(part.sort(0).values)
        rows.append(found)
        total = total + found.sum()
    return torch.cat(rows) * total


def results_of_other_sizes(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    halves, heads = [], []
    for part in x.split(lengths.tolist()):
        halves.append(part[::2] @ w)
        heads.append(part.cumsum(0))
    return torch.cat(halves), torch.cat([part * 2 for part in heads]), pad_sequence(heads)


def two_divisions(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    pairs = zip(x.split(lengths.tolist()), y.split(lengths.flip(0).tolist()), strict=True)
    return torch.stack([one.amax(0) * other.mean(0) for one, other in pairs])


# Of the sizes of images


def grids(lengths: Tensor) -> Tensor:
    """Heights and widths, of as many patches as there are rows."""
    return torch.stack([lengths, torch.ones_like(lengths)], 1)


def images(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    merged = []
    for part, (height, width) in zip(x.split(grids(lengths).prod(1).tolist()), grids(lengths).tolist(), strict=True):
        merged.append(part.view(height, width, -1).transpose(0, 1).reshape(height, -1) @ w)
    return torch.cat(merged)


def interpolated_positions(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    table = w.view(1, WIDTH, 2, 3)
    made = [
        F.interpolate(table, size=(height, width), mode="bilinear").flatten(2)[0].T
        for height, width in grids(lengths).tolist()
    ]
    return torch.cat(made) * x


def elements_of_a_tensor(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    merged = []
    for part, grid in zip(x.split(lengths.tolist()), grids(lengths), strict=True):
        height, width = grid
        merged.append(part.reshape(height, width, 2, -1).transpose(1, 2).reshape(height * width, WIDTH))
    return torch.cat(merged) @ w


def positions(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return x * torch.cat([torch.arange(size) for size in lengths.tolist()])[:, None]


PROGRAMS = [
    a_convolution, the_first_and_the_largest, writes_to_its_own_memory, results_of_other_sizes, two_divisions, images,
    interpolated_positions, elements_of_a_tensor, positions,
]  # fmt: skip
QUICK = {writes_to_its_own_memory, results_of_other_sizes, images}
SIZES = [[size or 1 for size in of] for of in SEVERAL]


@pytest.mark.parametrize(
    "program",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in PROGRAMS],
    ids=lambda program: program.__name__,
)
def test_a_body_without_a_rule_is_one_graph_more_for_all_numbers_of_parts(program: Program) -> None:
    record = assert_eager_modes(program, batches(SIZES), "aot_eager")
    assert len(record.graphs) == 2
    assert "runs part by part" in str(record.graphs[-1])


def test_a_body_without_a_rule_is_unrolled_while_the_number_of_parts_stays() -> None:
    record = assert_eager_modes(a_convolution, batches([[3, 4, 2], [5, 1, 3], [2, 2, 8]]))
    assert len(record.graphs) == 1
    assert "part by part" not in str(record.graphs[0])


# What is unrolled as before


def dropout(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat([F.dropout(part.cumsum(0), 0.5) for part in x.split(lengths.tolist())])


def writes_to_the_batch(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    rows, seen = [], torch.zeros(WIDTH, dtype=x.dtype)
    for part in x.split(lengths.tolist()):
        seen += part[0].detach()
        rows.append(part.cumsum(0) * seen.clone())
    return torch.cat(rows)


def a_number_that_decides(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    rows = []
    for part, (height, _) in zip(x.split(lengths.tolist()), grids(lengths).tolist(), strict=True):
        rows.append(part.cumsum(0) if height > 2 else part)
    return torch.cat(rows)


def a_sum_of_positions(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    rows, start = [], 0
    for height, width in grids(lengths).tolist():
        rows.append(x[start : start + height * width].cumsum(0))
        start += height * width
    return torch.cat(rows)


def results_that_are_read(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    rows = [part.cumsum(0) for part in x.split(lengths.tolist())]
    return rows[0], torch.cat(rows)


@pytest.mark.parametrize(
    "program",
    [
        a_number_that_decides,
        results_that_are_read,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (dropout, writes_to_the_batch, a_sum_of_positions)),
    ],
    ids=lambda program: program.__name__,
)
def test_a_body_that_cannot_run_by_itself_is_as_in_eager_mode(program: Program) -> None:
    record = assert_eager_modes(program, batches([[size or 1 for size in of] for of in FEW]))
    assert "part by part" not in str(record.graphs)


@pytest.mark.slow
def test_a_defect_where_a_body_is_to_run_part_by_part_leaves_it_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr("fxpasses.sequences.capture.bodies.Operand.write", fail)
    program = torch.compile(a_convolution, backend="fastpack", options={"fastpack.lowering": "eager"})
    first, second = batches([[3, 4], [2, 5, 3]])
    program(*first)
    with pytest.warns(UserWarning, match="loops over parts.*a defect"):
        actual = program(*second)
    torch.testing.assert_close(actual, a_convolution(*second))


def test_an_error_of_a_part_is_eager_modes() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([part[1] + part.amax(0) for part in x.split(lengths.tolist())])

    assert_eager_modes(program, batches([[3, 4], [2, 5, 3], [2, 1, 4, 2]]))


# The operator


def body(autocast: Any = ()) -> str:
    """Rows of a part times w, and its first row."""

    def function(part: Tensor, w: Tensor, size: int) -> tuple[Tensor, ...]:
        return part @ w * size, part.amax(0)

    inputs = Input("part", 1, 0, 0), Input("whole", 2), Input("size", 0)
    like = torch.float64, torch.device("cpu")
    rows, largest = Result(((1, 0), (2, 1)), *like, 0), Result(((0, 0), (1, 1)), *like, None)
    return register(Body(function, inputs, (rows, largest), autocast))


def test_the_operator_is_one_of_pytorch() -> None:
    batch = batches([[3, 1, 5]])[0]
    torch.library.opcheck(loop_over_parts, (body(), [batch.lengths, batch.x, batch.w], []), {})


def test_backward_keeps_the_activations_of_one_part_alone() -> None:
    alive: list[int] = []
    made: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def function(part: Tensor) -> tuple[Tensor, ...]:
        gc.collect()
        alive.append(len(made))
        found = part.exp()
        made.add(found)
        return (found,)

    result = Result(((1, 0), (1, 1)), torch.float64, torch.device("cpu"), 0)
    name = register(Body(function, (Input("part", 1, 0, 0),), (result,), ()))
    batch = batches([[2, 3, 4, 1]])[0]
    (y,) = loop_over_parts(name, [batch.lengths, batch.x], [])
    alive.clear()
    y.sum().backward()
    assert max(alive) <= 1


@pytest.mark.slow
def test_autocast_reaches_the_body() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.cat([(part.float() @ w.float()).cumsum(0) for part in x.split(lengths.tolist())])

    with warnings.catch_warnings():
        record = assert_eager_modes(program, batches(SIZES), "aot_eager")
    assert "part by part" in str(record.graphs[-1])


# Found by trying to break it: each gave wrong numbers, or an error


def assigns_to_its_part(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    copied, rows = x.detach() * 1, []
    for part in copied.split(lengths.tolist()):
        part[0] = part[0] * 2 + 1
        rows.append(part.cumsum(0) @ w)
    return torch.cat(rows), copied


def assigns_to_a_sum(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    seen, rows = torch.zeros(WIDTH, dtype=x.dtype), []
    for part in x.split(lengths.tolist()):
        seen[:] = seen + part.detach().amax(0)
        rows.append(part.cumsum(0) * 2)
    return torch.cat(rows), seen


def complex_numbers(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    rows = torch.cat([torch.view_as_complex(part.view(-1, 3, 2)).cumsum(0) for part in x.split(lengths.tolist())])
    return torch.view_as_real(rows)


def squeezes(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.stack([part.amax(1).squeeze(0).sum() for part in x.split(lengths.tolist())])


def adds_parts_of_other_sizes(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    pairs = zip(x.split(lengths.tolist()), y.split(lengths.flip(0).tolist()), strict=True)
    return torch.cat([one.cumsum(0) + other[:1] for one, other in pairs])


def values_again(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    largest = [part.amax(0) for part in x.split(lengths.tolist())]
    return torch.stack([value.sort().values @ w for value in largest])


def calls_a_checkpoint(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    def body(part: Tensor) -> Tensor:
        return part.cumsum(0) @ w

    parts = x.split(lengths.tolist())
    return torch.cat([torch.utils.checkpoint.checkpoint(body, part, use_reentrant=False) for part in parts])


def is_written_to_later(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    copied, first = x * 1, y[0] * 1
    rows = [part.cumsum(0) + first for part in copied.split(lengths.tolist())]
    copied.mul_(3)
    first.add_(1)
    return torch.cat(rows), copied, first


def sums_of_small_integers(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return sum([part.amax(0).int() for part in x.split(lengths.tolist())])


def no_gradients(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat([part.detach().cumsum(0) for part in x.split(lengths.tolist())]), x * 2


def parts_of_one_row(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat([part * (2 if part.cumsum(0).squeeze(0).dim() == 2 else 3) for part in x.split(lengths.tolist())])


def parts_that_broadcast(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    ones = torch.where(lengths > 2, 1, lengths)
    pairs = zip(x[: ones.sum()].split(ones.tolist()), y.split(lengths.tolist()), strict=True)
    sums = [one + other.cumsum(0) for one, other in pairs]
    return torch.stack([part.amax(0) for part in sums])


def a_certain_size(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat(
        [part.cumsum(0) * part.shape[0] + w[:1] for part in x.split(lengths.tolist()) if part.shape[0] > 0]
    )


def a_number_of_the_part(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat([part.cumsum(0) * part.detach().sum().item() for part in x.split(lengths.tolist())])


FOUND = [
    parts_that_broadcast, assigns_to_its_part, parts_of_one_row, a_certain_size, a_number_of_the_part,
    is_written_to_later, assigns_to_a_sum, complex_numbers, squeezes, adds_parts_of_other_sizes, values_again,
    calls_a_checkpoint, sums_of_small_integers, no_gradients,
]  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [pytest.param(one, marks=() if number < 2 else pytest.mark.slow) for number, one in enumerate(FOUND)],
    ids=lambda program: program.__name__,
)
def test_what_a_body_does_is_as_in_eager_mode(program: Program) -> None:
    assert_eager_modes(program, batches([[3, 4], [2, 5, 3], [1, 1, 2, 6]]), "aot_eager")


def test_numbers_of_the_next_batch_may_be_written_before_backward() -> None:
    ours = compiled(a_convolution, "aot_eager")
    given = batches([[3, 4], [2, 5, 3], [4, 4, 2]])
    for x, y, w, lengths, targets in given:
        loss = ours(x, y, w, lengths, targets).sum()
        expected = a_convolution(x, y, w, lengths, targets).sum()
        lengths.zero_()
        torch.testing.assert_close(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, (x, w)))
