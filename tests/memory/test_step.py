"""The memory of a step, from what its pieces need; and how much a device has."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.memory import limits
from fxpasses.memory.footprint import Footprint
from fxpasses.memory.recompute import RATIOS, effort, least_recomputing, saving_more
from fxpasses.memory.step import Call, Need, Step, max_of, needs, peak


def piece(kept: int, forward: int, backward: int, result: int = 0, gradient: int = 0, **more: Any) -> Footprint:
    """A piece of (x, w) -> y that saves nothing of these unless `more` says so."""
    return Footprint(kept, forward, (result,), gradients={1: gradient}, backward=lambda shared: backward, **more)


def chain(*pieces: str, layers: str = "") -> list[Call]:
    names = ["x", *(f"y{number}" for number in range(len(pieces)))]
    found = zip(pieces, itertools.pairwise(names), strict=True)
    return [Call(name, (x, f"w{at}"), (y,), name in layers) for at, (name, (x, y)) in enumerate(found)]


EMBED, LAYER, HEAD = piece(1, 3, 4, 0, 20), piece(10, 15, 14, 0, 2), piece(5, 30, 9, 0, 1)
BY_NAME = {"e": EMBED, "l": LAYER, "h": HEAD}


def of(names: str, **more: Any) -> int:
    return peak([(call, BY_NAME[call.piece]) for call in chain(*names)], **more)


def test_the_peak_is_in_forward_or_in_backward() -> None:
    assert of("") == 0
    assert of("l") == 15
    assert of("lll") == 35  # the third forward, after what two have kept; backward: 34, 24 + 2, 14 + 4
    assert of("ellh") == 51  # the head's forward: 1 + 10 + 10 + 30
    BY_NAME["s"] = piece(1, 1, 40, 0, 2)
    assert of("ess") == 43  # backward of the first of two: 1 + 40 + 2
    assert of("ess", has_gradients=True) == 42


def test_a_result_is_there_once_however_many_save_it() -> None:
    """Each call returns 100 bytes, which it saves, and which the next call saves; that makes no difference."""
    saves = {"saved_operands": frozenset({0}), "saved_results": frozenset({0})}
    both = piece(0, 100, 7, 100, **saves)
    first, last = piece(0, 100, 7, 100, saved_results=frozenset({0})), piece(0, 1, 7, saved_operands=frozenset({0}))
    calls = chain("first", "both", "both", "last")
    assert peak(list(zip(calls, [first, both, both, last], strict=True))) == 307
    without = piece(0, 100, 7, 100, saved_operands=frozenset({0}))
    assert peak(list(zip(calls, [piece(0, 100, 7, 100), without, without, last], strict=True))) == 301
    assert peak(list(zip(calls, [piece(0, 100, 7, 100)] * 4, strict=True))) == 200  # nothing is saved
    assert peak(list(zip(calls, [piece(0, 100, 7, 100)] * 4, strict=True)), frozenset({"y0"})) == 300  # y0 is returned


def test_what_a_later_call_reads_lives_until_then() -> None:
    calls = [
        Call("a", ("x",), ("y",)),
        Call("b", ("y",), ("z",)),
        Call("b", ("z",), ("u",)),
        Call("c", ("u", "y"), ("v",)),
    ]
    big, small = Footprint(0, 100, (100,)), Footprint(0, 10, (10,), backward=lambda shared: 10)
    assert peak(list(zip(calls, [big, small, small, small], strict=True))) == 120  # y, z and u; y's gradient waits


def test_a_weight_that_several_calls_take_has_one_gradient() -> None:
    calls = [Call("l", ("x", "w"), ("y",)), Call("l", ("y", "w"), ("z",))]
    assert peak([(call, piece(0, 0, 50, 0, 30)) for call in calls]) == 80


def test_a_gradient_that_is_added_to_another_waits_for_other_calls() -> None:
    """As of an embedding whose weight the head has as well: before, it counted only while there was none."""
    calls = [Call("e", ("i", "w"), ("x",)), Call("l", ("x", "v"), ("y",)), Call("h", ("y", "w"), ("z",))]
    pieces = [piece(0, 0, 30, 0, 30), piece(0, 0, 50, 0, 4), piece(0, 0, 30, 0, 30)]
    tied = list(zip(calls, pieces, strict=True))
    assert peak(tied) == peak(tied, has_gradients=True) == 80
    assert [each.of_gradients for each in needs(tied, has_gradients=True)] == [0, 0, 0, 0, 30, 30]
    assert [each.of_gradients for each in needs(tied)] == [0, 0, 0, 0, 30, 34]


def test_layers_that_are_not_partitioned_are_taken_to_be_like_the_largest() -> None:
    calls = chain("first", "a", "b", "a", "b", "last", layers="ab")
    step = Step(budget=0, before=100, calls=calls)
    assert step.peak() == 100
    assert step.peak({"a": LAYER}) == 100 + of("llll")
    step.footprints |= {"a": LAYER, "last": HEAD}
    assert step.peak() == 100 + of("llllh")
    assert step.peak({"b": piece(1, 2, 3)}) == 100 + 22 + 30
    assert step.peak(larger=2) == 100 + 2 * of("llllh")  # before the first gradients


def test_gradients_do_not_grow_with_the_batch() -> None:
    """The most is at the end of backward for a small batch, at its start for a large one."""
    found = [Need(10, 0), Need(1, 50)]
    assert [max_of(found, larger) for larger in (1, 2, 20)] == [51, 52, 200]


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

    assert least_recomputing(at, lambda found: found, most, range(6))[:2] == (expected, peaks[expected])
    assert len(tried) <= tries


@pytest.fixture
def in_use() -> None:
    """What the process really uses, and not what other tests set."""


def test_what_a_process_may_use(in_use: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    before = limits.in_use(cpu)
    with mmap.mmap(-1, 64 << 20) as held:  # not from what the C library keeps
        held.write(bytes(64 << 20))
        assert limits.in_use(cpu) - before >= 60 << 20
    all_of_it = limits.available(cpu)
    assert all_of_it is not None and all_of_it > 1 << 20
    for path, text in {"memory.max": "max\n", "job/memory.max": "1000000\n"}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr(limits, "_OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/job\n")
    assert limits.available(cpu) == 1000000
    (tmp_path / "own").write_text("0::/job/step/task\n")  # the groups inside have no limits of their own
    assert limits.available(cpu) == 1000000
    (tmp_path / "own").unlink()  # as on systems without such groups
    machine = limits.available(cpu)
    assert machine is not None and all_of_it <= machine == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert limits.in_use(torch.device("meta")) == 0 and limits.available(torch.device("meta")) is None


def test_what_takes_longest_to_recompute_is_saved_first() -> None:
    """Where PyTorch's solver drops everything from one ratio to the next, part of it is saved again."""
    x = torch.randn(64, 64)

    def values(x: Tensor) -> tuple[Tensor, ...]:
        product = x @ x
        wide = product.repeat(1, 4)
        sine = x.sin()
        return product, wide, sine

    everything = make_fx(values)(x)
    names = [node.name for node in everything.graph.output_node().all_input_nodes]
    tried: list[list[str]] = []

    def at(ratio: float, saving: Collection[str]) -> Any:
        tried.append(sorted(saving))
        return everything, frozenset(saving)

    def fits(most: int) -> Any:
        return lambda found: sum(4 if name == names[1] else 1 for name in found[1]) <= most

    none = everything, everything
    found: dict[int, Any] = {most: saving_more(at, fits(most), 0.5, none, none, 10) for most in (0, 1, 2, 6)}
    assert found[0] is none  # nothing fits besides
    assert found[1][1] == {names[0]} and found[2][1] == {names[0], names[2]} and found[6][1] == set(names)
    tried.clear()
    assert found[6][1] > saving_more(at, fits(6), 0.5, none, none, 1)[1] and len(tried) == 1  # type: ignore[operator]


def test_the_larger_a_graph_the_fewer_partitions_it_may_have() -> None:
    found = [effort(nodes) for nodes in (0, 200, 600, 2_000, 10**6)]
    assert found == sorted(found, key=lambda each: each.partitions, reverse=True)
    assert found[1].partitions >= 60 and found[-1].partitions == 8  # a layer's are as good as without a limit
    assert found[2].ratios == RATIOS and found[-1].ratios == (1.0, 0.8, 0.6, 0.4, 0.2, 0.05)
