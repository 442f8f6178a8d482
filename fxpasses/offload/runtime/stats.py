"""Counts of moved tensors, their cost, and fallbacks: `fxpasses.offload_stats()`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from fxpasses.base.once import warn_once

log = logging.getLogger(__name__)


@dataclass
class OffloadStats:
    """Counts since the process began, or since the last reset.

    tensors_out, bytes_out: moved away in forward. tensors_in, bytes_in: brought back in backward.
    seconds_exposed: time for which the host, or the device's stream, waited for a copy instead of computing.
    bytes_held: bytes outside the device now. pool_bytes: pinned host memory, in use or kept for reuse.
    fallbacks: the number of times that each fallback was taken, by name.
    """

    tensors_out: int = 0
    bytes_out: int = 0
    tensors_in: int = 0
    bytes_in: int = 0
    seconds_exposed: float = 0.0
    bytes_held: int = 0
    pool_bytes: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


_now = OffloadStats()
_device_waits: deque[tuple[torch.Event, torch.Event]] = deque()  # before and after a wait on a device's stream


def offload_stats(reset: bool = False) -> OffloadStats:
    """A copy of the counts; with `reset`, cumulative counts restart from 0.

    On an accelerator, this waits until the device has passed its last wait for a copy, to time it.
    """
    _collect(wait=True)
    taken = replace(_now, fallbacks=dict(_now.fallbacks))
    if reset:
        _now.tensors_out = _now.bytes_out = _now.tensors_in = _now.bytes_in = 0
        _now.seconds_exposed = 0.0
        _now.fallbacks.clear()
    return taken


def moved_out(count: int) -> None:
    _now.tensors_out += 1
    _now.bytes_out += count
    _now.bytes_held += count


def moved_in(count: int) -> None:
    _now.tensors_in += 1
    _now.bytes_in += count


def freed(count: int) -> None:
    _now.bytes_held -= count


def pool_holds(count: int) -> None:
    _now.pool_bytes = count


@contextlib.contextmanager
def host_waits() -> Iterator[None]:
    """Count the time inside as the host's wait for a copy."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _now.seconds_exposed += time.perf_counter() - started


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Do not count waits inside, which are not part of a step."""
    before = _now.seconds_exposed
    try:
        yield
    finally:
        _collect(wait=True)
        _now.seconds_exposed = before


def stream_waits(before: torch.Event, after: torch.Event) -> None:
    """Count the time between two events around a wait on a device's stream, once the device has passed them."""
    _device_waits.append((before, after))
    _collect(wait=False)


def _collect(wait: bool) -> None:
    while _device_waits:
        try:
            before, after = _device_waits.popleft()
        except IndexError:  # taken by another thread meanwhile
            return
        if wait:
            after.synchronize()
        elif not after.query():
            _device_waits.appendleft((before, after))
            return
        _now.seconds_exposed += before.elapsed_time(after) / 1e3


def fell_back(name: str, text: str) -> None:
    """Count a fallback, and warn about it once per process."""
    _now.fallbacks[name] = _now.fallbacks.get(name, 0) + 1
    log.debug("%s: %s", name, text)
    warn_once(("offload", name), f"offload_activations: {text}. Results do not change.")
