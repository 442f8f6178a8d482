"""Activations moved from the device and back: bit for bit what they were, however late or early the copies run."""

from __future__ import annotations

import gc

import pytest
import torch

import fxpasses
from tests.device import simulated
from tests.device.simulated import counts
from tests.offload import programs
from tests.offload.programs import Decoder
from tests.offload.test_offload_activations import CASES, assert_equal, compiled, numbers

SIM = torch.device("sim", 0)
SHORT = {
    ("accumulation, mixed", "host", "early"), ("retain_graph", "disk", "late"), ("autocast", "host", "late"),
    ("backward elsewhere", "host", "late"), ("two backward passes at once", "disk", "early"),
    ("an exception in backward", "host", "early"), ("strides, gaps, integers; dynamic sizes", "host", "late"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_left(sim):
    fxpasses.offload_stats(reset=True)
    yield
    torch._dynamo.reset()
    gc.collect()
    assert fxpasses.offload_stats().bytes_held == 0


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("name", "tier", "order"),
    [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.slow)
        for case in sorted(SHORT | {(name, *rest) for name in CASES for rest in (("host", "late"), ("disk", "early"))})
    ],
)
def test_results_are_equal_bit_for_bit(name, tier, order):
    simulated.set_order(order)
    make, step = CASES[name]
    expected = numbers(make, step, "sim", "off")
    buffers = {"late": 2, "early": 3}[order]
    assert_equal(numbers(make, step, "sim", tier, buffers=buffers), expected)
    stats = fxpasses.offload_stats()
    assert stats.tensors_out >= 2 and stats.tensors_in >= 2 and not stats.fallbacks


def test_a_warm_step_moves_each_activation_once_each_way_and_the_host_waits_for_none():
    """Two streams of its own beside that of compute."""
    program = compiled(Decoder().to("sim"), "host")
    x = programs.inputs(SIM)
    for _ in range(2):
        program(x).backward()
    fxpasses.offload_stats(reset=True)
    simulated.reset_counts()
    program(x).backward()
    found, stats = counts(), fxpasses.offload_stats()
    assert found.stalls == 0 and found.streams == 3
    assert found.copies_out == stats.tensors_out == 2 and found.copies_in == stats.tensors_in == 2
    assert found.bytes_out == stats.bytes_out and found.bytes_in == stats.bytes_in


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "order"),
    [("host", "late"), ("disk", "early"), ("host", "early"), ("disk", "late")],
    indirect=["order"],
)
def test_two_devices_move_their_own(tier, order):
    def run(tier: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        found = []
        for device in ("sim:0", "sim:1"):
            program = compiled(Decoder().to(device), tier)
            losses = programs.accumulate_mixed(program, torch.device(device))
            found += [loss.detach() for loss in losses] + [p.grad for p in program.parameters()]
        return found

    expected = run("off")
    assert_equal(run(tier), expected)
    assert not fxpasses.offload_stats().fallbacks


def test_the_peak_of_device_memory_is_lower():
    def peak(tier: str) -> int:
        torch._dynamo.reset()
        program = compiled(Decoder(5).to("sim"), tier)
        x = programs.inputs(SIM, 512)
        for _ in range(2):
            simulated.reset_counts()
            program(x).backward()
        return simulated.most_allocated()

    assert peak("host") < peak("off")


def test_exposed_time_is_what_the_device_waited_for():
    """In the timed order, with a bus so slow that every copy is waited for."""
    program = compiled(Decoder().to("sim"), "host", buffers=1)
    x = programs.inputs(SIM)
    program(x).backward()
    simulated.set_order("timed")
    simulated.costs(out=2e5, in_=1e5)
    fxpasses.offload_stats(reset=True)
    program(x).backward()
    stats = fxpasses.offload_stats()
    seconds = stats.bytes_out / 2e5 + stats.bytes_in / 1e5
    assert stats.seconds_exposed > 0.6 * seconds
