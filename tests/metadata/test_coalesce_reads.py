"""Numbers that activations decide: one copy to the host for all of a layer, each number as eager mode has it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from bench.cases.traced_decoder import Tracer
from fxpasses.inspect import Record
from fxpasses.inspect.figures import figures
from fxpasses.metadata.coalesce_reads import CoalesceReads
from fxpasses.options import Options
from fxpasses.passes.pipeline import run_passes
from tests.support import assert_same, compiled, events

pytestmark = pytest.mark.usefixtures("capture_flags")

ROWS, WIDTH, PARTS = 12, 4, 3


def batches() -> list[tuple[Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(ROWS, WIDTH, requires_grad=True),) for _ in range(3)]


def counted(x: Tensor) -> Tensor:
    return (x[:, :PARTS].argmax(1, keepdim=True) == torch.arange(PARTS)).sum(0)


def scaled(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([part.sin() * (number + 1) for number, part in enumerate(parts)])


def waits(record: Record) -> int:
    """Of the one graph, as the last pass left it."""
    (graph,) = record.graphs
    return figures([stage for stage in graph.stages if stage.regions is not None][-1]).host_reads


def unrolled_list(x: Tensor) -> Tensor:
    return scaled(x.split(counted(x).tolist()))


def two_tensors(x: Tensor) -> Tensor:
    counts = counted(x)
    ends, narrow = counts.cumsum(0), counts.to(torch.int32)
    return scaled(x.split(narrow.tolist())) * ends.tolist()[1]


def a_matrix(x: Tensor) -> Tensor:
    (a, b), (c, d) = (counted(x)[:2, None] + torch.arange(2)).tolist()
    return x * a + x.sin() * b * c + x.cos() * d


def last_element(x: Tensor) -> Tensor:
    counts = counted(x)
    return x * counts[-1].item() + x.sin() * counts[0].item()


def copied_by_the_program(x: Tensor) -> Tensor:
    counts = counted(x)
    first, second = counts.view(PARTS, 1).sum(1).to("cpu", non_blocking=True), counts.flip(0).cpu()
    return scaled(x.split(first.tolist())) * second.tolist()[0]


def computed_after_the_first_read(x: Tensor) -> Tensor:
    """As an expert-parallel layer does: splits, rows, and then the padded numbers of rows, from the same counts."""
    counts = counted(x)
    first = scaled(x.split(counts.tolist()))
    padded = (counts.clamp(min=2) + 1) // 2 * 2
    return first * padded.to(torch.int32).cumsum(0)[-1].item() + first.sin() * padded.max().item()


def floats(x: Tensor) -> Tensor:
    low, high = x.amin(0), x.amax(0)
    return x * low[1].item() + x.sin() * low[2].item() + high


@pytest.mark.parametrize(
    ("program", "reads"),
    [
        (unrolled_list, 3),
        (two_tensors, 4),
        (a_matrix, 4),
        (last_element, 2),
        (copied_by_the_program, 2),
        (computed_after_the_first_read, 5),
        (floats, 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_all_numbers_of_a_layer_come_in_one_copy(program: Callable[..., Any], reads: int, lowering: str) -> None:
    record = assert_same(program, batches(), lowering)
    assert record.figures("coalesce_reads") == {"host_reads_before": reads, "host_reads_after": 1}
    assert waits(record) == 1, record


def test_a_copy_for_each_layer_and_for_its_recomputation() -> None:
    """No more than eager mode has, which recomputes the list as well."""

    def layer(x: Tensor) -> Tensor:
        a, b, c = counted(x).tolist()
        return (x * a + x.sin() * b + x.cos() * c) / ROWS

    def model(x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    record = assert_same(model, batches(), "aot_eager")
    assert record.figures("coalesce_reads") == {"host_reads_before": 9, "host_reads_after": 3}


def test_a_number_that_is_read_twice_is_one() -> None:
    """Stock Inductor fails here in training: its CSE merges the reads, and leaves a symbol that nothing binds."""

    def program(x: Tensor) -> Tensor:
        counts = counted(x)
        first, again = counts[0].item(), counts[0].item()
        torch._check(first <= ROWS)
        torch._check(again <= ROWS)
        return torch.cat([(x[:first] @ x.T).sin(), (x[:again] @ x.T).cos()])

    record = assert_same(program, batches(), "aot_eager")
    assert record.figures("coalesce_reads") == {"host_reads_before": 2, "host_reads_after": 1}
    (x,) = batches()[0]
    fast = compiled(program, "aot_eager")
    fast(x)
    assert events(lambda: fast(x))["aten::_local_scalar_dense"] == 1


def test_through_inductor() -> None:
    record = assert_same(two_tensors, batches()[:1], "inductor", tolerance=1e-6)
    assert record.figures("coalesce_reads")["host_reads_after"] == 1


def written_between(x: Tensor) -> Tensor:
    counts = counted(x)
    before = counts[0].item()
    counts.add_(1)
    return x * before + x.sin() * counts[0].item()


def written_through_a_view(x: Tensor) -> Tensor:
    counts = counted(x)
    before, row = counts[1].item(), counts.view(PARTS, 1)[1]
    row.mul_(3)
    return x * before + x.sin() * counts[1].item()


def copy_then_write(x: Tensor) -> Tensor:
    counts = counted(x)
    host = counts.to("cpu", copy=True)
    counts.zero_()
    return x * host[1].item() + x.sin() * counts[2].item()


def written_before_it_is_made(x: Tensor) -> Tensor:
    counts = counted(x)
    before = counts[0].item()
    counts.add_(1)
    return x * before + x.sin() * counts.sum().item()


def made_in_place(x: Tensor) -> Tensor:
    counts = counted(x)
    sums, before = counts.clone(), counts[0].item()
    return x * before + x.sin() * sums.mul_(2).sum().item() + sums.sum()


def made_of_random_numbers(x: Tensor) -> Tensor:
    before = counted(x)[0].item()
    return x * before + x.sin() * torch.randint(3, 4, (PARTS,)).sum().item()


def made_of_its_own_answer(x: Tensor) -> Tensor:
    counts = counted(x)
    return x * (counts + counts[0].item()).sum().item()


def written_before_it_is_made_of_a_view(x: Tensor) -> Tensor:
    counts = counted(x)
    row, before = counts.view(PARTS, 1)[1], counts[0].item()
    row.mul_(3)
    doubled = counts * 2
    return x * before + x.sin() * doubled.sum().item()


def write_to_the_copy(x: Tensor) -> Tensor:
    counts = counted(x)
    host = counts.to("cpu", copy=True)
    host.add_(5)
    return x * host[1].item() + x.sin() * counts[1].item()


@pytest.mark.parametrize(
    "program",
    [
        written_between,
        written_through_a_view,
        copy_then_write,
        written_before_it_is_made,
        written_before_it_is_made_of_a_view,
        made_in_place,
        made_of_random_numbers,
        made_of_its_own_answer,
    ],
)
def test_numbers_that_the_first_copy_cannot_have(program: Callable[..., Any]) -> None:
    record = assert_same(program, batches(), "aot_eager")
    assert not record.figures("coalesce_reads"), record


def test_a_copy_that_was_changed_is_another_tensor() -> None:
    assert_same(write_to_the_copy, batches(), "aot_eager")


def test_what_activations_decide_later_waits_for_a_copy_of_its_own() -> None:
    def program(x: Tensor) -> Tensor:
        first = scaled(x.split(counted(x).tolist()))
        return scaled(first.split(counted(first).tolist()))

    record = assert_same(program, batches(), "aot_eager")
    assert record.figures("coalesce_reads") == {"host_reads_before": 6, "host_reads_after": 2}


def test_one_number_stays_as_it_is() -> None:
    record = assert_same(lambda x: x * counted(x).max().item(), batches(), "aot_eager")
    assert not record.figures("coalesce_reads")


def test_slices_over_experts_have_one_copy_already() -> None:
    """Level 1 of `group_experts` reads all sizes from one copy on the host."""

    def program(x: Tensor) -> Tensor:
        ids, out = x[:, :PARTS].argmax(1), torch.zeros_like(x)
        for expert in range(PARTS):
            rows = torch.where(ids == expert)[0]
            out[rows] = x[rows] * (expert + 1) if expert else x[rows].sin()
        return out

    record = assert_same(program, batches(), "aot_eager", experts="slices")
    assert not record.figures("coalesce_reads")
    assert waits(record) == 1, record


def test_on_a_device_the_numbers_are_read_from_the_copy() -> None:
    """Traced on fake CUDA tensors: one copy to the host, and no `.item()` of what lies on the device."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        x = torch.empty(ROWS, WIDTH, device="cuda")
    tracer = Tracer(mode)
    rows = tracer.placeholder("x", x)
    counts, wide = tracer.method("argmax", rows, 0), tracer.method("argmax", rows, 1)
    result = rows
    for source, place in ((counts, 0), (counts, 3), (wide, 7)):
        number = tracer.method("item", tracer.method("select", source, 0, place))
        result = tracer.function(operator.mul, result, number)
    tracer.graph.output((result,))
    passes = run_passes([CoalesceReads()], GraphModule({}, tracer.graph), [x], Options(strict=True))
    nodes = list(passes.gm.graph.nodes)
    copies = [node for node in nodes if node.target == "to" and node.args[1] == "cpu"]
    items = [node for node in nodes if node.target == "item"]
    assert len(copies) == 1 and len(items) == 3
    assert {node.args[0].meta["example_value"].device.type for node in items} == {"cpu"}
