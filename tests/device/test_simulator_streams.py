"""Streams and events of the simulated device, in each of its orders."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.device import simulated
from tests.device.simulated import counts

SIZE = 1000


def beside(device: str = "sim:0") -> tuple[torch.Stream, torch.Stream]:
    """A stream of its own, and the current one."""
    return torch.Stream(device=device), torch.accelerator.current_stream(torch.device(device))


def filled(value: float, pin_memory: bool = True) -> torch.Tensor:
    return torch.full((SIZE,), value, pin_memory=pin_memory)


def test_streams_are_current_by_thread_and_device():
    stream, main = beside("sim:1")
    assert stream != main and stream.device == torch.device("sim", 1)
    with stream:
        assert torch.accelerator.current_stream(torch.device("sim:1")) == stream
        assert torch.accelerator.current_stream(torch.device("sim:0")).stream_id == 0
        seen: list[torch.Stream] = []
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream(torch.device("sim:1"))))
        thread.start()
        thread.join()
        assert seen == [main]
    assert torch.accelerator.current_stream(torch.device("sim:1")) == main


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_in_that_is_not_waited_for_comes_too_late(waits):
    stream, main = beside()
    target = torch.zeros(SIZE, device="sim")
    stream.wait_stream(main)
    with stream:
        target.copy_(filled(1.0), non_blocking=True)
    if waits:
        main.wait_stream(stream)
    assert (target.sum().item() == SIZE) == waits
    stream.synchronize()  # the target is there until it has been written


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_out_that_does_not_wait_for_the_kernel_comes_too_early(waits):
    simulated.set_order("early")
    stream, main = beside()
    source, target = torch.zeros(SIZE, device="sim"), filled(0.0)
    source.add_(1)
    if waits:
        stream.wait_stream(main)
    with stream:
        target.copy_(source, non_blocking=True)
        event = stream.record_event()
    event.synchronize()
    assert (target.sum() == SIZE) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_a_host_that_does_not_wait_reads_nonsense(waits):
    target = torch.empty(SIZE, pin_memory=True)
    target.copy_(torch.ones(SIZE, device="sim"), non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    assert not event.query()
    if waits:
        event.synchronize()
    assert (target.sum() == SIZE) == waits


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_another_stream_still_reads_is_used_again_unless_that_is_recorded(recorded):
    stream, main = beside()
    source, target = torch.ones(SIZE, device="sim"), filled(0.0)
    stream.wait_stream(main)
    with stream:
        target.copy_(source, non_blocking=True)
        event = stream.record_event()
    if recorded:
        source.record_stream(stream)
    del source
    torch.zeros(SIZE, device="sim").sum().item()
    event.synchronize()
    assert (target.sum() == SIZE) == recorded


def test_memory_that_is_written_to_after_its_release_is_counted():
    stream, main = beside()
    target = torch.zeros(SIZE, device="sim")
    stream.wait_stream(main)
    with stream:
        target.copy_(filled(1.0), non_blocking=True)
    del target
    main.synchronize()
    stream.synchronize()
    torch.zeros(SIZE, device="sim").sum().item()
    assert counts().late_writes == 1
    simulated.reset_counts()


def test_the_random_order_is_that_of_its_seed():
    def run(seed: int) -> list[float]:
        simulated.set_order("random", seed)
        stream, main = beside()
        targets = [torch.zeros(SIZE, device="sim") for _ in range(8)]
        main.synchronize()
        for target in targets:
            with stream:
                target.copy_(filled(1.0), non_blocking=True)
            target.add_(1)
        torch.accelerator.synchronize()
        return [target[0].item() for target in targets]

    found = [run(seed) for seed in range(12)]
    assert {value for values in found for value in values} == {1.0, 2.0}  # both orders of copy and kernel
    assert found == [run(seed) for seed in range(12)]


def test_in_the_timed_order_copies_take_the_time_of_their_bytes_beside_kernels():
    simulated.set_order("timed")
    simulated.costs(out=4e6, in_=8e6)
    stream, main = beside()
    source, target = torch.ones(100_000, device="sim"), torch.empty(100_000, pin_memory=True)
    stream.wait_stream(main)
    before, after = (torch.Event(device="sim", enable_timing=True) for _ in range(2))
    simulated.reset_counts()
    started = time.perf_counter()
    before.record(stream)
    with stream:
        target.copy_(source, non_blocking=True)  # 0.1 s
        source.copy_(target, non_blocking=True)  # 0.05 s
    after.record(stream)
    simulated.sleep(0.12)
    assert not after.query()
    after.synchronize()
    main.synchronize()
    assert time.perf_counter() - started >= 0.15
    assert before.elapsed_time(after) > 149.99  # 150, of clocks whose last digits are rounded
    assert counts().streams == 2 and counts().synchronizations == 2


def test_in_the_timed_order_a_thread_that_wakes_late_delays_nothing_after_it():
    simulated.set_order("timed")
    before, after = (torch.Event(device="sim", enable_timing=True) for _ in range(2))
    simulated.sleep(0.2)  # meanwhile all of the rest is queued, also by a host that is held up
    before.record()
    for _ in range(1000):
        simulated.sleep(0.0001)
    after.record()
    torch.accelerator.synchronize()
    assert 99.9 < before.elapsed_time(after) < 130  # a thread sleeps some 0.06 ms too long, a thousand times


def test_devices_have_streams_of_their_own():
    one, other = torch.ones(SIZE, device="sim:0"), torch.ones(SIZE, device="sim:1")
    assert (one + 1).sum().item() == (other + 1).sum().item()
    simulated.reset_counts()
    moved = (one + 2).to("sim:1", non_blocking=True)
    del one
    assert moved.device.index == 1 and counts().stalls == 0 and counts().copies_between == 1
    assert torch.equal((moved + other).cpu(), torch.full((SIZE,), 4.0))


def test_backward_runs_on_the_streams_of_forward(order):
    stream, main = beside()
    x = torch.ones(SIZE, device="sim", requires_grad=True)
    stream.wait_stream(main)
    with stream:
        y = (x * 2).sin()
    main.wait_stream(stream)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), 2 * torch.full((SIZE,), 2.0).cos())
