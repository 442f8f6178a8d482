"""Lists of more than one tensor for each part, and what a loop reads by the number of the part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.sequences.comparing import WIDTH, Program, assert_eager_modes, batches

pytestmark = pytest.mark.usefixtures("capture_flags")

SIZES = ([3, 4, 2], [2, 5, 1, 3], [4, 2, 3, 1, 2], [3, 6, 2, 2, 2, 5])


def lists_and_tuples(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    items = []
    for part, other in zip(x.split(lengths.tolist()), y.split(lengths.tolist()), strict=True):
        items.append([part.sort(0).values, (other.cumsum(0), part.shape[0] + 1), "name", None])
    return torch.cat([a * b / n + (1 if name == "name" else 2) for a, (b, n), name, _ in items])


def items_that_change(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    items = [[part.sort(0).values] for part in x.split(lengths.tolist())]
    made = []
    for item in items:
        item.append(1)  # type: ignore[arg-type]
        made.append(item[0] * len(item))
    return torch.cat(made)


def products_of_parts(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    products = [part @ part.T for part in x.split(lengths.tolist())]
    return torch.stack([each.softmax(-1).sort().values.square().sum() for each in products])


def every_second_row(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    halves = [part[::2] for part in x.split(lengths.tolist())]
    return pad_sequence([half.cumsum(0) for half in halves], batch_first=True)


def padded_to_the_longest(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes = lengths.tolist()
    longest = max(sizes)
    return torch.stack([F.pad(part, (0, 0, 0, longest - part.shape[0])) for part in x.split(sizes)])


def enumerated(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes, made = lengths.tolist(), []
    doubled = [size * 2 for size in sizes]
    for i, (part, size) in enumerate(zip(x.split(sizes), sizes, strict=True)):
        made.append(part.sort(0).values * (size + sizes[i]) + doubled[i] * lengths[i])
    return torch.cat(made), torch.stack([part.amax(0) * i for i, part in enumerate(x.split(sizes), 3)])


def the_part_before(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes = lengths.tolist()
    return torch.cat([part.sort(0).values * sizes[i - 1] for i, part in enumerate(x.split(sizes))])


def crops(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    """Images of two sizes each, their positions, and a loop over them as one sequence, as in Pixtral and Mistral 3."""
    count = lengths.shape[0]
    images = (x[:count, None, :, None] * w[None, :3, :, None]).expand(count, 3, WIDTH, 7)
    sizes = torch.stack([lengths.clamp(2, 6), lengths.clamp(2, 5) + 1], 1)
    cropped = [image[..., : size[0] // 1, : size[1] // 1] for image, size in zip(images, sizes, strict=True)]
    flat = torch.cat([crop.flatten(1).T for crop in cropped])
    positions = []
    for crop in cropped:
        rows, columns = torch.meshgrid(torch.arange(crop.shape[-2]), torch.arange(crop.shape[-1]), indexing="ij")
        positions.append(torch.stack([rows.flatten(), columns.flatten()], -1))
    flat = flat * torch.cat(positions).sum(1, keepdim=True)
    counts = [crop.shape[-2] * crop.shape[-1] for crop in cropped]
    pairs = [(size[0] // 1, size[1] // 1) for size in sizes]
    merged = []
    for i, part in enumerate(flat.split([height * width for height, width in pairs])):
        height, width = pairs[i]
        merged.append(part.view(height, width, 3).transpose(0, 1).reshape(-1, 3) * (i + 1))
    return torch.cat(merged), torch.tensor(counts), max(counts), min(counts), sum(counts)


def numbers_of_the_batch(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes = lengths.tolist()
    return x * max(sizes) + min(sizes) * sum(sizes) + torch.tensor(sizes).sum(), max(sizes)


def rows_of_a_tensor(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    total: Any = 0.0
    for pair in torch.stack([lengths, lengths * 2], 1):
        total = total + (pair[0] * pair[1]).double()
    return torch.stack([row.sort().values for row in x]) * total


def a_recurrent_network(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    state, made = torch.zeros(WIDTH, dtype=x.dtype), []
    for row in x:
        state = torch.tanh(state @ w + row)
        made.append(state)
    return torch.stack(made)


# The first batch is unrolled, and so has a graph of its own, unless sizes are known to differ before it.
GRAPHS: dict[Program, int] = {
    crops: 1, lists_and_tuples: 2, enumerated: 2, numbers_of_the_batch: 1, items_that_change: 2, products_of_parts: 2,
    every_second_row: 2, rows_of_a_tensor: 1, padded_to_the_longest: 2,
}  # fmt: skip
UNROLLED = (the_part_before, a_recurrent_network)
QUICK = (crops, lists_and_tuples, enumerated)


@pytest.mark.parametrize(
    ("program", "graphs"),
    [pytest.param(*each, marks=() if each[0] in QUICK else pytest.mark.slow) for each in GRAPHS.items()],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_items_are_as_in_eager_mode_for_any_number_of_parts(program: Program, graphs: int) -> None:
    record = assert_eager_modes(program, batches(SIZES), "aot_eager", strict=True)
    assert len(record.graphs) == graphs


@pytest.mark.slow
@pytest.mark.parametrize("program", UNROLLED, ids=lambda program: program.__name__)
def test_loops_that_read_other_parts_are_unrolled(program: Program) -> None:
    record = assert_eager_modes(program, batches(SIZES), "aot_eager", strict=True)
    assert len(record.graphs) == len(SIZES) and "part by part" not in str(record)
