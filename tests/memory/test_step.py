"""The memory of a step, from what its pieces need; and how much a device has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxpasses.memory import limits
from fxpasses.memory.footprint import Footprint
from fxpasses.memory.recompute import least_recomputing
from fxpasses.memory.step import Step, peak

EMBED = Footprint(saved=1, forward=3, backward=4, gradients=20)
LAYER = Footprint(saved=10, forward=15, backward=14, gradients=2)
HEAD = Footprint(saved=5, forward=30, backward=9, gradients=1)


def test_the_peak_is_in_forward_or_in_backward() -> None:
    assert peak([]) == 0
    assert peak([LAYER]) == 15
    assert peak([LAYER] * 3) == 35  # the third forward, after what two have saved; backward: 34, 26, 18
    assert peak([EMBED, LAYER, LAYER, HEAD]) == 51  # the head's forward: 1 + 10 + 10 + 30
    assert peak([EMBED, *[Footprint(1, 1, 40, 2)] * 2]) == 43  # backward of the first of two: 1 + 40 + 2
    assert peak([EMBED, *[Footprint(1, 1, 40, 2)] * 2], has_gradients=True) == 42


def test_layers_that_are_not_partitioned_are_taken_to_be_like_the_largest() -> None:
    step = Step(budget=0, before=100, pieces=(("first", 1), ("a", 3), ("b", 2), ("last", 1)))
    assert step.peak() == 100
    assert step.peak(a=LAYER) == 100 + peak([Footprint(), *[LAYER] * 5, Footprint()])
    step.footprints |= {"a": LAYER, "last": HEAD}
    small = Footprint(1, 2, 3)
    assert step.peak() == 100 + peak([Footprint(), *[LAYER] * 5, HEAD])
    assert step.peak(b=small) == 100 + peak([Footprint(), *[LAYER] * 3, *[small] * 2, HEAD])


@pytest.mark.parametrize(
    ("peaks", "most", "expected", "tries"),
    [
        ([9, 8, 7, 6, 5, 4], 9, 0, 1),
        ([9, 8, 7, 6, 5, 4], 7, 2, 5),
        ([9, 8, 7, 6, 5, 4], 4, 5, 5),
        ([9, 8, 7, 6, 5, 6], 1, 4, 6),  # none fits: the lowest of all
    ],
)
def test_the_largest_ratio_that_fits(peaks: list[int], most: int, expected: int, tries: int) -> None:
    tried: list[float] = []

    def at(ratio: float) -> int:
        tried.append(ratio)
        return peaks[int(ratio)]

    assert least_recomputing(at, lambda found: found, most, range(6)) == (expected, peaks[expected], peaks[expected])
    assert len(tried) <= tries


def test_what_a_process_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    before = limits.in_use(cpu)
    held = torch.ones(32 << 20, dtype=torch.uint8)
    assert limits.in_use(cpu) - before >= 0.9 * held.nbytes > 0
    all_of_it = limits.available(cpu)
    assert all_of_it is not None and all_of_it > 1 << 20
    for path, text in {"memory.max": "max\n", "job/memory.max": "1000000\n"}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr(limits, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/job\n")
    assert limits.available(cpu) == 1000000
    (tmp_path / "own").unlink()  # as on systems without such groups
    assert limits.available(cpu) == pytest.approx(all_of_it, rel=10)
    assert limits.in_use(torch.device("meta")) == 0 and limits.available(torch.device("meta")) is None
