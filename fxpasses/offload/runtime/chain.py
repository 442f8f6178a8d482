"""The life of a moved tensor: written, waited for, read ahead, returned.

Copies in start at least one tensor ahead of need. Tensors that are read ahead and not yet returned occupy a fixed
number of slots: when all are taken, the oldest tensor loses its slot and is read again when it is needed. So a backward
pass that stopped midway, or several that alternate, cost time and never block one another.

If a device has no memory to read ahead, tensors are read when they are needed, until the next forward pass. If it has
no memory for a tensor that is needed at once, the step fails with PyTorch's own error, and later steps leave
activations on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from fxpasses.errors import OffloadError
from fxpasses.offload.runtime import device_copies, layout, stats
from fxpasses.offload.runtime.kept import Kept
from fxpasses.offload.runtime.tier import Stored, Tier


class Fetched:
    """A tensor that is being read, and where its memory was allocated."""

    def __init__(self, stored: Stored, handle: Tensor, device: torch.device) -> None:
        self.place = device_copies.place(device)
        self.tensor = layout.empty_like(handle, device)
        self.incoming = stored.fetch(layout.flat(self.tensor))


_stored: dict[int, Stored | Kept] = {}  # by the handle's storage
_leaving: dict[int, int] = {}  # by the same key: the address of a source whose copy is not waited for yet
_sources: dict[int, tuple[Tensor, torch.device]] = {}  # by the same key: the layout, as a meta tensor, and the device
_returned: set[int] = set()  # keys of tensors that backward has asked for
_ahead: dict[int, Fetched] = {}  # tensors that were read ahead, the oldest first
_tight: set[torch.device] = set()  # had no memory to read ahead: nothing is read ahead until the next forward pass
_full: set[torch.device] = set()  # had no memory for a tensor that backward needed: nothing leaves them any more

# Only dictionaries and sets, each changed in one step: finalizers may run anywhere, even where a lock is held.


def store(source: Tensor, tier: Tier) -> Tensor:
    """Start to move a tensor away; returns its handle, a CPU tensor of the same size, strides and dtype.

    The source must not change before `settle`.
    """
    data = layout.flat(source)
    if data.numel() == 0:
        return layout.empty_like(source, torch.device("cpu"))
    _tight.discard(data.device)
    handle, stored = _keep_where_full(data) or _move(data, tier)
    storage = handle.untyped_storage()
    _stored[_key(handle)] = stored
    if not isinstance(stored, Kept):
        _leaving[_key(handle)] = data.data_ptr()
        _sources[_key(handle)] = layout.empty_like(source, torch.device("meta")), source.device
    end = weakref.finalize(storage, _forget, _key(handle), data.numel())
    end.atexit = False
    return layout.shaped(handle, source)


def _move(data: Tensor, tier: Tier) -> tuple[Tensor, Stored | Kept]:
    try:
        moved = tier.store(data)
    except (OSError, MemoryError) as error:
        kept = Kept(data)
        stats.fell_back(tier.name, tier.refusal(data.numel(), error))
        return kept.handle(), kept
    stats.moved_out(data.numel())
    return moved


def _keep_where_full(data: Tensor) -> tuple[Tensor, Kept] | None:
    """Keep a tensor on a device that was full in an earlier backward pass; None if there is no memory for a copy."""
    if data.device not in _full:
        return None
    try:
        kept = Kept(data)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        return None
    text = f"{data.device} had no memory for an activation that backward needed at once; from now on they stay on it"
    stats.fell_back("on_device", text)
    return kept.handle(), kept


def settle(handle: Tensor, source: Tensor) -> None:
    """Free the source of a handle for reuse by the rest of the graph.

    Raises `OffloadError` if a compiler passes a copy of the source, whose own memory nothing has kept alive then, or a
    copy of the handle, behind which there is nothing.
    """
    stored = _stored.get(_key(handle))
    if stored is None:
        if handle.numel():
            raise _copied(handle, "the place to which it was being moved was copied by the compiler")
        return
    stored.settle()
    if _leaving.pop(_key(handle), source.data_ptr()) != source.data_ptr():
        text = "it was copied by the compiler while it was being moved, so that its memory may have been used too early"
        raise _copied(handle, text)


def _copied(handle: Tensor, what: str) -> OffloadError:
    return OffloadError(
        f"an activation of {layout.span(handle)} bytes cannot be moved: {what}. Please report the model, and compile "
        'it with "fastpack.offload.buffers": 1, which waits for every copy'
    )


def reload(
    handle: Tensor, device: torch.device, upcoming: Sequence[Tensor], slots: int, onward: bool = False
) -> Tensor:
    """The tensor behind a handle, on `device`; then start to read `upcoming` tensors ahead, in at most `slots` slots.

    onward: whether to read on if nothing is upcoming, with the last tensor that was stored before this one and is not
    back yet: the backward graph is one of several, whose forward graphs ran in the opposite order.

    Raises `OffloadError` if the data does not come back.
    """
    stored = _stored.get(_key(handle))
    if stored is None:
        tensor = _from_a_copy(handle, device)
    elif isinstance(stored, Kept):
        tensor = stored.take(handle)
    else:
        fetched = _taken(handle, device) or _fetch(stored, handle, device)
        fetched.incoming.wait()
        stats.moved_in(layout.span(handle))
        tensor = fetched.tensor
    _returned.add(_key(handle))
    for following in upcoming:
        _read_ahead(_key(following), following, device, slots)
    if onward and not upcoming:
        _read_onward(_key(handle), device, slots)
    return tensor


def _from_a_copy(handle: Tensor, device: torch.device) -> Tensor:
    """The tensor of a handle without elements, or of a handle that hooks on saved tensors have replaced by a copy."""
    if device.type != "cpu" and handle.numel():
        raise OffloadError(
            f"an activation of {layout.span(handle)} bytes does not come back to {device}: its handle was replaced by "
            "a copy, which holds nothing, as hooks on saved tensors do (torch.autograd.graph.save_on_cpu with "
            'pin_memory, for one). Use such hooks only around models compiled without "fastpack.offload"'
        )
    tensor = layout.empty_like(handle, device)
    layout.flat(tensor).copy_(layout.flat(handle))
    return tensor


def _taken(handle: Tensor, device: torch.device) -> Fetched | None:
    """The tensor that was read ahead for a handle, if it can be used here."""
    fetched = _ahead.pop(_key(handle), None)
    if fetched is not None and (fetched.tensor.device != device or fetched.place != device_copies.place(device)):
        fetched.incoming.abandon()
        return None
    return fetched


def _fetch(stored: Stored, handle: Tensor, device: torch.device) -> Fetched:
    """Read a tensor that is needed now. A device without memory for it gives up the tensors that it read ahead."""
    try:
        return Fetched(stored, handle, device)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
    _tight.add(device)
    _free_slots(0, now=True)  # these tensors can be read again
    try:
        return Fetched(stored, handle, device)
    except (RuntimeError, MemoryError) as error:
        if _is_out_of_memory(error):
            _full.add(device)
        raise


def _read_onward(key: int, device: torch.device, slots: int) -> None:
    keys = list(_stored)
    for earlier in reversed(keys[: keys.index(key)] if key in keys else []):
        like, source = _sources.get(earlier, (None, None))
        if like is not None and source == device and earlier not in _returned:
            _read_ahead(earlier, like, device, slots)
            return


def _read_ahead(key: int, like: Tensor, device: torch.device, slots: int) -> None:
    """Start to read the tensor with a key. like: a tensor with its layout."""
    stored = _stored.get(key)
    if stored is None or isinstance(stored, Kept) or key in _ahead or slots < 1 or device in _tight:
        return
    _free_slots(slots - 1)
    try:
        _ahead[key] = Fetched(stored, like, device)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        _tight.add(device)
        text = f"{device} has no {layout.span(like)} bytes free to read an activation ahead"
        stats.fell_back("one_buffer", f"{text}; up to the next forward pass they are read when they are needed")


def _free_slots(keep: int, now: bool = False) -> None:
    while len(_ahead) > keep:
        try:
            oldest = next(iter(_ahead))
            _ahead.pop(oldest).incoming.abandon(now)
        except (KeyError, StopIteration, RuntimeError):  # taken by another thread meanwhile
            continue


def _forget(key: int, size: int) -> None:
    """Called when the handle's storage is gone."""
    fetched = _ahead.pop(key, None)
    if fetched is not None:
        fetched.incoming.abandon()
    _leaving.pop(key, None)
    _sources.pop(key, None)
    _returned.discard(key)
    stored = _stored.pop(key, None)
    if stored is not None:
        stored.release()
        if not isinstance(stored, Kept):
            stats.freed(size)


def _key(handle: Tensor) -> int:
    """The identity of a handle's storage, unique while it lives; a kept tensor's memory may be freed earlier.

    Private name, checked on torch 2.11 and 2.13: `UntypedStorage._cdata`.
    """
    return handle.untyped_storage()._cdata


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
