"""Results and gradients with activations moved to disk equal those without, bit for bit, however a loop runs."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import fxpasses
import fxpasses.inspect
from fxpasses import fastpack_backend
from fxpasses.base import once
from fxpasses.compiler import partitioner
from fxpasses.offload import offload_activations
from fxpasses.report import Reason
from tests.offload import programs
from tests.offload.programs import Broken, Decoder, Packed, Plain

CASES: dict[str, tuple[Any, programs.Step]] = {
    "one step": (Decoder, programs.one_step),
    "three steps": (Decoder, programs.one_after_the_other),
    "accumulation, first to last": (Decoder, programs.accumulate),
    "accumulation, last to first": (Decoder, programs.accumulate_backwards),
    "accumulation, mixed": (Decoder, programs.accumulate_mixed),
    "a forward without backward": (Decoder, programs.dropped_forward),
    "retain_graph": (Decoder, programs.retain_graph),
    "several graphs": (Broken, programs.accumulate),
    "dynamic sizes": (Decoder, programs.sizes),
    "autocast": (Decoder, programs.autocast),
    "bfloat16": (Decoder, programs.in_bfloat16),
    "float16": (Decoder, programs.in_float16),
    "float64": (Decoder, programs.in_float64),
    "backward elsewhere": (Decoder, programs.other_thread),
    "two backward passes at once": (Decoder, programs.threads_at_once),
    "an exception in backward": (Decoder, programs.stopped_on_the_way),
    "strides, gaps, integers": (Plain, programs.one_step),
    "strides, gaps, integers; dynamic sizes": (Plain, programs.sizes),
    "hoisted metadata and grouped experts": (Packed, programs.packed),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def compiled(program: nn.Module, tier: str, lowering: str = "aot_eager", **options: Any) -> Any:
    given = {"fastpack.lowering": lowering, "fastpack.strict": True}
    if tier != "off":
        given |= {"fastpack.offload": tier, "fastpack.offload.min_bytes": 0, "fastpack.offload.keep_last": 0}
    given |= {f"fastpack.offload.{name}": value for name, value in options.items()}
    return torch.compile(program, backend=fastpack_backend, options=given)


def numbers(make: Any, step: programs.Step, device: str, tier: str, **options: Any) -> list[torch.Tensor]:
    """What a loop returns, and the gradients of all parameters."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    program = compiled(make().to(device), tier, **options)
    returned = step(program, torch.device(device))
    gradients = [parameter.grad for parameter in program.parameters() if parameter.grad is not None]
    leaves = torch.utils._pytree.tree_leaves([returned, gradients])
    return [leaf.detach() for leaf in leaves]


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Any:
    fxpasses.offload_stats(reset=True)
    yield
    torch._dynamo.reset()
    gc.collect()
    assert fxpasses.offload_stats().bytes_held == 0


@pytest.mark.quick(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_results_are_equal_bit_for_bit(name, device):
    make, step = CASES[name]
    expected = numbers(make, step, device, "off")
    assert fxpasses.offload_stats().tensors_out == 0
    tiers = ["disk"] if device == "cpu" else ["disk", "host"]
    for tier in tiers:
        for buffers in (1, 2, 3) if name in ("accumulation, mixed", "strides, gaps, integers") else (2,):
            fxpasses.offload_stats(reset=True)
            assert_equal(numbers(make, step, device, tier, buffers=buffers), expected)
            stats = fxpasses.offload_stats()
            assert stats.tensors_out >= 2 and stats.tensors_in >= 2
            assert not stats.fallbacks


def test_no_grad_moves_nothing():
    program = compiled(Decoder(), "disk")
    with torch.no_grad():
        program(programs.inputs(torch.device("cpu")))
    assert fxpasses.offload_stats().tensors_out == 0


def report(make: Any = Decoder, step: programs.Step = programs.one_step, tier: str = "disk", **options: Any) -> Any:
    with fxpasses.inspect.record() as record:
        numbers(make, step, "cpu", tier, **options)
    return next(r for graph in record.graphs for r in graph.reports if r.pass_name == "offload_activations")


def test_the_report_names_each_tensor_its_layer_and_why():
    told = report(lambda: Decoder(4), keep_last=1)
    assert told.figures["tensors_moved"] == 2 and told.figures["bytes_moved"] == 2 * 4 * 24 * 16
    assert [change.split(":")[0].split()[-1] for change in told.changes] == ["layers.0", "layers.1"]
    assert all("a checkpoint begins with it" in change for change in told.changes)
    kept = [refusal for refusal in told.refusals if refusal.reason is Reason.NEEDED_SOON]
    assert len(kept) == 1 and "layers.2" in kept[0].text and "programs.py" in kept[0].where
    assert "2 activations, 3.0 KiB, wait for backward on the disk" in told.summary


def test_the_report_says_when_each_tensor_leaves_and_comes_back():
    """With two buffers the copy back of a tensor starts where the one before it is needed; with one, where it is."""
    for buffers in (1, 2):
        told = report(lambda: Decoder(6), keep_last=1, buffers=buffers)
        moved = told.transfers
        assert len(moved) == told.figures["tensors_moved"] == 4
        assert [one.bytes for one in moved] == [4 * 24 * 16] * 4 and {one.to for one in moved} == {"disk"}
        assert [one.offloaded_at for one in moved] == sorted({one.offloaded_at for one in moved})
        last, *others = sorted(moved, key=lambda one: one.needed_at)
        assert moved[-1] == last  # what leaves last is needed first
        for before, one in zip([last, *others], others, strict=False):
            assert one.reloaded_at < one.needed_at
            assert (one.reloaded_at < before.needed_at) == (buffers == 2)


def test_small_tensors_stay():
    told = report(min_bytes=1 << 20)
    assert told.figures["tensors_moved"] == 0 and not told.changed
    assert {refusal.reason for refusal in told.refusals} == {Reason.SMALL}


def test_what_is_returned_and_what_is_given_stay():
    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).exp()  # saved for the gradient of exp, and returned
            return torch.stack([y.sin().sum(), y.sum()]).sum() if x.shape[0] == 1 else (y.sin().sum(), y)

    def step(program: Any, device: torch.device) -> Any:
        total, y = program(programs.inputs(device))
        total.backward()
        return total, y

    told = report(Program, step)
    assert told.figures["tensors_moved"] == 0 and told.figures["inputs_saved"] >= 1
    assert {refusal.reason for refusal in told.refusals} == {Reason.RETURNED}


class Views(nn.Module):
    """What is saved are three views of one memory, none of which holds the others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cube = torch.ops.fxpasses_test.cube
        q, k, v = torch.ops.fxpasses_test.twice(self.linear(x)).chunk(3, -1)
        return (cube(q.t()).t() * cube(k)).sum() + cube(v.reshape(-1, 2, 8)).sum()


@pytest.mark.parametrize("step", [programs.one_step, programs.sizes])
def test_views_without_their_base_are_moved_by_it_and_rebuilt(step, monkeypatch):
    def save_all(gm: Any, inputs: Any, **given: Any) -> Any:
        given.pop("compiler", None)
        return torch._functorch.partitioners.default_partition(gm, inputs, **given)

    monkeypatch.setattr(partitioner, "min_cut_rematerialization_partition", save_all)
    expected = numbers(Views, step, "cpu", "off")
    told = report(Views, step)
    assert_equal(numbers(Views, step, "cpu", "disk"), expected)
    assert [change.split(":")[0] for change in told.changes if "4.5 KiB" in change] == ["twice"]
    assert told.figures["tensors_kept"] == 0
    assert Reason.SHARED_MEMORY not in {refusal.reason for refusal in told.refusals}


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(self.linear(x).reshape(1, 2, -1, 16)).sigmoid()
        return self.linear(x[0].flatten(0, 1)).sigmoid().sum()


def test_tensors_whose_strides_a_compiler_may_change_stay():
    told = report(Convolved)
    assert told.figures["tensors_moved"] >= 1
    assert Reason.STRIDES_MAY_CHANGE in {refusal.reason for refusal in told.refusals}


def test_a_tensor_and_its_views_are_moved_once():
    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            base = torch.ops.fxpasses_test.twice(self.linear(x))
            return (torch.ops.fxpasses_test.cube(base[3:9].t()) * 2).sum() + torch.ops.fxpasses_test.cube(base).sum()

    told = report(Program)
    expected = numbers(Program, programs.one_step, "cpu", "off")
    fxpasses.offload_stats(reset=True)
    assert_equal(numbers(Program, programs.one_step, "cpu", "disk"), expected)
    assert told.figures["tensors_moved"] == 1 == fxpasses.offload_stats().tensors_out
    assert told.figures["bytes_moved"] == 4 * 24 * 16


@torch.library.custom_op("fxpasses_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("fxpasses_test::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


for _op in (twice, cube):
    _op.register_fake(lambda x: torch.empty_like(x))
twice.register_autograd(lambda ctx, gradient: gradient * 2)
cube.register_autograd(
    lambda ctx, gradient: gradient * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_the_host_tier_on_the_cpu_says_why_it_moves_nothing():
    once.forget(("offload", "wrong_device"))
    expected = numbers(Decoder, programs.one_step, "cpu", "off")
    with pytest.warns(UserWarning, match="lie in host memory already"):
        told = report(tier="host")
    assert told.figures["tensors_moved"] == 0
    assert {refusal.reason for refusal in told.refusals} == {Reason.WRONG_DEVICE}
    assert_equal(numbers(Decoder, programs.one_step, "cpu", "host"), expected)


@pytest.mark.slow
def test_a_budget_moves_no_more_than_it_takes():
    def many_tokens(program: Any, device: torch.device) -> Any:
        loss = program(programs.inputs(device, 400))
        loss.backward()
        return loss

    def five() -> Decoder:
        return Decoder(5)

    everything = report(five, many_tokens)
    peak, lowest = everything.figures["peak_bytes_before"], everything.figures["peak_bytes_after"]
    assert lowest < peak
    roomy = report(five, many_tokens, device_budget=peak)
    assert roomy.figures["tensors_moved"] == 0
    assert {refusal.reason for refusal in roomy.refusals} == {Reason.WITHIN_BUDGET}
    some = report(five, many_tokens, device_budget=peak - 1)
    assert 0 < some.figures["tensors_moved"] < everything.figures["tensors_moved"]
    assert some.figures["peak_bytes_after"] < peak
    assert any("stays at" in change for change in report(five, many_tokens, device_budget=0).changes)


def test_a_failing_pass_leaves_the_plain_partition(monkeypatch):
    expected = numbers(Decoder, programs.one_step, "cpu", "off")
    insert = offload_activations.insert

    def half_done(*arguments: Any) -> None:
        insert(*arguments)
        raise ZeroDivisionError("for the test")

    monkeypatch.setattr(offload_activations, "insert", half_done)
    once.forget("offload_activations")
    program = torch.compile(
        copy.deepcopy(_seeded()),
        backend=fastpack_backend,
        options={"fastpack.lowering": "aot_eager", "fastpack.offload": "disk", "fastpack.offload.min_bytes": 0},
    )
    with pytest.warns(UserWarning, match="offload_activations failed and was dropped .*for the test"):
        loss = programs.one_step(program, torch.device("cpu"))
    assert_equal([loss.detach(), *(p.grad for p in program.parameters())], expected)
    assert fxpasses.offload_stats().tensors_out == 0


def _seeded() -> nn.Module:
    torch.manual_seed(0)
    return Decoder()


def test_under_ddp(tmp_path):
    expected = numbers(Decoder, programs.one_after_the_other, "cpu", "off")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        make = lambda: nn.parallel.DistributedDataParallel(Decoder(), bucket_cap_mb=2)  # noqa: E731
        assert_equal(numbers(make, programs.one_after_the_other, "cpu", "disk"), expected)
    finally:
        torch.distributed.destroy_process_group()
    assert fxpasses.offload_stats().tensors_out >= 3
