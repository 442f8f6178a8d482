"""Functions that a loop calls for each part, and that ask what the parts answer differently."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.sequences.comparing import WIDTH, Program, assert_eager_modes, batches

pytestmark = pytest.mark.usefixtures("capture_flags")

SIZES = ([3, 4, 2], [2, 5, 1, 3], [4, 2, 3, 1, 2], [3, 6, 2, 2, 2, 5])
_seen: list[int] = []
_calls = 0


def resolution(height: int, width: int) -> tuple[int, int]:
    """The grid that fits an image best, as LLaVA-NeXT chooses it."""
    best, most = (1, 1), 0.0
    for rows, columns in ((2, 3), (3, 2), (3, 3)):
        scale = min(rows / height, columns / width)
        used = min(int(height * scale) * int(width * scale), height * width)
        if used > most:
            best, most = (rows, columns), used
    return best


def patches(size: Tensor) -> int:
    rows, columns = resolution(*size.tolist())
    return sum(1 for _ in range(rows * columns)) + 1


def unpadded(image: Tensor, size: Tensor) -> Tensor:
    """An image [C, H, W] without the padding that its size says, a view."""
    height, width = size.tolist()
    if width / height > image.shape[2] / image.shape[1]:
        padding = (image.shape[1] - int(round(height * (image.shape[2] / width), 7))) // 2
        return image[:, padding : image.shape[1] - padding]
    padding = (image.shape[2] - int(round(width * (image.shape[1] / height), 7))) // 2
    return image[:, :, padding : image.shape[2] - padding]


def images_of(x: Tensor, w: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Images of 2 to 10 patches, [n, 10, WIDTH], and their sizes, [n, 2]."""
    sizes = torch.stack([lengths + 1, lengths.flip(0) * 2 + 1], 1)
    return (x[: lengths.shape[0], None] * w.sum(0)).expand(-1, 10, -1) * torch.arange(1.0, 11.0)[
        :, None
    ].double(), sizes


def of_each_image(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    """As in LLaVA-NeXT: the first loop is over a tensor, and the last asks what all parts answer alike."""
    images, sizes = images_of(x, w, lengths)
    counts = [patches(size) for size in sizes]
    rows = torch.cat([image[:count] for image, count in zip(images, counts, strict=True)]) @ w
    features = torch.split(rows, counts)
    made = []
    for i, feature in enumerate(features):
        if feature.shape[0] > 1:
            height, width = resolution(*sizes[i].tolist())
            if np.prod(feature[1:].shape) % (height * width) != 0:
                raise ValueError("the patches are no grid")
            grid = feature[1:].view(height, width, WIDTH).permute(2, 0, 1)
            made.append(torch.cat([feature[:1], unpadded(grid, sizes[i]).flatten(1).T.cumsum(0)]))
    return torch.cat(made), torch.tensor([len(each) for each in made], dtype=features[0].dtype)


def a_function_of_numbers(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    made = []
    for part, size in zip(x.split(lengths.tolist()), lengths.tolist(), strict=True):
        rows, columns = resolution(size, 3)
        made.append(part.sort(0).values * rows + columns)
    return torch.cat(made)


def _by_size(part: Tensor, other: Tensor, scale: float = 1.0) -> Tensor:
    return part.flip(0) * other.sum() if part.shape[0] % 2 else (part - other).cumsum(0) * scale


def a_function_of_tensors(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes = lengths.tolist()
    pairs = zip(x.split(sizes), y.split(sizes), strict=True)
    return torch.cat([_by_size(part, other @ w, scale=0.5) for part, other in pairs])


def _by_value(part: Tensor) -> Tensor:
    return part[part[:, 0] > 0] if part.shape[0] % 2 else part[:1]


def rows_that_activations_choose(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat([_by_value(part * 2) for part in x.split(lengths.tolist())])


def _noted(size: int) -> int:
    _seen.append(size)
    global _calls
    _calls += 1
    return size if size % 2 else 1


def writes_a_global(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat([part * _noted(part.shape[0]) for part in x.split(lengths.tolist())])


def _drawn(part: Tensor) -> Tensor:
    return part * random.random() if part.shape[0] % 2 else part + torch.rand(())


def draws_random_numbers(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    random.seed(0)
    return torch.cat([_drawn(part) for part in x.split(lengths.tolist())])


def _ratio(size: int) -> float:
    return 0.5 if size % 2 else 2.0


def returns_a_float(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat([part * _ratio(part.shape[0]) for part in x.split(lengths.tolist())])


def _doubled(part: Tensor) -> Tensor:
    return part.mul_(2) if part.shape[0] % 2 else part


def writes_its_argument(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    whole = x * 1
    made = [_doubled(part).sum(0) for part in whole.split(lengths.tolist())]
    return torch.stack(made), whole


def _itself(part: Tensor) -> Tensor:
    return part if part.shape[0] % 2 else part[:1]


def writes_what_it_returns(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    whole = x * 1
    made = []
    for part in whole.split(lengths.tolist()):
        chosen = _itself(part)
        chosen.mul_(3)
        made.append(chosen.sum(0))
    return torch.stack(made), whole


def _constant(part: Tensor) -> Tensor:
    return part.detach() if part.shape[0] % 2 else part.detach() * 2


def without_a_gradient(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat([_constant(part) for part in x.split(lengths.tolist())])


CALLED = (of_each_image, a_function_of_numbers, a_function_of_tensors, rows_that_activations_choose)
DECOYS = (
    writes_a_global, draws_random_numbers, returns_a_float, writes_its_argument, writes_what_it_returns,
    without_a_gradient,
)  # fmt: skip


@pytest.mark.parametrize("program", CALLED, ids=lambda program: program.__name__)
def test_a_function_that_decides_for_each_part_is_called(program: Program) -> None:
    record = assert_eager_modes(program, batches(SIZES), "aot_eager", strict=True)
    assert len(record.graphs) == 1 and "decides for each part" in str(record)


@pytest.mark.filterwarnings("ignore:fxpasses")
@pytest.mark.parametrize("program", DECOYS, ids=lambda program: program.__name__)
def test_other_functions_are_traced(program: Program) -> None:
    seen = len(_seen)
    record = assert_eager_modes(program, batches(SIZES), "aot_eager", strict=True)
    assert "decides for each part" not in str(record)
    assert program is not writes_a_global or len(_seen) - seen == 2 * sum(map(len, SIZES))
