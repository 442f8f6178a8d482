"""What goes wrong while activations move from a device: nothing is pinned, memory runs out, a backward pass stops."""

from __future__ import annotations

import functools
import gc
import itertools
import time

import pytest
import torch

import fxpasses
from fxpasses.base import once
from fxpasses.offload.runtime import chain, disk, pinned
from fxpasses.offload.runtime.disk import DiskTier
from fxpasses.offload.runtime.host import HostTier
from tests.device import races, simulated
from tests.device.races import SIM, SIZE, holds
from tests.device.simulated import counts
from tests.offload import programs
from tests.offload.programs import Decoder
from tests.offload.test_offload_activations import assert_equal, compiled, numbers

TIERS = {"host": lambda path: HostTier(None), "disk": lambda path: DiskTier(str(path))}


@pytest.fixture(autouse=True)
def fresh(sim, monkeypatch):
    monkeypatch.setattr(once, "_given", set())
    for devices in ("_tight", "_full"):
        monkeypatch.setattr(chain, devices, set())
    monkeypatch.setattr(pinned, "POOL", pinned.Pool())
    fxpasses.offload_stats(reset=True)
    yield
    torch._dynamo.reset()
    gc.collect()
    assert not chain._leaving and not chain._stored and not chain._ahead and fxpasses.offload_stats().bytes_held == 0


moved = functools.partial(races.moved, first=0)  # tensors of 0, 1, ...


@pytest.mark.parametrize("tier", TIERS)
def test_a_source_may_be_used_again_once_it_is_settled(tier, tmp_path, order):
    handles = moved(4, TIERS[tier](tmp_path))
    torch.full((SIZE,), -1.0, device=SIM)  # in the memory of a source
    for number in (3, 2, 1, 0):
        assert holds(chain.reload(handles[number], SIM, handles[max(number - 1, 0) : number], 1), number)


@pytest.mark.parametrize("tier", TIERS)
def test_without_pinned_memory_copies_block_and_numbers_stay(tier, tmp_path):
    simulated.refuse_pinning()
    with pytest.warns(UserWarning, match="cannot be pinned .*refused"):
        handles = moved(2, TIERS[tier](tmp_path))
    found = [chain.reload(handle, SIM, [], 1) for handle in handles]
    assert all(holds(tensor, number) for number, tensor in enumerate(found))
    assert counts().blocking_copies >= 4 and fxpasses.offload_stats().fallbacks["pinned"] >= 1


@pytest.mark.parametrize("tier", TIERS)
def test_no_memory_to_read_ahead(tier, tmp_path, order):
    handles = moved(4, TIERS[tier](tmp_path))
    simulated.refuse(at_least=4 * SIZE, after=1)
    with pytest.warns(UserWarning, match="sim:0 has no 16384 bytes free to read an activation ahead"):
        found = chain.reload(handles[3], SIM, handles[2:3], 1)
    assert holds(found, 3) and chain._tight == {SIM}
    for number in (2, 1, 0):
        assert holds(chain.reload(handles[number], SIM, handles[max(number - 1, 0) : number], 1), number)
    assert fxpasses.offload_stats().fallbacks == {"one_buffer": 1}


@pytest.mark.parametrize("tier", TIERS)
def test_what_was_read_ahead_makes_room_for_what_is_needed(tier, tmp_path, order, monkeypatch):
    """Also where a slow disk is still at it."""
    read = disk.UnlinkedFile.read
    monkeypatch.setattr(disk.UnlinkedFile, "read", lambda self, data: (time.sleep(0.1), read(self, data)))
    handles = moved(3, TIERS[tier](tmp_path))
    simulated.limit(0, simulated.allocated() + 2 * 4 * SIZE)
    first = chain.reload(handles[2], SIM, handles[1:2], 1)  # both fill the device
    assert holds(chain.reload(handles[0], SIM, [], 1), 0)
    assert holds(first, 2) and not chain._ahead and not chain._full
    del first
    assert holds(chain.reload(handles[1], SIM, [], 1), 1)


@pytest.mark.parametrize("tier", TIERS)
def test_no_memory_for_what_is_needed_fails_the_step_and_the_next_ones_keep_it_on_the_device(tier, tmp_path, order):
    handles = moved(2, TIERS[tier](tmp_path))
    simulated.refuse(at_least=4 * SIZE, times=2)
    with pytest.raises(torch.OutOfMemoryError, match="sim:0 out of memory"):
        chain.reload(handles[1], SIM, [], 1)
    assert chain._full == {SIM}
    with pytest.warns(UserWarning, match="from now on they stay on it"):
        kept = moved(2, TIERS[tier](tmp_path))
    assert all(holds(chain.reload(handle, SIM, [], 1), number) for number, handle in enumerate(kept))
    assert all(holds(chain.reload(handle, SIM, [], 1), number) for number, handle in enumerate(handles))


def test_where_a_full_device_has_no_memory_to_keep_a_tensor_it_is_moved(tmp_path):
    chain._full.add(SIM)
    simulated.refuse(at_least=4 * SIZE, after=1)
    (handle,) = moved(1, HostTier(None))
    assert holds(chain.reload(handle, SIM, [], 1), 0) and fxpasses.offload_stats().tensors_out == 1


def test_what_is_kept_is_copied_for_another_stream(order):
    chain._full.add(SIM)
    with pytest.warns(UserWarning, match="stay on it"):
        handles = moved(2, HostTier(None))
    stream, main = torch.Stream(device=SIM), torch.accelerator.current_stream(SIM)
    stream.wait_stream(main)
    with stream:
        found = [chain.reload(handle, SIM, [], 1) for handle in handles]
        del handles
        doubled = [tensor * 2 for tensor in found]
        event = stream.record_event()
    torch.full((SIZE,), -1.0, device=SIM)
    event.synchronize()
    with stream:
        assert all(holds(tensor, 2 * number) for number, tensor in enumerate(doubled))


@pytest.mark.parametrize("tier", TIERS)
def test_what_was_read_ahead_on_another_stream_is_read_again(tier, tmp_path, order):
    handles = moved(3, TIERS[tier](tmp_path))
    assert holds(chain.reload(handles[2], SIM, handles[1:2], 1), 2)
    stream, main = torch.Stream(device=SIM), torch.accelerator.current_stream(SIM)
    stream.wait_stream(main)
    with stream:
        found = chain.reload(handles[1], SIM, handles[0:1], 1)
        assert holds(found, 1)
    main.wait_stream(stream)
    assert holds(chain.reload(handles[0], SIM, [], 1), 0)


@pytest.mark.parametrize("tier", TIERS)
def test_what_was_read_ahead_for_nothing_is_given_back_behind_its_copy(tier, tmp_path, order):
    handles = moved(2, TIERS[tier](tmp_path))
    chain.reload(handles[1], SIM, handles[:1], 1)
    del handles
    gc.collect()
    assert not chain._ahead
    again = [torch.full((SIZE,), -1.0, device=SIM) for _ in range(3)]
    torch.accelerator.synchronize(SIM)
    assert all(holds(tensor, -1) for tensor in again)


def test_blocks_of_the_pool_are_written_behind_the_copies_that_read_them(order):
    for _ in range(3):
        handles = moved(3, HostTier(None))
        found = [chain.reload(handle, SIM, [], 1) for handle in handles]
        del handles
        gc.collect()
        assert all(holds(tensor, number) for number, tensor in enumerate(found))
    pinned.POOL.clear()
    assert pinned.POOL.used == pinned.POOL.free == 0


FAILING = {("host", "forward", "late"), ("host", "backward", "early"), ("disk", "backward", "late")}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("tier", "when", "order"),
    [
        pytest.param(*case, marks=() if case in FAILING else pytest.mark.slow)
        for case in itertools.product(["host", "disk"], ["forward", "backward"], ["late", "early"])
    ],
    indirect=["order"],
)
def test_a_step_without_memory_fails_as_pytorch_has_it_and_the_next_one_is_right(tier, when, order):
    expected = numbers(Decoder, programs.one_step, "sim", "off")
    torch._dynamo.reset()
    torch.manual_seed(0)
    program = compiled(Decoder().to("sim"), tier)
    program(programs.inputs(SIM).requires_grad_()).backward()
    for after in range(0, 24, 5):
        program.zero_grad()
        x = programs.inputs(SIM).requires_grad_()
        if when == "forward":
            simulated.refuse(at_least=1000, after=after)
            with pytest.raises(torch.OutOfMemoryError):
                program(x).backward()
        else:
            loss = program(x)
            simulated.refuse(at_least=1000, after=after, times=3)
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward()
            del loss
        simulated.refuse(times=0)
        del x
    program.zero_grad()
    loss = programs.one_step(program, SIM)
    found = [loss.detach(), *(p.grad for p in program.parameters())]
    assert_equal(found, expected)
