"""Copies between an accelerator and the host on two separate streams, one each way. The host never waits for them.

Order alone keeps memory safe, without `record_stream`: a copy starts after all work that was queued before it; its
source is kept until the computing stream waits for the copy; its target is allocated on the computing stream and
returned after the same wait. The memory of an abandoned target goes back to that stream after its copy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from fxpasses.errors import OffloadError
from fxpasses.offload.runtime import stats
from fxpasses.runtime import cuda_extras


class Ticket(Protocol):
    """A copy that was started, or another point in a stream's work."""

    def wait(self) -> None:
        """Make the current stream wait for it."""

    def release(self) -> None:
        """Make the stream that requested it wait for it; may be called anywhere, for example in a finalizer.

        Memory goes back to the stream that allocated it, so this frees the memory of a copy for reuse.
        """

    def synchronize(self) -> None:
        """Wait for it on the host; for threads other than the user's."""


class Copies(Protocol):
    """Starts copies between one device and the host."""

    def mark(self) -> Ticket:
        """The current stream's position. Raises `OffloadError` while the stream is captured."""

    def start(
        self, target: Tensor, source: Tensor, out: bool, after: Iterable[Ticket], at: Ticket | None = None
    ) -> Ticket:
        """Queue a copy of bytes [n] after the work up to `at` (None: all of the current stream's) and after `after`.

        Each thread has its own current stream: a thread that copies for another needs the other's mark as `at`.
        """

    def place(self) -> object:
        """The stream where work is queued now; memory that was allocated on one stream is not returned on another."""


@functools.lru_cache
def of(device: torch.device) -> Copies:
    """The streams of a device, made once."""
    return DeviceCopies(device)


def place(device: torch.device) -> object:
    """The stream where a device's work is queued now; None for the CPU."""
    return None if device.type == "cpu" else of(device).place()


class DeviceTicket:
    """An event: a point in the work of the stream `requester`, or the end of a copy that it requested."""

    def __init__(self, device: torch.device, event: torch.Event, requester: torch.Stream) -> None:
        self._device, self.event, self.requester = device, event, requester

    def wait(self) -> None:
        stream = torch.accelerator.current_stream(self._device)
        before, after = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(self.event)
        after.record(stream)
        stats.stream_waits(before, after)

    def release(self) -> None:
        self.requester.wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


class DeviceCopies:
    """One stream out and one stream in, so that both directions of the bus can be busy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.Stream(device=device), torch.Stream(device=device)

    def mark(self) -> DeviceTicket:
        if cuda_extras.is_capturing(self._device):
            raise OffloadError(
                "activations cannot be moved while a CUDA graph is captured: a replay would not wait for their copies. "
                'Capture without "fastpack.offload"'
            )
        stream = torch.accelerator.current_stream(self._device)
        event = torch.Event(self._device)
        event.record(stream)
        return DeviceTicket(self._device, event, stream)

    def start(
        self, target: Tensor, source: Tensor, out: bool, after: Iterable[Ticket], at: Ticket | None = None
    ) -> DeviceTicket:
        at = at or self.mark()
        stream = self._out if out else self._in
        assert isinstance(at, DeviceTicket)
        with stream:
            for ticket in (at, *after):
                assert isinstance(ticket, DeviceTicket)
                stream.wait_event(ticket.event)
            target.copy_(source, non_blocking=True)
            event = torch.Event(self._device)
            event.record(stream)
        return DeviceTicket(self._device, event, at.requester)

    def place(self) -> object:
        return torch.accelerator.current_stream(self._device).stream_id


def unified_memory(device: torch.device) -> bool:
    """Whether the device and the host share their memory, so that moving frees nothing."""
    return device.type == "mps" or cuda_extras.shares_memory_with_host(device)
