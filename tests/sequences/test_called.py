"""Functions that a loop calls for each part, and that ask what the parts answer differently."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fxpasses.sequences import one_by_one
from fxpasses.sequences.capture.kinds import NotPure, Several, View, kinds_of
from fxpasses.sequences.capture.kinds import Tensor as KindOfTensor
from fxpasses.sequences.capture.pure_functions import results_of
from tests.sequences.comparing import WIDTH, Program, assert_eager_modes, batches

pytestmark = pytest.mark.usefixtures("capture_flags")

SIZES = ([3, 4, 2], [2, 5, 1, 3], [4, 2, 3, 1, 2], [3, 6, 2, 2, 2, 5])
_seen: list[int] = []


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
    height, width = size.tolist()
    rows, columns = resolution(height, width)
    count = 1
    for _ in range(rows * columns):
        count += 1
    return count


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


def _half(part: Tensor, least: int = 1) -> Tensor:
    return part[: max(part.shape[0] // 2, least)] if part.shape[0] % 2 else part[:, 1:]


def a_slice_of_activations(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes = lengths.tolist()
    pairs = zip(x.split(sizes), y.split(sizes), strict=True)
    return torch.stack([_half(part * 2).sum() * _half(other @ w, least=2).sum() for part, other in pairs])


def all_parts_alike(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    """The parts of the first batches answer alike, and those of the last do not."""
    made = []
    for part, size in zip(x.split(lengths.tolist()), lengths.tolist(), strict=True):
        rows, columns = resolution(size, 3)
        made.append(part.cumsum(0) if rows * columns * size < 50 else part.cumprod(0))
    return torch.cat(made)


def parts_by_number(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    sizes = [size + resolution(size, 3)[0] - resolution(size, 3)[0] for size in lengths.tolist()]
    parts = x.split(sizes)
    made = torch.cat([part.sort(0).values for part in parts])
    return made * parts[1].sum() + parts[0].shape[0], parts[1] is parts[1]


def writes_a_slice(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    whole = x * 1
    made = []
    for part in whole.split(lengths.tolist()):
        chosen = _half(part)
        chosen.mul_(3)
        made.append(chosen.sum())
    return torch.stack(made), whole


def _noted(size: int) -> int:
    _seen.append(size)
    return size if size % 2 else 1


def notes_each_size(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    return torch.cat([part * _noted(part.shape[0]) for part in x.split(lengths.tolist())])


def _doubled(part: Tensor) -> Tensor:
    return part.mul_(2) if part.shape[0] % 2 else part


def writes_its_argument(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
    whole = x * 1
    made = [_doubled(part).sum(0) for part in whole.split(lengths.tolist())]
    return torch.stack(made), whole


CALLED = (of_each_image, a_function_of_numbers, a_slice_of_activations, parts_by_number)
DECOYS = (writes_a_slice, notes_each_size, writes_its_argument)


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
    assert program is not notes_each_size or len(_seen) - seen == 2 * sum(map(len, SIZES))


def test_an_error_in_sharing_numbers_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(tensor: Tensor) -> bytes:
        raise ValueError("on purpose")

    monkeypatch.setattr(one_by_one, "_bytes_of", fails)
    with pytest.warns(UserWarning, match=r"on purpose.*They are computed once more") as warned:
        assert_eager_modes(a_function_of_numbers, batches(SIZES), "aot_eager")
    assert len([each for each in warned if "on purpose" in str(each.message)]) == 1


@pytest.mark.filterwarnings("ignore:fxpasses")
def test_what_all_parts_answer_alike_is_guarded() -> None:
    record = assert_eager_modes(all_parts_alike, batches(([3, 4, 2], [2, 5, 3], [3, 9, 2])), "aot_eager", strict=True)
    assert len(record.graphs) >= 2 and "decides for each part" in str(record.graphs[0])


# Kinds


def of_a_tensor(image: Tensor, size: Tensor) -> Tensor:
    if image.shape[1] < 4 and isinstance(size, torch.Tensor):
        return image[:, :3]
    height = size.tolist()[0]
    while height > image.shape[1]:
        height //= 2
    return image[:height, 1 : image.size(1)]


def of_several(height: int, width: int, sizes: list[list[int]]) -> tuple[int, int]:
    best = None
    for rows, columns in sizes:
        if best is None or abs(rows - height) < abs(best[0] - height):
            best = (rows, columns)
    return math.ceil(best[0] / 2), round(best[1])  # type: ignore[index]


def none_or_a_number(height: int) -> int | None:
    return height if height > 2 else None


def a_float(height: int) -> float:
    return height / 2


def a_global(height: int) -> int:
    return height * len(_seen)


def a_tensor_of_its_own(image: Tensor) -> Tensor:
    return torch.zeros(image.shape[0])


def itself(image: Tensor) -> Tensor:
    return image if image.shape[0] > 2 else image[:1]


def an_element(image: Tensor) -> Tensor:
    return image[0]


def asks_values(image: Tensor) -> Tensor:
    return image[:1] if image.max() > 0 else image[:2]


def asks_for_a_gradient(image: Tensor) -> Tensor:
    return image[:1] if image.requires_grad else image[:2]


def appends(sizes: list[int]) -> int:
    sizes.append(1)
    return len(sizes)


def writes_an_element(sizes: list[int]) -> int:
    sizes[0] = 1
    return len(sizes)


def draws(height: int) -> int:
    return height + random.randint(0, 3)


def prints(height: int) -> int:
    print(height)
    return height


def shadows(height: int, max: Any = None) -> int:
    return max(height, 1)


def asks_identity(sizes: list[int]) -> int:
    return 1 if sizes is _seen else 2


def grows(height: int) -> int:
    found: Any = height
    for _ in range(height):
        found = (found, 1)
    return height


def asks_for_a_class(image: Tensor) -> Tensor:
    return image[:1] if isinstance(image, torch.nn.Parameter) else image[:2]


def a_name_in_a_comprehension(height: int) -> int:
    half = height / 2
    return sum(half for half in range(height)) if height > 5 else half  # type: ignore[return-value]


def leaves_a_loop(size: Tensor) -> Any:
    for number in size.tolist():
        if number > 1:
            break
    else:
        return 1
    return number / 2


def negates(image: Tensor) -> Tensor:
    return -image if image.shape[0] > 2 else image[:1]


def writes_a_copy_of_itself(image: Tensor) -> Tensor:
    changed = (+image).mul_(2)  # noqa: F841
    return image[:1]


def counts_from_one(size: Tensor) -> Any:
    for _, number in enumerate(size.tolist(), 1):
        if number > 1:
            return number / 2
    return 1


def has_an_effect_when_compared(height: int) -> int:
    return height if _seen.append(1) is None else 1  # type: ignore[func-returns-value]


def a_tuple_of_lists_by_default(height: int, found: Any = ([],)) -> int:
    return height + len(found[0])


def of_letters(height: int) -> Any:
    for letter in "ab":
        return letter
    return height


def of_a_size(image: Tensor) -> Any:
    sizes = image.shape
    return sizes[0] / 2 if isinstance(sizes, torch.Size) else 1


def returns_sizes(image: Tensor) -> Any:
    return image.shape


def a_generator(height: int) -> Any:
    return 1
    yield height  # type: ignore[unreachable]


def a_list_by_default(height: int, found: list[int] = []) -> int:  # noqa: B006
    return height + len(found)


def raises_what_it_reads(height: int) -> int:
    if height > 2:
        raise ValueError(_seen.append(1))  # type: ignore[func-returns-value]
    return height


def whose_code_is_anothers(height: int) -> int:
    return height


whose_code_is_anothers.__code__ = a_float.__code__


def _exits(height: int) -> int:
    if height > 2:
        sys.exit(1)
    return height


def calls_another(height: int) -> int:
    return _exits(height) + 1


IMAGE, SIZE = frozenset({KindOfTensor(0, 2, False)}), frozenset({KindOfTensor(1, 1, True)})
LIST = kinds_of([2, 3])


@pytest.mark.parametrize(
    ("function", "given", "expected"),
    [
        (of_a_tensor, [IMAGE, SIZE], View(KindOfTensor(0, 2, False), frozenset({0, 1}))),
        (of_several, [kinds_of(2), kinds_of(3), kinds_of([[1, 2], [3, 4]])], Several((kinds_of(1), kinds_of(1)))),
        *((function, [kinds_of(3)], None) for function in (
            none_or_a_number, a_float, a_global, draws, prints, shadows, calls_another, grows,
            of_letters, has_an_effect_when_compared, a_tuple_of_lists_by_default, a_generator, a_list_by_default,
            raises_what_it_reads, whose_code_is_anothers,
            a_name_in_a_comprehension, lambda height: height,
        )),
        *((function, [IMAGE], None) for function in (
            a_tensor_of_its_own, itself, an_element, asks_values, asks_for_a_gradient, asks_for_a_class,
            negates, writes_a_copy_of_itself, of_a_size, returns_sizes,
        )),
        *((function, [SIZE], None) for function in (leaves_a_loop, counts_from_one)),
        *((function, [LIST], None) for function in (appends, writes_an_element, asks_identity)),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)  # fmt: skip
def test_functions_of_numbers_are_told_from_others(function: Any, given: list[Any], expected: Any) -> None:
    if expected is not None:
        assert results_of(function, given, {}) == expected
        return
    with pytest.raises(NotPure):
        results_of(function, given, {})
