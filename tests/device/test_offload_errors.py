"""Errors on the way of a moved tensor that are no want of device memory: each is told, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque

import pytest
import torch

import fxpasses
import fxpasses.inspect
from fxpasses import OffloadError
from fxpasses.offload import offload_activations
from fxpasses.offload.runtime import calibration, chain, device_copies, disk, pinned, stats
from fxpasses.offload.runtime.disk import DiskTier
from fxpasses.offload.runtime.host import HostTier
from fxpasses.report import Reason
from fxpasses.runtime import cuda_extras
from tests.device import simulated
from tests.device.races import SIM, SIZE, holds, moved
from tests.offload import programs
from tests.offload.programs import Decoder
from tests.offload.test_offload_activations import compiled
from tests.support import reports_of


@pytest.fixture(autouse=True)
def fresh(sim, monkeypatch):
    for devices in ("_tight", "_full"):
        monkeypatch.setattr(chain, devices, set())
    monkeypatch.setattr(pinned, "POOL", pinned.Pool())
    fxpasses.offload_stats(reset=True)
    yield
    torch._dynamo.reset()
    gc.collect()
    assert not chain._leaving and not chain._stored and not chain._ahead and in_use() == 0


def in_use() -> int:
    """Bytes of the pool, once what was given back is counted."""
    pinned.POOL._sort_returned()
    return pinned.POOL.used


def lost(*_: object, **__: object) -> None:
    raise RuntimeError("the device is lost")


# On the way out


def test_a_full_device_that_fails_otherwise_says_so(monkeypatch):
    chain._full.add(SIM)
    monkeypatch.setattr(chain, "Kept", lost)
    with pytest.raises(RuntimeError, match="the device is lost"):
        moved(1, HostTier(None))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_nothing_leaves_while_a_graph_is_captured_and_its_block_is_free_again(tier, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_extras, "is_capturing", lambda device: True)
    stores = HostTier(None) if tier == "host" else DiskTier(str(tmp_path))
    for _ in range(disk._STAGED + 1):  # a place on the way to the disk that is not given back would be waited for
        with pytest.raises(OffloadError, match="while a CUDA graph is captured"):
            moved(1, stores)
    assert in_use() == 0


def test_a_host_without_memory_leaves_the_tensor_on_the_device(monkeypatch):
    def none_left(size: int) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(pinned, "Block", none_left)
    with pytest.warns(UserWarning, match=f"the host has no {4 * SIZE} bytes.* stays on the device"):
        handles = moved(2, HostTier(None))
    assert in_use() == 0 and fxpasses.offload_stats().fallbacks == {"host": 2}
    assert [holds(chain.reload(handle, SIM, [], 1), number) for number, handle in enumerate(handles, 1)] == [True] * 2


def test_blocks_of_cuda_are_registered_with_the_driver_and_taken_back(monkeypatch):
    """There, a block is ordinary memory that the driver pins in place."""
    known: list[int] = []
    monkeypatch.setattr(cuda_extras, "is_used", lambda: True)
    monkeypatch.setattr(cuda_extras, "register", lambda memory: known.append(memory.data_ptr()))
    monkeypatch.setattr(cuda_extras, "unregister", lambda memory: known.remove(memory.data_ptr()))
    handles = moved(2, HostTier(None))
    assert sorted(known) == sorted(handle.data_ptr() for handle in handles)
    del handles
    gc.collect()
    pinned.POOL.clear()
    assert known == []


def test_a_device_that_shares_the_hosts_memory_keeps_its_tensors(monkeypatch):
    monkeypatch.setattr(device_copies, "unified_memory", lambda device: True)
    program = compiled(Decoder().to("sim"), "host")
    with fxpasses.inspect.record() as record, pytest.warns(UserWarning, match="shares its memory with the host"):
        programs.one_step(program, SIM)
    assert fxpasses.offload_stats().tensors_out == 0
    told = reports_of(record, offload_activations.NAME)
    assert {refusal.reason for report in told for refusal in report.refusals} == {Reason.WRONG_DEVICE}


# On the way back


@pytest.mark.parametrize("when", ["now", "ahead"])
def test_a_copy_that_fails_otherwise_says_so_and_the_next_one_works(when, monkeypatch):
    handles = moved(2, HostTier(None))
    with monkeypatch.context() as patched:
        if when == "now":
            patched.setattr(chain, "Fetched", lost)
        else:
            fetched = iter([chain.Fetched, lost])
            patched.setattr(chain, "Fetched", lambda *arguments: next(fetched)(*arguments))
        with pytest.raises(RuntimeError, match="the device is lost"):
            chain.reload(handles[1], SIM, handles[:1], 1)
    assert not chain._full and not chain._tight
    assert holds(chain.reload(handles[1], SIM, handles[:1], 1), 2) and holds(chain.reload(handles[0], SIM, [], 1), 1)


def test_a_handle_that_was_replaced_by_a_copy_is_told():
    (handle,) = moved(1, HostTier(None))
    with pytest.raises(OffloadError, match=f"{4 * SIZE} bytes does not come back to sim:0: .*hooks on saved tensors"):
        chain.reload(handle.clone(), SIM, [], 1)


def test_hooks_on_saved_tensors_that_keep_copies_are_told():
    program = compiled(Decoder().to("sim"), "host")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        loss = program(programs.inputs(SIM).requires_grad_())
    with pytest.raises(OffloadError, match="hooks on saved tensors"):
        loss.backward()


def test_a_second_backward_pass_over_what_was_kept_needs_retain_graph():
    chain._full.add(SIM)
    program = compiled(Decoder().to("sim"), "host")
    with pytest.warns(UserWarning, match="stay on it"):
        loss = program(programs.inputs(SIM).requires_grad_())
    handles = [stored for stored in chain._stored.values() if isinstance(stored, chain.Kept)]
    loss.backward()
    assert handles and all(kept._bytes is None for kept in handles)
    with pytest.raises(OffloadError, match="pass retain_graph=True to all but the last"):
        handles[0].take(torch.empty(4))
    handles.clear()


def test_a_file_that_lost_its_end_is_told(tmp_path, monkeypatch):
    files: list[disk.UnlinkedFile] = []
    write = disk.UnlinkedFile.write
    monkeypatch.setattr(disk.UnlinkedFile, "write", lambda file, data: (write(file, data), files.append(file))[0])
    (handle,) = moved(1, DiskTier(str(tmp_path)))
    torch.accelerator.synchronize(SIM)
    disk._thread("write").submit(int).result()
    os.ftruncate(files[0].number, 100)
    with pytest.raises(OffloadError, match=f"{4 * SIZE} bytes does not come back .* ends after 100 bytes"):
        chain.reload(handle, SIM, [], 1)


def test_a_read_that_has_not_begun_is_called_off_and_its_block_is_free_again(tmp_path, monkeypatch):
    gate, begun = threading.Event(), threading.Event()
    read = disk.UnlinkedFile.read

    def slow(file, data):
        begun.set()
        assert gate.wait(60)
        read(file, data)

    handles = moved(3, DiskTier(str(tmp_path)))
    held = chain.reload(handles[2], SIM, [], 2)
    monkeypatch.setattr(disk.UnlinkedFile, "read", slow)
    for handle in handles[:2]:
        chain._read_ahead(chain._key(handle), handle, SIM, 2)
    assert begun.wait(60)
    del handle, handles
    gc.collect()
    assert not chain._ahead and in_use() == 4 * SIZE  # of the read that has begun
    gate.set()
    disk._thread("read").submit(int).result()
    assert in_use() == 0 and holds(held, 3)


# Threads that come first


class TakenMeanwhile(deque):
    """There is something in it, until one looks."""

    def __bool__(self) -> bool:
        return True


def test_the_time_of_a_wait_that_another_thread_counts_is_counted_once(monkeypatch):
    monkeypatch.setattr(stats, "_device_waits", TakenMeanwhile())
    assert fxpasses.offload_stats().seconds_exposed == 0


def test_a_slot_that_another_thread_frees_is_free(monkeypatch):
    class Changing(dict):
        others = 1

        def __iter__(self):
            if self.others:
                self.others -= 1
                raise RuntimeError("dictionary changed size during iteration")
            return super().__iter__()

    handles = moved(2, HostTier(None))
    monkeypatch.setattr(chain, "_ahead", Changing())
    chain._read_ahead(chain._key(handles[0]), handles[0], SIM, 1)
    chain._read_ahead(chain._key(handles[1]), handles[1], SIM, 1)
    assert list(chain._ahead) == [chain._key(handles[1])]
    assert holds(chain.reload(handles[1], SIM, [], 1), 2) and holds(chain.reload(handles[0], SIM, [], 1), 1)


# Rates


def test_rates_of_a_device_are_measured_and_guessed_where_it_has_no_memory():
    measure = calibration.rates.__wrapped__
    simulated.limit(0, simulated.allocated() + 4096)
    assert measure("host", "", SIM) == calibration._FALLBACK
    simulated.limit(0, None)
    assert measure("host", "", SIM) != calibration._FALLBACK
    assert in_use() == 0 and fxpasses.offload_stats().seconds_exposed == 0
