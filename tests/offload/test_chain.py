"""The life of a moved tensor: what comes back, what fails and how, and that nothing is left, grows or hangs."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import stat
import subprocess
import threading
import warnings
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import fxpasses
from fxpasses import OffloadError
from fxpasses.base import once
from fxpasses.offload.runtime import chain, device_copies, disk, operators, pinned
from fxpasses.offload.runtime.disk import DiskTier, UnlinkedFile
from fxpasses.offload.runtime.host import HostTier

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh() -> Any:
    fxpasses.offload_stats(reset=True)
    yield
    if chain._stored or chain._ahead:
        gc.collect()
    assert not chain._leaving and not chain._stored and not chain._ahead and fxpasses.offload_stats().bytes_held == 0


def moved(tensors: list[torch.Tensor], tier: DiskTier | HostTier) -> list[torch.Tensor]:
    handles = [chain.store(tensor, tier) for tensor in tensors]
    for handle, tensor in zip(handles, tensors, strict=True):
        chain.settle(handle, tensor)
    return handles


def brought_back(handles: list[torch.Tensor], slots: int = 1) -> list[torch.Tensor]:
    ahead = lambda i: handles[1 : 1 + slots] if i == 0 else handles[i + slots : i + slots + 1]  # noqa: E731
    found = []
    for number, handle in enumerate(handles):
        found.append(chain.reload(handle, CPU, ahead(number) if slots else [], slots))
        assert len(chain._ahead) <= slots
    return found


SHAPES: dict[str, Any] = {
    "contiguous": lambda: torch.randn(5, 7),
    "transposed": lambda: torch.randn(5, 7).t(),
    "gaps": lambda: torch.randn(6, 8)[1:, ::2],
    "expanded": lambda: torch.randn(6, 1).expand(6, 9),
    "no dimensions": lambda: torch.randn(()),
    "no elements": lambda: torch.randn(0, 4),
    "bool": lambda: torch.randn(9) > 0,
    "bfloat16": lambda: torch.randn(9, 3).bfloat16(),
    "int64": lambda: torch.arange(11),
    "complex": lambda: torch.randn(5, dtype=torch.complex64),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_comes_back_as_it_was(name, tmp_path):
    source = SHAPES[name]()
    handle = chain.store(source, DiskTier(str(tmp_path)))
    chain.settle(handle, source)
    expected = source.clone(memory_format=torch.preserve_format)
    assert (handle.shape, handle.stride(), handle.dtype) == (source.shape, source.stride(), source.dtype)
    for _ in range(2):  # as with retain_graph
        found = chain.reload(handle, CPU, [], 1)
        assert found.stride() == source.stride() and found.dtype == source.dtype and torch.equal(found, expected)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("slots", [0, 1, 2, 5])
def test_the_chain_never_takes_more_than_its_slots(slots, tmp_path):
    sources = [torch.randn(100) for _ in range(6)]
    handles = moved(sources, DiskTier(str(tmp_path)))
    for source, found in zip(sources, brought_back(handles, slots), strict=True):
        assert torch.equal(source, found)


def test_chains_that_alternate_stay_within_the_slots(tmp_path):
    chains = [[torch.randn(50) for _ in range(5)] for _ in range(3)]
    handles = [moved(sources, DiskTier(str(tmp_path))) for sources in chains]
    for number in range(5):
        for sources, own in zip(chains, handles, strict=True):
            found = chain.reload(own[number], CPU, own[number + 1 : number + 2], 1)
            assert torch.equal(found, sources[number]) and len(chain._ahead) <= 1


def test_what_was_read_ahead_for_nothing_goes_with_its_handle(tmp_path):
    handles = moved([torch.randn(50) for _ in range(2)], DiskTier(str(tmp_path)))
    chain.reload(handles[0], CPU, handles[1:], 1)
    assert len(chain._ahead) == 1
    del handles
    gc.collect()
    assert not chain._ahead


def test_files_are_private_and_have_no_name(tmp_path):
    file, mapped = UnlinkedFile.create(str(tmp_path), 4096)
    state = os.fstat(file.number)
    assert stat.S_IMODE(state.st_mode) == 0o600 and state.st_nlink == 0 and state.st_blocks * 512 >= 4096
    assert mapped.numel() == 4096 and os.listdir(tmp_path) == []
    number = file.number
    del file, mapped
    with pytest.raises(OSError):
        os.fstat(number)


def test_without_nameless_files_the_name_goes_at_once(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    file, _ = UnlinkedFile.create(str(tmp_path), 4096)
    assert stat.S_IMODE(os.fstat(file.number).st_mode) == 0o600 and os.listdir(tmp_path) == []


def test_without_a_way_to_reserve_space_the_file_has_its_size(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    file, mapped = UnlinkedFile.create(str(tmp_path), 4096)
    assert os.fstat(file.number).st_size == mapped.numel() == 4096


def test_a_slow_disk_is_waited_for(tmp_path, monkeypatch):
    """The source is overwritten right after `settle`, as a compiler does that uses its memory again."""
    gate = threading.Event()
    write = UnlinkedFile.write

    def slow(self: UnlinkedFile, data: torch.Tensor) -> None:
        assert gate.wait(60)
        write(self, data)

    monkeypatch.setattr(UnlinkedFile, "write", slow)
    source = torch.randn(1000)
    expected = source.clone()
    handle = chain.store(source, DiskTier(str(tmp_path)))
    threading.Timer(0.2, gate.set).start()
    chain.settle(handle, source)
    source.zero_()
    assert torch.equal(chain.reload(handle, CPU, [], 1), expected)
    assert fxpasses.offload_stats().seconds_exposed > 0


@pytest.mark.parametrize("way", ["write", "read"])
def test_a_thread_refers_to_no_tensor_when_what_it_did_is_waited_for(way, tmp_path, monkeypatch):
    """Or the memory would be freed whenever the thread gets to it, next to what the step has made by then."""
    gate, alive = threading.Event(), []
    run = getattr(UnlinkedFile, way)
    source = torch.arange(1000).to(torch.uint8)

    def slow(self: UnlinkedFile, data: torch.Tensor) -> None:
        assert gate.wait(60)
        run(self, data)

    if way == "write":
        monkeypatch.setattr(UnlinkedFile, way, slow)
    _, stored = DiskTier(str(tmp_path)).store(source)
    if way == "read":
        stored.settle()
        source = torch.empty(1000, dtype=torch.uint8)
        monkeypatch.setattr(UnlinkedFile, way, slow)
        reading = stored.fetch(source)
        reading._held.clear()
        future: Future[Any] = reading._future
    else:
        future = stored._writing
    left = weakref.ref(source)
    future.add_done_callback(lambda _: alive.append(left() is not None))
    del source
    gate.set()
    future.result()
    assert alive == [False]


def test_a_disk_that_is_full_from_the_start_keeps_tensors_in_memory(tmp_path):
    """A file system of 64 KiB where one can be mounted, else a limit on the size of files: both are real errors."""
    sources = [torch.randn(6000) for _ in range(4)]
    program = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    try:
        mounted = subprocess.run(program, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.warns(UserWarning, match=f"not written to the file system {tmp_path}.*No space left") as caught:
            handles = moved(sources, DiskTier(str(tmp_path)))
        assert len(caught) == 1
        for source, found in zip(sources, brought_back(handles), strict=True):
            assert torch.equal(source, found)
        counts = fxpasses.offload_stats()
        assert counts.fallbacks == {"disk": 2} and counts.tensors_out == 2
        del handles
        gc.collect()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_limit_on_files_keeps_tensors_in_memory(tmp_path):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    source = torch.randn(6000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.warns(UserWarning, match="stays in memory"):
            handle = chain.store(source, DiskTier(str(tmp_path)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(chain.reload(handle, CPU, [], 1), source)


def test_an_error_while_writing_keeps_the_tensor_in_memory(tmp_path, monkeypatch):
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    source = torch.randn(6000)
    expected = source.clone()
    handle = chain.store(source, DiskTier(str(tmp_path)))
    with pytest.warns(UserWarning, match="24000 bytes is not written"):
        chain.settle(handle, source)
    source.zero_()
    assert torch.equal(chain.reload(handle, CPU, [], 1), expected)
    assert fxpasses.offload_stats().fallbacks == {"disk": 1}


def test_a_directory_that_is_gone_keeps_tensors_in_memory(tmp_path):
    with pytest.warns(UserWarning, match="No such file or directory"):
        handle = chain.store(torch.ones(100), DiskTier(str(tmp_path / "gone")))
    assert chain.reload(handle, CPU, [], 1).sum() == 100


def test_an_error_while_reading_names_the_file_system_and_the_bytes(tmp_path, monkeypatch):
    handles = moved([torch.randn(1000), torch.randn(1000)], DiskTier(str(tmp_path)))

    def broken(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", broken)
        with pytest.raises(OffloadError, match=f"4000 bytes .* {disk.file_system(str(tmp_path))} .*Input/output error"):
            chain.reload(handles[0], CPU, handles[1:], 1)
    chain.reload(handles[0], CPU, handles[1:], 1)  # and once the disk is well again


def test_several_graphs_read_on_with_what_the_graph_before_stored_last(tmp_path):
    """Two forward graphs store two tensors each; their backward graphs run in the opposite order."""
    sources = [torch.randn(100) for _ in range(4)]
    handles = moved(sources, DiskTier(str(tmp_path)))
    for number, upcoming, ahead in ((3, [2], [2]), (2, [], [1]), (1, [0], [0]), (0, [], [])):
        found = chain.reload(handles[number], CPU, [handles[n] for n in upcoming], 1, onward=True)
        assert torch.equal(found, sources[number])
        assert list(chain._ahead) == [chain._key(handles[n]) for n in ahead]


def test_what_is_back_already_is_not_read_on(tmp_path):
    sources = [torch.randn(100) for _ in range(4)]
    handles = moved(sources, DiskTier(str(tmp_path)))
    chain.reload(handles[2], CPU, [handles[3]], 1, onward=True)  # the second graph needs its tensors in forward's order
    chain.reload(handles[3], CPU, [], 1, onward=True)
    assert list(chain._ahead) == [chain._key(handles[1])]


class FullDevice:
    """Stands in for `chain.Fetched` on a device that has room for `room` tensors, and then for none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room, self.asked, self._fetch = 0, 0, chain.Fetched
        monkeypatch.setattr(chain, "Fetched", self)
        for devices in ("_tight", "_full"):
            monkeypatch.setattr(chain, devices, set())

    def __call__(self, *arguments: Any) -> Any:
        self.asked += 1
        if self.room == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.room -= 1
        return self._fetch(*arguments)


def test_no_memory_to_read_ahead_is_one_buffer_up_to_the_next_forward_pass(tmp_path, monkeypatch):
    device, sources = FullDevice(monkeypatch), [torch.randn(100) for _ in range(4)]
    for step in range(2):
        handles, device.asked = moved(sources, DiskTier(str(tmp_path))), 0
        with pytest.warns(UserWarning, match="no 400 bytes free to read") if step == 0 else contextlib.nullcontext():
            for number, source in enumerate(sources):
                device.room = 1
                found = chain.reload(handles[number], CPU, handles[number + 1 : number + 2], 1)
                assert torch.equal(found, source) and not chain._ahead
        assert device.asked == 5  # ahead once, and then no more
    assert fxpasses.offload_stats().fallbacks == {"one_buffer": 2}


def test_what_was_read_ahead_makes_room_for_what_is_needed(tmp_path, monkeypatch):
    device, sources = FullDevice(monkeypatch), [torch.randn(100) for _ in range(3)]
    handles = moved(sources, DiskTier(str(tmp_path)))
    device.room = 2
    chain.reload(handles[0], CPU, handles[1:2], 1)
    assert len(chain._ahead) == 1
    free_slots = chain._free_slots

    def freed(keep: int, now: bool = False) -> None:
        free_slots(keep, now)
        device.room = 1

    monkeypatch.setattr(chain, "_free_slots", freed)
    assert torch.equal(chain.reload(handles[2], CPU, [], 1), sources[2])
    assert not chain._ahead and not chain._full


def test_where_what_is_needed_found_no_memory_the_next_steps_keep_it_on_the_device(tmp_path, monkeypatch):
    device, source = FullDevice(monkeypatch), torch.randn(6, 4).t()
    (handle,) = moved([source], DiskTier(str(tmp_path)))
    with pytest.raises(torch.OutOfMemoryError):
        chain.reload(handle, CPU, [], 1)
    with pytest.warns(UserWarning, match="from now on they stay on it") as caught:
        handles = moved([source, source], DiskTier(str(tmp_path)))
    assert len(caught) == 1 and fxpasses.offload_stats().fallbacks == {"on_device": 2}
    for kept in handles:
        for _ in range(2):  # outside of a backward pass nothing says that it is the last one
            found = chain.reload(kept, CPU, [], 1)
            assert torch.equal(found, source) and found.stride() == source.stride()
    assert device.asked == 2  # no memory is asked for what stays
    assert fxpasses.offload_stats().tensors_out == 1


def test_what_is_kept_is_given_to_the_last_backward_pass_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(chain, "_full", {CPU})
    monkeypatch.setattr(once, "_given", {("offload", "on_device")})
    same: list[bool] = []

    class Move(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*moved([x.exp()], DiskTier(str(tmp_path))))
            return x.exp()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (handle,) = ctx.saved_tensors
            found = chain.reload(handle, CPU, [], 1)
            same.append(found.data_ptr() == handle.data_ptr())
            return gradient * found.add_(1.0)  # a backward graph may write to what it is given

    x = torch.randn(50, requires_grad=True)
    y = Move.apply(x).sum()
    for retain in (True, True, False):
        (gradient,) = torch.autograd.grad(y, x, retain_graph=retain)
        assert torch.equal(gradient, x.exp() + 1.0)
    assert same == [False, False, True]


def test_too_many_open_files_keep_tensors_in_memory(tmp_path):
    """Also where a descriptor is left for the file, and none to map it with."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest, taken = max(map(int, os.listdir("/proc/self/fd"))), [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < highest:
        taken.append(os.open(os.devnull, os.O_RDONLY))  # no gaps are left
    sources = [torch.randn(50) for _ in range(4)]
    for room in (2, 3):
        fxpasses.offload_stats(reset=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest, *taken) + 1 + room, limits[1]))
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                handles = moved(sources, DiskTier(str(tmp_path)))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(caught) == (room == 2)
        assert fxpasses.offload_stats().fallbacks == {"disk": 5 - room}  # each needs a second one for a moment
        for source, found in zip(sources, brought_back(handles), strict=True):
            assert torch.equal(source, found)
        del handles
    for number in taken:
        os.close(number)


def test_a_copy_of_the_source_that_a_compiler_made_is_noticed(tmp_path):
    """The copy out may still run while the memory of the source itself is used again."""
    source = torch.randn(100)
    handle = chain.store(source, DiskTier(str(tmp_path)))
    with pytest.raises(OffloadError, match="400 bytes cannot be moved: it was copied by the compiler"):
        chain.settle(handle, source.clone())


def test_a_copy_of_a_handle_that_a_compiler_made_is_noticed(tmp_path):
    """It is of memory that nothing has been written to yet."""
    source = torch.randn(100)
    handle = chain.store(source, DiskTier(str(tmp_path)))
    with pytest.raises(OffloadError, match=r"400 bytes cannot be moved: the place .* was copied by the compiler"):
        chain.settle(handle.clone(), source)
    chain.settle(handle, source)


def test_a_handle_that_was_replaced_by_a_copy_still_works(tmp_path):
    source = torch.randn(6, 4).t()
    (handle,) = moved([source], DiskTier(str(tmp_path)))
    assert torch.equal(chain.reload(handle.clone(memory_format=torch.preserve_format), CPU, [], 1), source)


def test_the_operators_are_what_their_fakes_say(tmp_path):
    source, other = torch.randn(4, 6).t(), torch.randn(3)
    arguments = (source, None, None, "disk", str(tmp_path), None, True)
    torch.library.opcheck(operators.offload, arguments, test_utils=("test_schema", "test_faketensor"))
    handle = operators.offload(*arguments)
    empty = torch.empty(0)  # it refuses a copy of another handle
    torch.library.opcheck(operators.settle, (empty, empty, other), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(
        operators.reload, (handle, [handle], other, CPU, 1, False), test_utils=("test_schema", "test_faketensor")
    )


# The host tier, with threads in place of an accelerator's streams


class ThreadCopies:
    """Copies that run late: only when something waits for them."""

    def __init__(self) -> None:
        self.pending: list[Any] = []

    def mark(self) -> Any:
        return LateCopy(torch.empty(0), torch.empty(0))

    def start(self, target: torch.Tensor, source: torch.Tensor, out: bool, after: Any, at: Any = None) -> Any:
        for ticket in after:
            ticket.wait()
        return LateCopy(target, source)

    def place(self) -> object:
        return "the only stream"


class LateCopy:
    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.target, self.source, self.done = target, source, False

    def wait(self) -> None:
        if not self.done:
            self.target.copy_(self.source)
            self.done = True

    synchronize = release = wait


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pinned.Pool:
    pool = pinned.Pool()
    monkeypatch.setattr(pinned, "POOL", pool)
    monkeypatch.setattr(device_copies, "of", lambda device: ThreadCopies())
    monkeypatch.setattr(pinned, "pin", lambda memory: memory)
    monkeypatch.setattr(pinned, "unpin", lambda memory: None)
    return pool


def test_the_host_tier_reuses_blocks_of_exact_size(host):
    for _ in range(3):
        sources = [torch.randn(1000), torch.randn(10, 33).t(), torch.randn(1000)]
        handles = moved(sources, HostTier(None))
        for source, found in zip(sources, brought_back(handles), strict=True):
            assert torch.equal(source, found) and source.stride() == found.stride()
        assert host.used == 4000 + 1320 + 4000
        del handles
        gc.collect()
    assert fxpasses.offload_stats().pool_bytes == 4000 + 1320 + 4000


def test_the_pool_does_not_grow_where_sizes_change(host):
    for size in (1000, 900, 800, 700, 1000):
        handles = moved([torch.randn(size), torch.randn(size)], HostTier(None))
        assert host.used + host.free <= 8000
        del handles
        gc.collect()
    host.clear()
    assert host.used == host.free == 0


def test_the_host_budget_keeps_tensors_on_the_device(host):
    sources = [torch.randn(1000) for _ in range(3)]
    with pytest.warns(UserWarning, match="host_budget is 8000 bytes"):
        handles = moved(sources, HostTier(8000))
    assert host.used == 8000
    for source, found in zip(sources, brought_back(handles), strict=True):
        assert torch.equal(source, found)
    assert fxpasses.offload_stats().fallbacks == {"host": 1}


def test_memory_that_cannot_be_pinned_is_pageable(host, monkeypatch):
    def exhausted(memory: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("cannot allocate pinned memory")

    monkeypatch.setattr(pinned, "pin", exhausted)
    sources = [torch.randn(1000) for _ in range(2)]
    with pytest.warns(UserWarning, match="4000 bytes of host memory cannot be pinned") as caught:
        handles = moved(sources, HostTier(None))
    assert len(caught) == 1 and fxpasses.offload_stats().fallbacks == {"pinned": 2}
    for source, found in zip(sources, brought_back(handles), strict=True):
        assert torch.equal(source, found)
