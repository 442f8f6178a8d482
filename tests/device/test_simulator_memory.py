"""Memory of the simulated device: what the host may not touch, what is pinned, and what runs out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.device import simulated
from tests.device.simulated import counts

SIZE = 1024


@pytest.mark.parametrize("access", ["read", "write"])
def test_a_host_that_touches_the_devices_memory_is_stopped(access):
    action = "ctypes.string_at(address, 4)" if access == "read" else "ctypes.memset(address, 0, 4)"
    program = f"""
import ctypes, torch
from tests.device import simulated
simulated.load()
with simulated.plugged_in():
    tensor = torch.ones(4, device="sim")
    address = tensor.data_ptr()
    tensor.sum().item()
    print("still there", flush=True)
    {action}
    print("not stopped", flush=True)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode < 0 and found.stdout == "still there\n", found.stderr


def test_pinned_memory_is_known_and_copies_from_it_do_not_block():
    pageable = torch.arange(SIZE)
    pinned = pageable.pin_memory()
    assert pinned.is_pinned() and pinned[3:].is_pinned() and not pageable.is_pinned()
    simulated.reset_counts()
    found = pinned.to("sim", non_blocking=True)
    assert counts().stalls == 0 and (counts().copies_in, counts().bytes_in) == (1, 8 * SIZE)
    pageable.to("sim", non_blocking=True)
    pinned.to("sim")
    assert counts().blocking_copies == 2 and counts().copies_in == 3
    torch.empty(SIZE, dtype=torch.int64).copy_(found, non_blocking=True)
    assert counts().blocking_copies == 3 and (counts().copies_out, counts().bytes_out) == (1, 8 * SIZE)
    assert found.to("cpu", non_blocking=True).is_pinned()  # PyTorch sees to that
    assert counts().blocking_copies == 3


def test_pinned_memory_is_kept_for_the_copies_that_read_it():
    found = torch.full((SIZE,), 3.0).pin_memory().to("sim", non_blocking=True)
    torch.full((SIZE,), 4.0).pin_memory()
    assert found.sum().item() == 3 * SIZE


def test_pinning_can_be_refused():
    simulated.refuse_pinning()
    with pytest.raises(RuntimeError, match="pinning of 4096 bytes is refused"):
        torch.empty(SIZE, pin_memory=True)


def test_beyond_its_limit_a_device_is_out_of_memory():
    before = simulated.allocated()
    simulated.limit(0, before + 3 * 4 * SIZE)
    kept = [torch.zeros(SIZE, device="sim") for _ in range(3)]
    with pytest.raises(torch.OutOfMemoryError, match="sim:0 out of memory: tried to allocate 4096 bytes"):
        torch.zeros(SIZE, device="sim")
    torch.zeros(SIZE, device="sim:1")
    del kept[0]
    kept.append(torch.zeros(SIZE, device="sim"))
    assert simulated.allocated() == before + 3 * 4 * SIZE == simulated.most_allocated()


def test_allocations_can_be_refused_by_number():
    simulated.refuse(at_least=4 * SIZE, after=1)
    torch.zeros(SIZE, device="sim")
    torch.zeros(8, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(SIZE, device="sim")
    torch.zeros(SIZE, device="sim")


def test_released_memory_is_filled_with_nonsense_behind_the_work_that_used_it():
    first = torch.ones(SIZE, device="sim")
    total = first.sum()
    address = first.data_ptr()
    del first
    again = torch.empty(SIZE, device="sim")
    assert again.data_ptr() == address and total.item() == SIZE
    assert again.isnan().all().item()


def test_without_a_device_pytorch_finds_none():
    simulated._device.sim_plug_in(0)
    try:
        assert not torch.accelerator.is_available() and torch.accelerator.device_count() == 0
    finally:
        simulated._device.sim_plug_in(1)
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2
