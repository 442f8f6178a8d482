"""The interface of a tier: a place outside the device where moved tensors wait for backward."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Incoming(Protocol):
    """A started copy into a device."""

    def wait(self) -> None:
        """Wait, on the device's stream or on the host, until the target holds the data; raises `OffloadError`."""

    def abandon(self, now: bool = False) -> None:
        """Keep the memory of a target that is no longer needed until the copy into it has ended, without waiting.

        now: wait if necessary, so that its memory is freed with the caller's last reference.
        """


class Stored(Protocol):
    """A tensor in a tier. It lives as long as its handle, and does not refer to the handle."""

    def settle(self) -> None:
        """Wait until the source may be reused."""

    def fetch(self, target: Tensor) -> Incoming:
        """Start to copy into bytes [n] of any device."""

    def release(self) -> None:
        """Free the tensor's resources, after the handle is gone."""


class Tier(Protocol):
    """A place for tensors. Options name it, and `tiers.of` makes it."""

    name: str

    def store(self, source: Tensor) -> tuple[Tensor, Stored]:
        """Start to move bytes [n] of a device; returns the handle, bytes [n] of the CPU, and the tensor behind it.

        Raises `OSError` or `MemoryError` if the tier has no room: then the tensor stays on its device.
        """

    def refusal(self, size: int, error: Exception) -> str:
        """The message for a tensor of `size` bytes that was not stored."""
