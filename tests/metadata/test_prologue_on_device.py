"""The prologue of a graph on an accelerator, looked at without one: what goes to the host, what stays on the device."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxpasses.attention.runtime.operators  # noqa: F401 - registers operators
from bench.cases.traced_decoder import Tracer
from fxpasses.dynamo.runtime.host_functions import Call, Look, register
from fxpasses.metadata.hoist_metadata import HoistMetadata
from fxpasses.metadata.program import Program
from fxpasses.options import Options
from fxpasses.passes.pipeline import run_passes

DEVICE = torch.device("cuda")


def program_of(build) -> Program:
    """Trace `build(tracer, x, lengths)` on fake CUDA tensors, and hoist."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        x, lengths = torch.empty(12, 4, device=DEVICE), torch.empty(3, dtype=torch.int64, device=DEVICE)
    tracer = Tracer(mode)
    inputs = tracer.placeholder("x", x), tracer.placeholder("lengths", lengths)
    tracer.graph.output((build(tracer, *inputs),))
    result = run_passes([HoistMetadata()], GraphModule({}, tracer.graph), [x, lengths], Options(strict=True))
    assert result.program is not None
    return result.program


def targets(gm: GraphModule | None) -> list[str]:
    nodes = [] if gm is None else [n for n in gm.graph.nodes if n.op.startswith("call")]
    return [getattr(n.target, "__name__", str(n.target)) for n in nodes]


def run_on_cpu(program: Program, lengths: torch.Tensor) -> list[object]:
    """What the program computes, its device part run on the CPU."""
    host = program.host(*[lengths for _ in program.host_inputs])
    sides = {"host": host}
    if program.device is not None:
        for node in program.device.graph.nodes:
            node.kwargs = {k: torch.device("cpu") if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}
        program.device.recompile()
        sides["device"] = program.device(
            *[lengths for _ in program.device_inputs], *[host[i] for i, _ in program.imports]
        )
    return [sides[output.side][output.position] for output in program.outputs]


def test_numbers_are_computed_on_the_host_and_masks_on_the_device():
    def build(t, x, lengths):
        mask = t.function(torch.zeros, 12, 12, device=DEVICE)
        longest = t.method("item", t.method("max", lengths))
        near = t.function(operator.lt, t.function(torch.arange, 12, device=DEVICE), longest)
        t.method("masked_fill_", mask, near, 1.0)
        return t.function(operator.mul, t.function(torch.matmul, mask, x), longest)

    program = program_of(build)
    assert targets(program.host) == ["max", "item"]
    assert targets(program.device) == ["zeros", "arange", "lt", "masked_fill_"]
    assert program.imports == ((0, None),)
    assert program.device_inputs == ()
    mask, longest = run_on_cpu(program, torch.tensor([5, 4, 3]))
    assert longest == 5 and torch.equal(mask[0], (torch.arange(12) < 5).float())


@pytest.mark.parametrize(("tokens", "passes", "worth"), [(1024, 4, True), (1024, 3, False), (64, 50, False)])
def test_a_mask_of_many_passes_is_worth_compiling(tokens, passes, worth):
    """2^22 written elements: four passes over 1024 × 1024."""

    def build(t, x, lengths):
        mask = t.function(torch.ones, tokens, tokens, device=DEVICE)
        longest = t.method("item", t.method("max", lengths))
        for _ in range(passes - 1):
            t.method("mul_", mask, longest)
        return t.function(operator.mul, x, t.method("sum", mask))

    program = program_of(build)
    assert program.on_accelerator and program.worth_compiling == worth


def test_what_waits_for_the_device_is_not_worth_compiling():
    def build(t, x, lengths):
        mean = t.method("item", t.method("mean", t.method("float", lengths)))
        mask = t.function(torch.ones, 2048, 2048, device=DEVICE)
        for _ in range(5):
            t.method("mul_", mask, mean)
        return t.function(operator.mul, x, t.method("sum", mask))

    assert not program_of(build).worth_compiling


def test_a_number_that_depends_on_another_needs_no_second_transfer():
    def build(t, x, lengths):
        longest = t.method("item", t.method("max", lengths))
        positions = t.function(torch.arange, longest, device=DEVICE)
        odd = t.method("item", t.method("sum", t.function(operator.mod, positions, 2)))
        return t.function(operator.mul, x, odd)

    program = program_of(build)
    assert program.device is None
    (arange,) = [n for n in program.host.graph.nodes if getattr(n.target, "__name__", "") == "arange"]
    assert arange.kwargs["device"] == torch.device("cpu")
    assert run_on_cpu(program, torch.tensor([5, 4, 3])) == [2]


def test_what_rounds_is_computed_where_the_user_computed_it():
    def build(t, x, lengths):
        mean = t.method("item", t.method("to", t.method("mean", t.method("float", lengths)), torch.int64))
        return t.function(operator.mul, x, mean)

    program = program_of(build)
    assert targets(program.host) == []
    assert targets(program.device) == ["float", "mean", "to", "item"]


def test_metadata_without_numbers_stays_on_the_device():
    def build(t, x, lengths):
        for _ in "ab":
            x = t.function(operator.mul, x, t.method("sum", t.method("cumsum", lengths, 0)))
        return x

    program = program_of(build)
    assert program.host_inputs == () and targets(program.host) == []
    assert targets(program.device) == ["cumsum", "sum"]


def positions(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([torch.arange(length, device=lengths.device) for length in lengths.tolist()]), lengths * 2


def test_a_function_of_metadata_runs_on_the_host():
    """It would wait for the device at each number that it reads."""
    looks = (Look((None,), torch.int64, DEVICE), Look(((0, 0),), torch.int64, DEVICE))
    name = register(Call(positions, None, ("lengths",), (), looks))

    def build(t, x, lengths):
        found = t.function(torch.ops.fxpasses.host_function.default, name, [lengths])
        for place in range(2):
            x = t.function(
                operator.mul, x, t.method("sum", t.method("float", t.function(operator.getitem, found, place)))
            )
        return x

    program = program_of(build)
    assert targets(program.host)[0].startswith("host_function") and program.device_inputs == ()
    assert not any(target.startswith("host_function") for target in targets(program.device))
    assert run_on_cpu(program, torch.tensor([5, 4, 3])) == [10 + 6 + 3, 24]


def test_a_copy_on_the_host_is_not_written_through():
    """`.cpu()` makes new memory on a device; on the host's copy it would return the copy itself."""

    def build(t, x, lengths):
        host = t.method("cpu", lengths)
        t.method("add_", host, 1)
        longest = t.method("item", t.method("max", host))
        untouched = t.method("item", t.method("sum", t.method("cpu", lengths)))
        return t.function(operator.mul, t.function(operator.mul, x, longest), untouched)

    assert run_on_cpu(program_of(build), torch.tensor([5, 4, 3])) == [6, 12]


@pytest.mark.gpu
def test_on_a_device_a_warm_step_has_one_transfer_to_the_host():
    from tests.end_to_end.test_training_step import Decoder, batches
    from tests.support import compiled, events

    model = Decoder(4).to(DEVICE)
    function = compiled(model, "aot_eager")
    x, lengths = (value.detach().to(DEVICE) for value in batches()[0])
    torch.testing.assert_close(function(x, lengths), model(x, lengths))

    def step():
        function(x, lengths.clone()).sum().backward()

    step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert len(copies) == 1
    assert events(step)["aten::_local_scalar_dense"] <= 8


def test_a_mask_of_attention_by_plans_and_its_plan_are_computed_once_per_batch():
    def build(t, x, lengths):
        mask = t.function(torch.zeros, 12, 12, dtype=torch.bool, device=DEVICE)
        longest = t.method("item", t.method("max", lengths))
        near = t.function(operator.lt, t.function(torch.arange, 12, device=DEVICE), longest)
        t.method("masked_fill_", mask, near, True)
        plan = t.function(torch.ops.fxpasses.attention_plan.default, mask)
        x = t.method("view", x, 1, 1, 12, 4)
        attention = t.graph.call_function(torch.ops.fxpasses.sparse_attention.default, (x, x, x, mask, plan))
        attention.meta["example_value"] = x.meta["example_value"].clone()  # FlexAttention needs a build for CUDA
        return attention

    program = program_of(build)
    assert targets(program.host) == ["max", "item"]
    assert targets(program.device) == ["zeros", "arange", "lt", "masked_fill_", "attention_plan.default"]
