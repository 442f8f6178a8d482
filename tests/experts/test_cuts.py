"""Loops over rows that are sorted already and cut by slices: what makes them one program, and what must not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxpasses.inspect
from fxpasses.inspect.figures import figures
from tests.experts.layer import EXPERTS, WIDTH, Layer, Loop, check, level_of, written
from tests.support import ASSIGNS_SLICES, assert_same, compiled, events

pytestmark = pytest.mark.usefixtures("capture_flags")


Bounds = Callable[[list[int]], list[tuple[int, int]]]


def in_order(counts: list[int]) -> list[tuple[int, int]]:
    bounds, start = [], 0
    for count in counts:
        bounds.append((start, start + count))
        start = start + count
    return bounds


def assigned(bounds: Bounds) -> Any:
    """The rows sorted by expert, cut where `bounds` says, and the results put where the rows were."""

    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        order = idx.flatten().argsort(stable=True)
        rows = x[order // 2]
        y = torch.zeros_like(rows)
        counts = torch.bincount(idx.flatten(), minlength=EXPERTS).tolist()
        for e, (start, stop) in enumerate(bounds(counts)):
            y[start:stop] = rows[start:stop] @ layer.w[e]
        back = torch.empty_like(y)
        back[order] = y
        return (back.view(*idx.shape, -1) * weights.unsqueeze(-1)).sum(1)

    return loop


def test_slices_that_follow_one_another() -> None:
    assert level_of(check(assigned(in_order))) == (2 if ASSIGNS_SLICES else 0)


OTHER_BOUNDS: dict[str, Bounds] = {
    "overlapping": lambda counts: [(0, stop) for _, stop in in_order(counts)],
    "without the first row": lambda counts: [(start + 1, stop) for start, stop in in_order(counts)],
    "backwards": lambda counts: in_order(counts)[::-1],
    "shifted": lambda counts: in_order([*counts[1:], counts[0]]),
    "clamped": lambda counts: [(a, b + (5 if e == EXPERTS - 1 else 0)) for e, (a, b) in enumerate(in_order(counts))],
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", OTHER_BOUNDS)
def test_slices_of_another_order_stay(name: str) -> None:
    assert level_of(check(assigned(OTHER_BOUNDS[name]))) == 0


def added(counts_of: Callable[[Tensor], Tensor], rows_of: Callable[[Tensor], Tensor] = lambda tok: tok) -> Any:
    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        order = idx.flatten().argsort(stable=True)
        tok, scores = rows_of(order // 2), rows_of(weights.flatten()[order])
        out, start = torch.zeros_like(x), 0
        for e, count in enumerate(counts_of(idx).tolist()):
            own = tok[start : start + count]
            out.index_add_(0, own, (x[own] @ layer.w[e]) * scores[start : start + count, None])
            start = start + count
        return out

    return loop


def counted(idx: Tensor) -> Tensor:
    return torch.zeros(EXPERTS, dtype=torch.long).scatter_add(0, idx.flatten(), torch.ones_like(idx.flatten()))


COUNTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "scatter_add": (counted, 2),
    "bincount": (lambda idx: torch.bincount(idx.flatten(), minlength=EXPERTS), 2),
    "one_hot": (lambda idx: F.one_hot(idx, EXPERTS).sum((0, 1)), 2),
    "one_hot, slots first": (lambda idx: F.one_hot(idx, EXPERTS).sum(1).sum(0), 2),
    "other numbers": (lambda idx: counted(idx * 0), 0),
    "a part of the routing": (lambda idx: counted(idx[:3]), 0),
    "too many": (lambda idx: counted(idx) + 1, 0),
    "below zero": (lambda idx: counted(idx) - 3, 0),
    "used slots only": (lambda idx: F.one_hot(idx, EXPERTS).any(0).sum(0), 0),
    "one slot": (lambda idx: F.one_hot(idx[:, 0], EXPERTS).sum(0), 0),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_that_are_known_to_cover_the_rows(name: str) -> None:
    counts, level = COUNTS[name]
    assert level_of(check(added(counts))) == level


def test_counts_of_another_routing() -> None:
    """Of as many pairs: it cuts elsewhere, still one part after the other."""

    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        other = layer.gate(x).neg().topk(2, dim=-1)[1]
        return added(lambda idx: counted(other))(layer, x, weights, idx)

    assert level_of(check(loop)) == 2


def written_to(idx: Tensor) -> Tensor:
    counts = counted(idx)
    counts[0] -= 1
    return counts


def sliced(body: str, before: str = "y = torch.zeros_like(rows)", result: str = "y") -> Loop:
    """A loop over slices of the rows sorted by expert, given as source."""
    sort = "flat, stop = idx.flatten(), 0; rows, sizes = x[flat.argsort(stable=True) // 2], counted(idx).tolist()"
    return written(f"start, stop = stop, stop + sizes[e]; {body}", f"{sort}; {before}", result, counted=counted)


STAY = {
    "more rows than are counted": added(counted, lambda rows: torch.cat([rows, rows[:3]])),
    "counts that are written to": added(written_to),
    "ids that are written to": added(lambda idx: counted(idx.clamp_(max=EXPERTS - 1))),
    "a slice that is used elsewhere": sliced(
        "own = rows[start:stop]; y[start:stop] = own @ w[e]; first = first + own.sum() * e",
        "y, first = torch.zeros_like(rows), x.new_zeros(())",
        "(y, first)",
    ),
    "a branch that reads another part": sliced(
        "y[start:stop] = y[start:stop].clone() @ w[e] + y[0].clone()", "y = rows.clone()"
    ),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str) -> None:
    # Gradients of rows that are used twice are summed in another order.
    tolerance = 1e-6 if name == "a slice that is used elsewhere" else 0.0
    assert level_of(check(STAY[name], tolerance=tolerance)) == 0


def test_a_value_that_is_broadcast_over_rows() -> None:
    """`y[start:stop] = v` with v of fewer dimensions puts rows where features are."""
    broadcast = "y[start:stop] = (rows[start:stop] @ w[e])[:, None]"
    assert level_of(check(sliced(broadcast, "y = x.new_zeros(rows.shape[0], 3, rows.shape[1])"))) in (0, 2)


def reads_of(record: fxpasses.inspect.Record) -> int | None:
    """The numbers that the host reads in the rewritten graph."""
    return figures([stage for stage in record.graphs[0].stages if stage.regions is not None][-1]).host_reads


def projected_twice(
    second: Callable[[Tensor, Tensor], Tensor], between: Callable[[Tensor], Any] = lambda counts: None
) -> Any:
    """JetMoe: the rows are cut by the same numbers twice, with a program of all tokens between."""

    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        order, counts = idx.flatten().argsort(stable=True), counted(idx)
        sizes = counts.tolist()
        y = torch.cat([part @ layer.w[e] for e, part in enumerate(x[order // 2].split(sizes))])
        back = torch.zeros_like(y).index_add(0, order, y)
        with torch.autocast("cpu", enabled=False):
            mixed = (back @ back.t()).softmax(-1) @ back
        between(counts)
        parts = mixed[order].split(sizes)
        z = torch.cat([second(parts[e], layer.w[e]) for e in range(EXPERTS)]) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, z)

    return loop


def test_two_projections_of_the_same_tokens() -> None:
    record = check(projected_twice(lambda part, w: torch.tanh(part) @ w))
    assert record.figures("group_experts")["loops_grouped"] == 2
    assert reads_of(record) == 0


def test_one_of_two_projections() -> None:
    """The numbers stay for the other, which computes the mean of an expert's rows."""
    record = check(projected_twice(lambda part, w: (part - part.sum(0)) @ w))
    assert record.figures("group_experts")["loops_grouped"] == 1
    assert reads_of(record) == 1 and "tokens are cut by ×4 counts" in str(record)


def test_counts_that_are_written_to_after_they_were_read() -> None:
    record = check(projected_twice(lambda part, w: part @ w, between=lambda counts: counts.zero_()))
    assert record.figures("group_experts")["loops_grouped"] == 1


def padded(counts_of: Callable[[Tensor], Tensor], first: bool = False) -> Any:
    """As many of the rows are cut as the counts add up to; the sum is used elsewhere as well, or before the loop."""

    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        counts = counts_of(idx).tolist()
        tok = idx.flatten().argsort(stable=True) // 2
        rows = torch.cat([x[tok], x[:3]])
        padding = rows.shape[0] - sum(counts) if first else None
        y = torch.cat([part @ layer.w[e] for e, part in enumerate(rows[: sum(counts)].split(counts))])
        if padding is not None:
            return torch.cat([y, y.new_ones(padding, y.shape[1])])
        return torch.cat([y, y.new_ones(rows.shape[0] - sum(counts), y.shape[1])]) * (sum(counts) + 1)

    return loop


def histogram(idx: Tensor, bins: int, low: float = 0, high: float | None = None) -> Tensor:
    """Counts as torchtitan takes them; on CUDA devices `histc` takes integers, too."""
    return torch.histc(idx.flatten().float(), bins=bins, min=low, max=bins if high is None else high).to(torch.int64)


# The counts, and how many numbers the host reads: their sum, where it is not known to be the number of ids.
PREFIXES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "all tokens": (counted, 0),
    "the first tokens": (lambda idx: counted(idx[:3]), 0),
    "not known": (lambda idx: counted(idx) // 2, 1),
    "none": (lambda idx: counted(idx) * 0, 1),
    "a histogram": (lambda idx: histogram(idx, EXPERTS), 0),
    "a histogram of the first tokens": (lambda idx: histogram(idx[:3], EXPERTS), 0),
    "a histogram that leaves ids out": (lambda idx: histogram(idx, EXPERTS, 0, EXPERTS - 2), 1),
    "a histogram from below 0": (lambda idx: histogram(idx, EXPERTS, -1), 1),
    "a histogram up to the last id": (lambda idx: histogram(idx, EXPERTS, 0, EXPERTS - 1), 0),
    "a histogram of other numbers": (lambda idx: histogram(idx / 2, EXPERTS), 1),
}


@pytest.mark.parametrize("name", PREFIXES)
def test_part_of_the_rows(name: str) -> None:
    counts, reads = PREFIXES[name]
    record = check(padded(counts))
    assert level_of(record) == 2
    assert reads_of(record) == reads


@pytest.mark.parametrize(
    "loop",
    [padded, functools.partial(padded, first=True), added],
    ids=["the first rows", "the padding first", "slices"],
)
@pytest.mark.parametrize("name", ["bincount", "a histogram"])
def test_sizes_that_are_symbolic(name: str, loop: Any) -> None:
    """Float32 counts exactly up to 2^24 pairs: a guard on the sizes, no number that the host reads."""
    counts, _ = (COUNTS | PREFIXES)[name]
    batches = [(torch.randn(tokens, WIDTH, requires_grad=True),) for tokens in (10, 14)]
    record = assert_same(Layer(loop(counts)), batches, dynamic=True)
    assert len(record.graphs) == 1 and level_of(record) == 2
    assert reads_of(record) == 0


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(
            assigned(in_order),
            marks=pytest.mark.skipif(not ASSIGNS_SLICES, reason="torch 2.11 breaks the graph at `y[a:b] = f(x[a:b])`"),
        ),
        added(counted),
    ],
    ids=["assigned", "added"],
)
def test_no_count_is_read_at_run_time(loop: Any) -> None:
    layer = Layer(loop)
    x = torch.randn(10, layer.w.shape[1], requires_grad=True)
    program = compiled(layer, "aot_eager")
    program(x).sum().backward()
    seen = events(lambda: program(x).sum().backward())
    assert seen["aten::item"] == seen["aten::_local_scalar_dense"] == seen["aten::nonzero"] == 0


def test_a_question_about_the_counts_as_though_they_were_ids() -> None:
    """`(counts == e).any()` asks whether some expert has e tokens."""

    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        order = idx.flatten().argsort(stable=True)
        tok, scores, counts = order // 2, weights.flatten()[order], counted(idx)
        out, start = torch.zeros_like(x), 0
        for e, count in enumerate(counts.tolist()):
            if (counts == e).any():
                own = tok[start : start + count]
                out.index_add_(0, own, (x[own] @ layer.w[e]) * scores[start : start + count, None])
            start = start + count
        return out

    assert level_of(check(loop)) == 0


def test_no_expert_has_tokens_but_one() -> None:
    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        return added(counted)(layer, x * 0 + 1, weights, idx)

    assert level_of(check(loop)) == 2


def cut_without_gradients(x: Tensor, lengths: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        parts = x.split(lengths.tolist())
    return torch.cat([part @ w for part in parts])


def joined_in_place(x: Tensor, lengths: Tensor, w: Tensor) -> Tensor:
    result = torch.full_like(x, 7.0)
    with torch.no_grad():
        torch.cat(x.split(lengths.tolist()), out=result)
    return result @ w


@pytest.mark.parametrize("program", [cut_without_gradients, joined_in_place])
def test_parts_without_gradients_and_in_given_memory(program: Any) -> None:
    found = []
    for function in (program, compiled(program, "eager")):
        x = torch.linspace(-1, 1, 24).view(8, 3).requires_grad_()
        w = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
        y = function(x, torch.tensor([3, 5]), w)
        found.append((y, *torch.autograd.grad(y.sin().sum(), (x, w), allow_unused=True)))
    eager, ours = found
    torch.testing.assert_close(ours[0], eager[0], rtol=0, atol=1e-6)
    assert [grad is None for grad in ours[1:]] == [True, False]
    torch.testing.assert_close(ours[2], eager[2], rtol=0, atol=1e-6)
