"""What a tier is: a place outside of the device where moved tensors wait for backward."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Incoming(Protocol):
    """A copy in that was started."""

    def wait(self) -> None:
        """Wait, on the device's stream or on the host, until the target holds the data; raises `OffloadError`."""

    def abandon(self) -> None:
        """Nobody wants the target any more: keep its memory until the copy into it has ended, without waiting."""


class Stored(Protocol):
    """A tensor in a tier. It holds no reference to its handle, whose end is its own."""

    def settle(self) -> None:
        """Wait until the source may be reused."""

    def fetch(self, target: Tensor) -> Incoming:
        """Start to copy into bytes [n] of any device."""

    def release(self) -> None:
        """The handle is gone: give back what the tensor took."""


class Tier(Protocol):
    """A place for tensors; the options name it, and `tiers.of` makes it."""

    name: str

    def store(self, source: Tensor) -> tuple[Tensor, Stored]:
        """Start to move bytes [n] of a device; the handle, bytes [n] of the CPU, and what is behind it.

        Raises `OSError` or `MemoryError` where it has no room: then the tensor stays on its device.
        """

    def refusal(self, size: int, error: Exception) -> str:
        """Why a tensor of `size` bytes was not stored, in words."""
