"""The disk tier: each moved tensor is in a separate unlinked file, written and read by threads during compute.

The file has no name, or loses it before anything is written, so nothing is left behind however the process ends. The
handle is a mapping of it, but the data goes through `pwrite` and `pread`: a full or broken disk is then an error to
handle, and not a signal that kills the process. The mapping's pages are never touched, so they are not part of the
process's memory, and `posix_fadvise` drops written pages from the page cache.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import functools
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fxpasses.errors import OffloadError
from fxpasses.offload.runtime import device_copies, pinned, stats

_CHUNK = 64 << 20  # bytes of one system call; Linux moves at most 2 GiB in one
_STAGED = 4  # tensors of an accelerator that may be in host memory on their way to the file


class UnlinkedFile:
    """A file without a name, mode 0600, with its space reserved. Raises `OSError` if the file system has no room.

    The file is closed when nothing refers to it. A thread that still reads or writes refers to it, so no thread ever
    uses the descriptor of a closed file, which the system reuses for the next file.
    """

    def __init__(self, directory: str, size: int, number: int) -> None:
        self.directory, self.size, self.number = directory, size, number

    @classmethod
    def create(cls, directory: str, size: int) -> tuple[UnlinkedFile, Tensor]:
        """A new file, and CPU bytes [size] that map it. The mapping keeps the file open, but not its descriptor."""
        number, name = _open(directory)
        file = cls(directory, size, number)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(number, 0, size)
            else:  # macOS: a full disk is noticed at the first write
                os.ftruncate(number, size)
            return file, _mapped(name, size)
        finally:
            if not name.startswith("/proc/"):
                os.unlink(name)

    def write(self, data: Tensor) -> None:
        """Write CPU bytes [size], and drop them from the page cache."""
        view, done = _buffer(data), 0
        while done < self.size:
            done += os.pwrite(self.number, view[done : done + _CHUNK], done)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.number, 0, self.size, os.POSIX_FADV_DONTNEED)

    def read(self, data: Tensor) -> None:
        """Read into CPU bytes [size]; raises `OSError`."""
        view, done = _buffer(data), 0
        while done < self.size:
            count = os.preadv(self.number, [view[done : done + _CHUNK]], done)
            if count == 0:
                raise OSError(errno.EIO, f"the file ends after {done} bytes")
            done += count

    def __del__(self) -> None:
        os.close(self.number)


def _open(directory: str) -> tuple[int, str]:
    """(descriptor, a path that opens the same file): without a name if the system supports it, else to be unlinked."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        try:
            number = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            return number, f"/proc/self/fd/{number}"
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    return tempfile.mkstemp(prefix="fxpasses-", dir=directory)


def _mapped(name: str, size: int) -> Tensor:
    try:
        return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
    except RuntimeError as error:  # PyTorch's error if no descriptor or no address space is left
        raise OSError(f"it cannot be mapped ({error})") from error


def _buffer(data: Tensor) -> memoryview:
    """CPU bytes as a buffer for system calls; the caller keeps the tensor alive."""
    return memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")


def file_system(directory: str) -> str:
    """The mount point that holds a directory, for messages."""
    path = os.path.realpath(directory)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


class DiskTier:
    """Moves tensors of the CPU or of an accelerator into files in `directory`."""

    name = "disk"

    def __init__(self, directory: str) -> None:
        self.directory = directory or tempfile.gettempdir()

    def store(self, source: Tensor) -> tuple[Tensor, OnDisk]:
        """Start to write bytes [n]. Raises `OSError` if there is no room, or no such directory."""
        file, handle = UnlinkedFile.create(self.directory, source.numel())
        return handle, OnDisk(file, source)

    def refusal(self, size: int, error: Exception) -> str:
        return no_room(self.directory, size, error)


class OnDisk:
    """A tensor in a file, or on its way there."""

    def __init__(self, file: UnlinkedFile, source: Tensor) -> None:
        self._file = file
        self._kept: Tensor | None = None
        self._failure = ""
        self._staged: device_copies.Ticket | None = None
        if source.device.type == "cpu":
            self._writing = _thread("write").submit(_with_last, self._write, [source])
        else:
            with contextlib.ExitStack() as undo:
                _staging.acquire()  # a disk slower than the device delays the host here, instead of filling its memory
                undo.callback(_staging.release)
                block = pinned.POOL.take(source.numel())
                undo.callback(pinned.POOL.give, block)
                copies = device_copies.of(source.device)
                self._staged = copies.start(block.memory, source, out=True, after=block.tickets)
                self._writing = _thread("write").submit(self._write_staged, block)
                undo.pop_all()

    def settle(self) -> None:
        """Wait until the source may be reused."""
        if self._staged is not None:
            self._staged.wait()
            return
        with stats.host_waits():
            self._writing.result()
        self._report_failure()

    def fetch(self, target: Tensor) -> Reading:
        """Start to read into bytes [n] of any device."""
        self._report_failure()
        if target.device.type == "cpu":
            return Reading(_thread("read").submit(_with_last, self._read_into, [target]), [target])
        # The reading thread has its own current stream and device, so memory and mark are taken in the caller's.
        at, block = device_copies.of(target.device).mark(), pinned.POOL.take(target.numel())
        held = [target]
        return Reading(_thread("read").submit(self._read_staged, held, block, at), held, block)

    def _report_failure(self) -> None:
        """Warn about a failed write; in the writing thread, a warning that is turned into an error would be lost."""
        if self._failure:
            stats.fell_back("disk", self._failure)
            self._failure = ""

    def release(self) -> None:
        """Nothing to do: the file is closed with the last reference to it."""

    def _write(self, source: Tensor) -> None:
        try:
            self._file.write(source)
        except OSError as error:
            self._kept = source.clone()
            self._failure = no_room(self._file.directory, source.numel(), error)

    def _write_staged(self, block: pinned.Block) -> None:
        assert self._staged is not None
        try:
            self._staged.synchronize()
            self._write(block.memory)
        finally:
            pinned.POOL.give(block)
            _staging.release()

    def _read_staged(self, held: list[Tensor], block: pinned.Block, at: device_copies.Ticket) -> device_copies.Ticket:
        try:
            (target,) = held
            for ticket in block.tickets:
                ticket.synchronize()
            self._writing.result()
            self._read_into(block.memory)
            ticket = device_copies.of(target.device).start(target, block.memory, out=False, after=(), at=at)
            block.tickets = [ticket]
            return ticket
        finally:
            pinned.POOL.give(block)

    def _read_into(self, target: Tensor) -> None:
        if self._kept is not None:
            target.copy_(self._kept)
            return
        try:
            self._file.read(target)
        except OSError as error:
            raise OffloadError(
                f"an activation of {target.numel()} bytes does not come back from the file system "
                f"{file_system(self._file.directory)} ({self._file.directory}): {error}. The backward pass needs it; "
                'run the step again, with another "fastpack.offload.directory" if the disk is at fault'
            ) from error


class Reading:
    """A read in flight into what `held` holds, through `block` if that is on an accelerator.

    held: a list that is emptied once the read has ended: a thread pool keeps its arguments for longer than that.
    """

    def __init__(
        self, future: Future[device_copies.Ticket | None], held: list[Tensor], block: pinned.Block | None = None
    ) -> None:
        self._future, self._held, self._block = future, held, block

    def wait(self) -> None:
        """Wait until the target holds the data; raises `OffloadError`."""
        with stats.host_waits():
            ticket = self._future.result()
        if ticket is not None:
            ticket.wait()

    def abandon(self, now: bool = False) -> None:
        """Keep the memory of a target that is no longer needed until the copy into it has ended."""
        if self._future.cancel():
            if self._block is not None:
                pinned.POOL.give(self._block)
        elif now:
            with stats.host_waits():
                concurrent.futures.wait([self._future])
        self._future.add_done_callback(functools.partial(_release, held=self._held))


def _release(future: Future[device_copies.Ticket | None], held: list[Tensor]) -> None:
    """Release a ticket once its read has ended. held: an argument that keeps the target's memory alive until then."""
    if not future.cancelled() and future.exception() is None:
        ticket = future.result()
        if ticket is not None:
            ticket.release()
    held.clear()


def _with_last(function: Callable[[Tensor], None], held: list[Tensor]) -> None:
    """Call a function with the tensor in a list, and refer to it no more when the call's future is done: the thread
    of a pool keeps its arguments until later, and with them memory that whoever waits takes to be free."""
    function(held.pop())


def no_room(directory: str, size: int, error: Exception) -> str:
    """The message for a tensor that a full or broken disk cannot store."""
    place = f"the file system {file_system(directory)} ({directory})"
    return f"an activation of {size} bytes is not written to {place}: {error}. It stays in memory"


# One thread each way: a disk gains little from more, and writes must not queue before the reads of a backward pass.
_threads: dict[str, ThreadPoolExecutor] = {}
_staging = threading.BoundedSemaphore(_STAGED)


def _thread(way: str) -> ThreadPoolExecutor:
    return _threads.get(way) or _threads.setdefault(way, ThreadPoolExecutor(1, f"fxpasses-offload-{way}"))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.clear)  # threads do not survive a fork
