"""Numbers that a loop adds to from part to part, and what it writes with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.sequences.comparing import Program, assert_eager_modes, batches
from tests.support import ASSIGNS_SLICES

pytestmark = pytest.mark.usefixtures("capture_flags")

SIZES = ([3, 4, 2], [2, 5, 1, 3], [4, 0, 3, 1, 2], [3, 6, 2, 2, 2, 5], [1, 1])


def slices_by_running_sums(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made, start = [], 0
    for size in lengths.tolist():
        made.append(x[start : start + size].cumsum(0) @ w)
        start += size
    return torch.cat(made) * start


def a_block_mask(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    """As `generate_block_attention_mask` of transformers makes it."""
    mask = torch.full((x.shape[0], x.shape[0]), -1e9, dtype=x.dtype)
    start = 0
    for size in lengths.tolist():
        end = start + size
        mask[start:end, start:end] = 0
        start = end
    return (x @ w @ x.T + mask).softmax(-1) @ x


def two_numbers(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made, start, factor = [], 0, 1
    for size in lengths.tolist():
        made.append((x[start : start + size].sort(0).values * factor).sum(0))
        start += size
        factor += 2 * size
    return torch.stack(made) * start + factor


def the_number_of_the_part(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made, number = [], 0
    for rows, columns in torch.stack([lengths, lengths + 1], 1).tolist():
        made.append(torch.arange(rows) + columns * number)
        number += 1
    return x * torch.cat(made)[:, None], number


def writes_over_each_other(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made = torch.zeros(x.shape[0], 2, dtype=x.dtype)
    column, start = made[:, 1], 0
    for size in lengths.tolist():
        made[start:] = size + 1
        start += size
    return x * column[:, None]


def writes_to_the_batch(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    start = 0
    for size in lengths.tolist():
        targets[start : start + size] = size
        start += size
    return x * targets[:, None]


def a_padding_mask(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes = lengths.tolist()
    mask = torch.zeros(len(sizes), max(sizes), dtype=torch.bool)
    for i, size in enumerate(sizes):
        mask[i, :size] = True
    return mask.double().sum(1, keepdim=True) * w.sum()


def rows_and_a_mask(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    mask, made, start = torch.zeros(x.shape[0], dtype=x.dtype), [], 0
    for part in x.split(lengths.tolist()):
        mask[start : start + part.shape[0]] = start + 1.0
        made.append((part @ w).sort(0).values)
        start += part.shape[0]
    return torch.cat(made) * mask[:, None]


def in_a_checkpoint(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    def layer(x: Tensor) -> Tensor:
        made, start = [], 0
        for size in lengths.tolist():
            made.append(torch.sin(x[start : start + size] @ w).sort(0).values)
            start += size
        return torch.cat(made)

    return checkpoint(layer, x, use_reentrant=False) + y


def skips_empty_parts(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made, start = [], 0
    for size in lengths.clamp(min=1).tolist():
        if size == 0:
            continue
        made.append(x[start : start + size].sort(0).values)
        start += size
    return torch.cat(made)


# Decoys


def reads_what_it_writes(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made, start = torch.zeros(x.shape[0], dtype=x.dtype), 0
    for size in lengths.tolist():
        made[start : start + size] = made.sum() + 1
        start += size
    return x * made[:, None]


def adds_in_place(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made, start = torch.zeros(x.shape[0], dtype=x.dtype), 0
    for size in lengths.tolist():
        made[start:] += 1
        start += size
    return x * made[:, None]


def writes_rows_with_gradients(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made, start = torch.zeros_like(x), 0
    for part in x.split(lengths.tolist()):
        made[start : start + part.shape[0]] = part.cumsum(0)
        start += part.shape[0]
    return made @ w


def from_the_end(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made, end = [], x.shape[0]
    for size in lengths.tolist():
        made.append(x[end - size : end].cumsum(0))
        end -= size
    return torch.cat(made)


def a_product(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made, factor = [], 1
    for part in x.split(lengths.tolist()):
        made.append(part.sum(0) * factor)
        factor = factor * 2
    return torch.stack(made)


def the_first_part_differs(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made, start = [], 0
    for part in x.split(lengths.tolist()):
        made.append(part.sum(0) if start == 0 else part.prod(0))
        start += part.shape[0]
    return torch.stack(made)


def a_number_from_activations(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made, number = [], 0
    for part, other in zip(x.split(lengths.tolist()), y.split(lengths.tolist()), strict=True):
        made.append(part.sum(0) * number)
        number += int(other.sum().abs())
    return torch.stack(made)


def decides_for_each_part(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    """As LLaVA-NeXT, which cuts each image by its own aspect ratio."""
    return torch.stack([part.amax(0) if part.shape[0] > 2 else part.sum(0) for part in x.split(lengths.tolist())])


CARRIED = (
    slices_by_running_sums, a_block_mask, two_numbers, the_number_of_the_part, writes_over_each_other,
    writes_to_the_batch, a_padding_mask, rows_and_a_mask, in_a_checkpoint, skips_empty_parts,
)  # fmt: skip
DECOYS = (
    reads_what_it_writes, adds_in_place, writes_rows_with_gradients, from_the_end, a_product, the_first_part_differs,
    a_number_from_activations,
)  # fmt: skip
WRITES = (a_block_mask, writes_over_each_other, writes_to_the_batch, a_padding_mask, rows_and_a_mask)
QUICK = (a_block_mask, two_numbers, reads_what_it_writes)


def _marked(programs: tuple[Program, ...]) -> Any:
    return [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow, id=one.__name__) for one in programs]


@pytest.mark.parametrize("program", _marked(CARRIED))
def test_numbers_are_carried_for_any_number_of_parts(program: Program) -> None:
    record = assert_eager_modes(program, batches(SIZES), "aot_eager", strict=True)
    if program not in WRITES or ASSIGNS_SLICES:
        assert len(record.graphs) == 2 and "part by part" in str(record.graphs[-1])


@pytest.mark.parametrize("program", [rows_and_a_mask, in_a_checkpoint], ids=lambda program: program.__name__)
def test_gradients_without_functionalization(program: Program) -> None:
    """Autograd checks what is written after the operator has saved it, and that checkpoints are read once."""
    record = assert_eager_modes(program, batches(SIZES[:3]), "eager", strict=True)
    assert "part by part" in str(record.graphs[-1]) or (program in WRITES and not ASSIGNS_SLICES)


@pytest.mark.filterwarnings("ignore:fxpasses")
@pytest.mark.parametrize("program", _marked(DECOYS))
def test_what_depends_on_the_parts_before_is_unrolled(program: Program) -> None:
    record = assert_eager_modes(program, batches(SIZES), "aot_eager")
    assert len(record.graphs) >= len(SIZES) and "part by part" not in str(record)


def test_a_question_about_each_part_breaks_the_graph_once_the_number_of_parts_has_changed() -> None:
    with pytest.warns(UserWarning, match=r"test_carried.py:\d+ asks for a number of each part of a batch"):
        record = assert_eager_modes(decides_for_each_part, batches(SIZES[:3]), "aot_eager")
    assert "1 loop over parts of the batch traced once" not in str(record)
