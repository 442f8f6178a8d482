"""Copies between an accelerator and the host on streams of their own, one each way. The host waits for none of them.

Memory is kept safe by order alone, without `record_stream`: a copy starts after all that was queued before it, what is
copied from is kept until the computing stream has been made to wait for the copy, and what is copied to is allocated
on the computing stream and handed out after the same wait.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from fxpasses.runtime.offload import stats


class Ticket(Protocol):
    """A copy that was started."""

    def wait(self) -> None:
        """Order what the current stream does next after the copy."""

    def synchronize(self) -> None:
        """Wait for the copy on the host; for threads other than the user's."""


class Copies(Protocol):
    """Starts copies between one device and the host."""

    def start(self, target: Tensor, source: Tensor, out: bool, after: Iterable[Ticket]) -> Ticket: ...

    def place(self) -> object:
        """Where work is queued now; memory that was allocated in one place is not handed out in another."""


@functools.lru_cache
def of(device: torch.device) -> Copies:
    """The streams of a device, made once."""
    return DeviceCopies(device)


class DeviceTicket:
    """An event on a copy's stream."""

    def __init__(self, device: torch.device, event: torch.Event) -> None:
        self._device, self.event = device, event

    def wait(self) -> None:
        stream = torch.accelerator.current_stream(self._device)
        before, after = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(self.event)
        after.record(stream)
        stats.stream_waits(before, after)

    def synchronize(self) -> None:
        self.event.synchronize()


class DeviceCopies:
    """A stream out and a stream in, so that both directions of the bus can be busy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.Stream(device=device), torch.Stream(device=device)

    def start(self, target: Tensor, source: Tensor, out: bool, after: Iterable[Ticket]) -> DeviceTicket:
        """Queue a copy of bytes [n] behind the current stream's work and the copies in `after`."""
        stream = self._out if out else self._in
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            for ticket in after:
                assert isinstance(ticket, DeviceTicket)
                stream.wait_event(ticket.event)
            target.copy_(source, non_blocking=True)
            event = torch.Event(self._device)
            event.record(stream)
        return DeviceTicket(self._device, event)

    def place(self) -> object:
        return torch.accelerator.current_stream(self._device).stream_id


def unified_memory(device: torch.device) -> bool:
    """Whether the device and the host share their memory, so that moving frees nothing.

    Private detail, checked on torch 2.11 and 2.13: `is_integrated` of CUDA's device properties.
    """
    if device.type == "cuda":
        return bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))
    return device.type == "mps"
