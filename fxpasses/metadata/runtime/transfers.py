"""Copies of metadata between devices: all tensors of a device reach the host in one transfer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch

from fxpasses.errors import RecordingError
from fxpasses.metadata.runtime.batch_cache import BatchCache, State
from fxpasses.runtime import cuda_extras

log = logging.getLogger(__name__)
_ALIGNMENT = 16  # bytes; a multiple of the size of every integer dtype


class PendingCopy:
    """Copies to the host that may still be in flight; `tensors()` waits for them."""

    def __init__(self, copies: list[torch.Tensor], event: torch.Event | None) -> None:
        self._copies = copies
        self._event = event

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies)

    def tensors(self) -> list[torch.Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._copies

    def is_done(self) -> bool:
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def part(self, index: int) -> PendingCopy:
        """One of the copies, which can be waited for alone."""
        return PendingCopy([self._copies[index]], self._event)


def to_host(tensors: Sequence[torch.Tensor], cache: BatchCache) -> list[torch.Tensor]:
    """CPU copies of integer tensors; tensors on the CPU are returned themselves.

    Each device makes one non-blocking copy into pinned memory, with one event to wait for. The cache keeps copies for
    the batch, so another graph of the same step that needs the same tensors waits for nothing. Raises `RecordingError`
    for tensors on a device while a CUDA graph is recorded, even if the cache has a copy: its values would become part
    of the recording.
    """
    remote = next((tensor for tensor in tensors if tensor.device.type != "cpu"), None)
    if remote is not None and cuda_extras.is_recording():
        raise RecordingError(
            f"a CUDA graph is recorded around a model that needs a tensor of its batch ({remote.dtype} "
            f"{list(remote.shape)} on {remote.device}) on the host. Leave it to the backend: with "
            'mode="reduce-overhead" it runs before each replay what depends on the batch'
        )
    result: list[torch.Tensor | None] = [t if t.device.type == "cpu" else None for t in tensors]
    missing: dict[torch.device, list[int]] = {}
    for position, tensor in enumerate(tensors):
        if result[position] is None:
            pending = cache.get("to_host", [tensor])
            if pending is None:
                missing.setdefault(tensor.device, []).append(position)
            else:
                result[position] = pending.tensors()[0]
    states = {position: State.of([tensors[position]]) for positions in missing.values() for position in positions}
    started = [(positions, start_copy([tensors[i] for i in positions])) for positions in missing.values()]
    for positions, copy in started:
        for position, host in zip(positions, copy.tensors(), strict=True):
            cache.put("to_host", [tensors[position]], states[position], PendingCopy([host], None))
            result[position] = host
    return [tensor for tensor in result if tensor is not None]


def start_copy(tensors: Sequence[torch.Tensor]) -> PendingCopy:
    """Start to copy tensors of one device to the host, packed into one buffer, on the current stream."""
    device = tensors[0].device
    sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    with torch.no_grad(), torch.inference_mode(False):
        flats = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        packed = flats[0]
        if len(tensors) > 1:
            packed = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
            for target, flat in zip(packed.split(sizes), flats, strict=True):
                target[: flat.numel()].copy_(flat)
        pinned = _host_bytes(packed.numel(), device)
        pinned.copy_(packed, non_blocking=True)
        event = None
        if device.type != "cpu":
            event = torch.Event(device=device)
            event.record(torch.accelerator.current_stream(device))
        starts = itertools.accumulate(sizes, initial=0)
        copies = [
            pinned[start : start + flat.numel()].view(tensor.dtype).view(tensor.shape)
            for start, flat, tensor in zip(starts, flats, tensors, strict=False)
        ]
    return PendingCopy(copies, event)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device without waiting."""
    if device.type == "cpu":
        return tensor
    try:
        tensor = tensor.pin_memory()
    except RuntimeError as error:
        log.debug("a copy to %s waits: %s", device, error)
    return tensor.to(device, non_blocking=True)


def _host_bytes(size: int, device: torch.device) -> torch.Tensor:
    """uint8 [size] on the host, pinned if a device copies into it and memory can be pinned."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    except RuntimeError as error:
        log.debug("a copy from %s waits: %s", device, error)
        return torch.empty(size, dtype=torch.uint8)
