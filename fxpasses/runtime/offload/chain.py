"""The life of a moved tensor: written, waited for, read ahead, handed out.

Copies in are started one tensor ahead of need, or more. What was read ahead and not handed out yet never takes more
than a fixed number of slots: where they are full, the oldest loses its own and is read again when it is needed. So a
backward pass that stopped in the middle, or several that alternate, cost time and never block one another.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fxpasses.runtime.offload import device_copies, layout, stats
from fxpasses.runtime.offload.disk import DiskTier, no_room
from fxpasses.runtime.offload.host import HostTier


class Incoming(Protocol):
    """A copy in that was started."""

    def wait(self) -> None: ...

    def abandon(self) -> None: ...


class Stored(Protocol):
    """A tensor in a tier. It holds no reference to its handle, whose end is its own."""

    def settle(self) -> None: ...

    def fetch(self, target: Tensor) -> Incoming: ...

    def release(self) -> None: ...


class Kept:
    """A tensor that could not be moved: a copy in its own device's memory."""

    def __init__(self, source: Tensor) -> None:
        self._copy = source.clone()

    def settle(self) -> None: ...

    def fetch(self, target: Tensor) -> Kept:
        target.copy_(self._copy)
        return self

    def wait(self) -> None: ...

    def abandon(self) -> None: ...

    def release(self) -> None: ...


class Fetched:
    """A tensor that is being read, and where its memory was allocated."""

    def __init__(self, stored: Stored, handle: Tensor, device: torch.device) -> None:
        self.place = _place(device)
        self.tensor = layout.empty_like(handle, device)
        self.incoming = stored.fetch(layout.flat(self.tensor))


_stored: dict[int, Stored] = {}  # by the address of the handle's storage
_ahead: dict[int, Fetched] = {}  # what was read ahead, the oldest first

# Dictionaries alone, each changed in one step: finalizers run in the middle of anything, so a lock could be held.


def store(source: Tensor, tier: DiskTier | HostTier) -> Tensor:
    """Start to move a tensor away; returns its handle, a CPU tensor of the same size, strides and dtype.

    The source must stay as it is until `settle`.
    """
    data = layout.flat(source)
    if data.numel() == 0:
        return layout.empty_like(source, torch.device("cpu"))
    stored: Stored
    try:
        handle, stored = tier.store(data)
    except (OSError, MemoryError) as error:
        stats.fell_back(tier.name, _not_moved(tier, data, error))
        if data.device.type == "cpu":
            return layout.shaped(data.clone(), source)  # `reload` copies from a handle that nothing is known of
        stored = Kept(data)
        handle = torch.empty(data.numel(), dtype=torch.uint8)  # never touched, so the system gives it no pages
    else:
        stats.moved_out(data.numel())
    storage = handle.untyped_storage()
    _stored[storage.data_ptr()] = stored
    end = weakref.finalize(storage, _forget, storage.data_ptr(), data.numel())
    end.atexit = False
    return layout.shaped(handle, source)


def settle(handle: Tensor) -> None:
    """Make the source of a handle free to be reused by what the graph does next."""
    stored = _stored.get(_address(handle))
    if stored is not None:
        stored.settle()


def reload(handle: Tensor, device: torch.device, upcoming: Sequence[Tensor], slots: int) -> Tensor:
    """The tensor behind a handle, on `device`; then start to read the `upcoming` ones ahead, in at most `slots` slots.

    Raises `OffloadError` where the data does not come back.
    """
    stored = _stored.get(_address(handle))
    if stored is None:  # no elements, not moved, or replaced by a copy, as saved-tensor hooks do
        tensor = layout.empty_like(handle, device)
        layout.flat(tensor).copy_(layout.flat(handle))
        return tensor
    fetched = _ahead.pop(_address(handle), None)
    if fetched is not None and (fetched.tensor.device != device or fetched.place != _place(device)):
        fetched.incoming.abandon()
        fetched = None
    if fetched is None:
        fetched = _fetch(stored, handle, device)
    fetched.incoming.wait()
    if not isinstance(stored, Kept):
        stats.moved_in(layout.span(handle))
    for following in upcoming:
        _read_ahead(following, device, slots)
    return fetched.tensor


def _fetch(stored: Stored, handle: Tensor, device: torch.device) -> Fetched:
    try:
        return Fetched(stored, handle, device)
    except RuntimeError as error:
        if not _is_out_of_memory(error) or not _ahead:
            raise
        _free_slots(0)  # what was read ahead can be read again
        return Fetched(stored, handle, device)


def _read_ahead(handle: Tensor, device: torch.device, slots: int) -> None:
    address = _address(handle)
    stored = _stored.get(address)
    if stored is None or isinstance(stored, Kept) or address in _ahead or slots < 1:
        return
    _free_slots(slots - 1)
    try:
        _ahead[address] = Fetched(stored, handle, device)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        text = f"{device} has no {layout.span(handle)} bytes free to read an activation ahead; it is read when needed"
        stats.fell_back("one_buffer", text)


def _free_slots(keep: int) -> None:
    while len(_ahead) > keep:
        try:
            oldest = next(iter(_ahead))
            _ahead.pop(oldest).incoming.abandon()
        except (KeyError, StopIteration, RuntimeError):  # taken by another thread meanwhile
            continue


def _not_moved(tier: DiskTier | HostTier, data: Tensor, error: Exception) -> str:
    if isinstance(tier, DiskTier):
        return no_room(tier.directory, data.numel(), error)
    return f"an activation of {data.numel()} bytes is not moved: {error}. It stays on the device"


def _forget(address: int, size: int) -> None:
    """The handle's storage is gone."""
    fetched = _ahead.pop(address, None)
    if fetched is not None:
        fetched.incoming.abandon()
    stored = _stored.pop(address, None)
    if stored is not None:
        stored.release()
        if not isinstance(stored, Kept):
            stats.freed(size)


def _address(handle: Tensor) -> int:
    return handle.untyped_storage().data_ptr()


def _place(device: torch.device) -> object:
    return None if device.type == "cpu" else device_copies.of(device).place()


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
