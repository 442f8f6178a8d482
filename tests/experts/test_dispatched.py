"""The local loop after a dispatch, as torchtitan has it: rows that arrived, cut by counts that arrived with them.

The counts come from other processes, so nothing in the graph says what they add up to; the host reads their sum alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpasses.inspect import Record
from fxpasses.inspect.figures import figures
from tests.support import ASSIGNS_SLICES, assert_same, compiled, events, reports_of

pytestmark = pytest.mark.usefixtures("capture_flags")

EXPERTS, WIDTH, HIDDEN, ROWS = 4, 16, 32, 14


class Stacked(nn.Module):
    """torchtitan's `GroupedExperts`: all experts' weights in three parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.2)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.2)
        self.w3 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.2)

    def run(self, e: int, part: Tensor) -> Tensor:
        h = F.silu(torch.matmul(part, self.w1[e].transpose(-2, -1)))
        h = h * torch.matmul(part, self.w3[e].transpose(-2, -1))
        return torch.matmul(h, self.w2[e].transpose(-2, -1))


class Listed(nn.Module):
    """A module for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(EXPERTS)
        )

    def run(self, e: int, part: Tensor) -> Tensor:
        return self.experts[e](part)


Loop = Callable[[Any, Tensor, Tensor], Tensor]


def torchtitan(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """`_run_experts_for_loop`."""
    sizes = counts.tolist()
    padding = rows.shape[0] - sum(sizes)
    parts = torch.split(rows[: sum(sizes)], split_size_or_sections=sizes, dim=0)
    out = torch.cat([experts.run(e, part) for e, part in enumerate(parts)], dim=0)
    return torch.vstack((out, out.new_zeros((padding, out.shape[-1]))))


def padded_in_place(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    sizes = counts.tolist()
    total = sum(sizes)
    out = torch.zeros_like(rows)
    out[:total] = torch.cat([experts.run(e, part) for e, part in enumerate(rows[:total].split(sizes))])
    return out


def with_scores(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Two tensors are cut alike."""
    sizes, scores = counts.tolist(), rows.sum(1, keepdim=True)
    parts, weights = rows[: sum(sizes)].split(sizes), scores[: sum(sizes)].split(sizes)
    out = torch.cat([experts.run(e, part) * weights[e] for e, part in enumerate(parts)])
    return F.pad(out, (0, 0, 0, rows.shape[0] - sum(sizes)))


class Model(nn.Module):
    """Rows [14, 16] that lie sorted; how many each expert has is decided by an activation."""

    def __init__(
        self, loop: Loop, experts: type[nn.Module] = Stacked, layers: int = 1, checkpoints: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.loop, self.checkpoints = loop, checkpoints
        self.layers = nn.ModuleList(experts() for _ in range(layers))

    def forward(self, x: Tensor, most: Tensor) -> Tensor:
        for layer in self.layers:
            if self.checkpoints:
                x = x + checkpoint(self.layer, layer, x, most, use_reentrant=False)
            else:
                x = x + self.layer(layer, x, most)
        return x

    def layer(self, experts: nn.Module, x: Tensor, most: Tensor) -> Tensor:
        counts = (x[:EXPERTS].abs().sum(1) / 4).to(torch.int32).clamp(max=3) * most
        return self.loop(experts, x, counts)


def batches(*most: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(ROWS, WIDTH, requires_grad=True), torch.tensor(number)) for number in most or (1, 1, 0)]


def reads(record: Record) -> int:
    (graph,) = record.graphs
    return figures([stage for stage in graph.stages if stage.regions is not None][-1]).host_reads


@pytest.mark.parametrize("experts", [Stacked, Listed])
@pytest.mark.parametrize("loop", [torchtitan, padded_in_place, with_scores])
def test_the_loop_is_one_program(loop: Loop, experts: type[nn.Module]) -> None:
    """Bit for bit, in batches in which experts have few rows or none; one number is read, and not one for each."""
    record = assert_same(Model(loop, experts), batches(), "aot_eager")
    if ASSIGNS_SLICES or loop is not padded_in_place:
        assert record.figures("group_experts") == {"loops_grouped": 1}, record
        assert reads(record) == 1


def test_in_checkpoints() -> None:
    record = assert_same(Model(torchtitan, layers=2, checkpoints=True), batches(), "aot_eager")
    assert record.figures("group_experts") == {"loops_grouped": 2}, record
    assert reads(record) == 2


def test_one_number_is_read_at_run_time() -> None:
    """On the CPU the device's own checks show as reads as well."""
    fast, (batch,) = compiled(Model(torchtitan), "aot_eager"), batches(1)
    fast(*batch).sum().backward()
    seen = events(lambda: fast(*batch).sum().backward())
    assert seen["aten::_local_scalar_dense"] - seen["aten::_assert_async"] == 1


def test_through_inductor() -> None:
    record = assert_same(Model(torchtitan), batches(1, 0), "inductor", tolerance=1e-5)
    assert record.figures("group_experts") == {"loops_grouped": 1}


@pytest.mark.parametrize(
    ("counts", "message"), [([9, 9, 9, 9], "more rows than there are"), ([3, -1, 3, 3], "negative")]
)
@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_counts_that_do_not_fit_raise_an_error(lowering: str, counts: list[int], message: str) -> None:
    """So does `split` in eager mode."""
    torch.manual_seed(3)
    experts = Stacked()

    def program(rows: Tensor, scale: Tensor) -> Tensor:
        return torchtitan(experts, rows, (scale.abs() + 1).to(torch.int64) * torch.tensor(counts))

    good, bad = torch.randn(40, WIDTH), torch.randn(ROWS, WIDTH)
    if "negative" not in message:
        assert torch.equal(compiled(program, lowering)(good, torch.zeros(())), program(good, torch.zeros(())))
    with pytest.raises(RuntimeError):
        program(bad, torch.zeros(()))
    with pytest.raises(RuntimeError):
        compiled(program, lowering)(bad, torch.zeros(()))


# What looks alike and is not


def run_parts(experts: Any, parts: Any) -> Tensor:
    return torch.cat([experts.run(e, part) for e, part in enumerate(parts)])


def padded_back(out: Tensor, rows: Tensor, sizes: list[int]) -> Tensor:
    return F.pad(out, (0, 0, 0, rows.shape[0] - sum(sizes)))


def modified_between(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """The sizes were read before; the counts say something else by the end of the loop."""
    sizes = counts.tolist()
    parts = rows[: sum(sizes)].split(sizes)
    counts.zero_()
    return padded_back(run_parts(experts, parts), rows, sizes) + counts.sum()


def with_sizes(change: Callable[[list[int]], list[int]]) -> Loop:
    def loop(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
        sizes = change(counts.tolist())
        return padded_back(run_parts(experts, rows[: sum(sizes)].split(sizes)), rows, sizes)

    return loop


def with_parts(run: Callable[..., Tensor], first: int = 0) -> Loop:
    """`run(experts, parts, sizes)` gives the rows of all experts."""

    def loop(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
        sizes = counts.tolist()
        parts = rows[first : sum(sizes) + first].split(sizes)
        return padded_back(run(experts, parts, sizes), rows, sizes)

    return loop


def overlapping(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    sizes, start, out = counts.tolist(), 0, []
    for e, size in enumerate(sizes):
        out.append(experts.run(e, rows[start : start + size]))
        start = start + size - int(e == 0)
    return padded_back(torch.cat(out), rows, sizes)


def slices_that_may_be_clamped(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Slices do not check that there are as many rows."""
    sizes, start, out = counts.tolist(), 0, []
    for e, size in enumerate(sizes):
        out.append(experts.run(e, rows[start : start + size]))
        start = start + size
    return torch.cat(out).sum(0) + rows


def a_size_is_used_elsewhere(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    sizes = counts.tolist()
    return padded_back(run_parts(experts, rows[: sum(sizes)].split(sizes)), rows, sizes) * sizes[1]


DECOYS: dict[str, Loop] = {
    "modified between": modified_between,
    "parts in another order": with_parts(
        lambda experts, parts, sizes: torch.cat([experts.run(e, parts[e]) for e in reversed(range(EXPERTS))])
    ),
    "sizes in another order": with_sizes(lambda sizes: sizes[::-1]),
    "sizes changed": with_sizes(lambda sizes: [sizes[0] + 1, *sizes[1:]]),
    "overlapping": overlapping,
    "slices that may be clamped": slices_that_may_be_clamped,
    "from the second row": with_parts(lambda experts, parts, sizes: run_parts(experts, parts), first=1),
    "rows read twice": with_parts(
        lambda experts, parts, sizes: torch.cat([experts.run(e, p) + parts[0].sum() for e, p in enumerate(parts)])
    ),
    "scaled by its count": with_parts(
        lambda experts, parts, sizes: torch.cat([experts.run(e, p) * sizes[e] for e, p in enumerate(parts)])
    ),
    "a size is used elsewhere": a_size_is_used_elsewhere,
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", DECOYS)
def test_decoys_stay_loops(name: str) -> None:
    # The rows that `overlapping` returns are as many as no batch tells: the graph breaks, and gradients are summed in
    # another order.
    tolerance = 1e-6 if name == "overlapping" else 0.0
    record = assert_same(Model(DECOYS[name]), batches(1), "aot_eager", tolerance=tolerance)
    assert not record.figures("group_experts"), record
    assert any(report.refusals for report in reports_of(record, "group_experts"))


def changed_before_they_are_read(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    counts[0] += 1
    return torchtitan(experts, rows, counts)


WEIGHTS_IN_ANOTHER_ORDER = with_parts(
    lambda experts, parts, sizes: torch.cat([experts.run(EXPERTS - 1 - e, part) for e, part in enumerate(parts)])
)


@pytest.mark.parametrize("loop", [changed_before_they_are_read, WEIGHTS_IN_ANOTHER_ORDER], ids=["changed", "order"])
def test_what_looks_different_and_is_the_same(loop: Loop) -> None:
    record = assert_same(Model(loop), batches(1), "aot_eager")
    assert record.figures("group_experts") == {"loops_grouped": 1}, record
