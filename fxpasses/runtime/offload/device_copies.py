"""Copies between an accelerator and the host on streams of their own, one each way. The host waits for none of them.

Memory is kept safe by order alone, without `record_stream`: a copy starts after all that was queued before it, what is
copied from is kept until the computing stream has been made to wait for the copy, and what is copied to is allocated
on the computing stream and handed out after the same wait. What is given up instead goes back to that stream after it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from fxpasses.errors import OffloadError
from fxpasses.runtime.offload import stats


class Ticket(Protocol):
    """A copy that was started, or another moment in a stream's work."""

    def wait(self) -> None:
        """Order what the current stream does next after it."""

    def release(self) -> None:
        """Order what the stream that asked for it does next after it, wherever this is called: in a finalizer, say.

        Memory goes back to the stream that allocated it, so this makes the memory of a copy free to be used again.
        """

    def synchronize(self) -> None:
        """Wait for it on the host; for threads other than the user's."""


class Copies(Protocol):
    """Starts copies between one device and the host."""

    def mark(self) -> Ticket:
        """This moment of the current stream. Raises `OffloadError` while the stream's work is captured."""

    def start(
        self, target: Tensor, source: Tensor, out: bool, after: Iterable[Ticket], at: Ticket | None = None
    ) -> Ticket:
        """Queue a copy of bytes [n] behind the work up to `at` (None: all of the current stream's) and behind `after`.

        Threads have a stream of their own: one that copies for another must be told the other's moment.
        """

    def place(self) -> object:
        """Where work is queued now; memory that was allocated in one place is not handed out in another."""


@functools.lru_cache
def of(device: torch.device) -> Copies:
    """The streams of a device, made once."""
    return DeviceCopies(device)


def place(device: torch.device) -> object:
    """Where the work of a device is queued now; the CPU has one place."""
    return None if device.type == "cpu" else of(device).place()


class DeviceTicket:
    """An event: a moment of the stream `asked`, or the end of a copy that it asked for."""

    def __init__(self, device: torch.device, event: torch.Event, asked: torch.Stream) -> None:
        self._device, self.event, self.asked = device, event, asked

    def wait(self) -> None:
        stream = torch.accelerator.current_stream(self._device)
        before, after = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(self.event)
        after.record(stream)
        stats.stream_waits(before, after)

    def release(self) -> None:
        self.asked.wait_event(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


class DeviceCopies:
    """A stream out and a stream in, so that both directions of the bus can be busy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.Stream(device=device), torch.Stream(device=device)

    def mark(self) -> DeviceTicket:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
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
        return DeviceTicket(self._device, event, at.asked)

    def place(self) -> object:
        return torch.accelerator.current_stream(self._device).stream_id


def unified_memory(device: torch.device) -> bool:
    """Whether the device and the host share their memory, so that moving frees nothing.

    Private detail, checked on torch 2.11 and 2.13: `is_integrated` of CUDA's device properties.
    """
    if device.type == "cuda":
        return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))
    return device.type == "mps"
