"""The host tier: each moved tensor in a block of pinned host memory."""

from __future__ import annotations

from torch import Tensor

from fxpasses.offload.runtime import device_copies, layout, pinned


class HostTier:
    """Moves tensors of an accelerator into host memory, never more than `budget` bytes at once (None: no limit)."""

    name = "host"

    def __init__(self, budget: int | None) -> None:
        self.budget = budget

    def store(self, source: Tensor) -> tuple[Tensor, OnHost]:
        """Start to copy bytes [n] of a device. Raises `MemoryError` if the budget or the memory is used up."""
        block = pinned.POOL.take(source.numel(), self.budget)
        try:
            stored = OnHost(block, source)
        except BaseException:
            pinned.POOL.give(block)
            raise
        return layout.alias(block.memory), stored  # `release`, at the end of its storage, gives the block back

    def refusal(self, size: int, error: Exception) -> str:
        return f"an activation of {size} bytes is not moved: {error}. It stays on the device"


class OnHost:
    """A tensor in host memory, or on its way there."""

    def __init__(self, block: pinned.Block, source: Tensor) -> None:
        self._block = block
        self._copies = device_copies.of(source.device)
        self._out = self._copies.start(block.memory, source, out=True, after=block.tickets)
        block.tickets = [self._out]

    def settle(self) -> None:
        """Make the current stream wait for the copy, so that the source may be reused."""
        self._out.wait()

    def fetch(self, target: Tensor) -> CopyIn:
        """Start to copy into bytes [n] of the device."""
        copied = self._copies.start(target, self._block.memory, out=False, after=[self._out])
        self._block.tickets = [*self._block.tickets, copied][-4:]
        return CopyIn(copied, target)

    def release(self) -> None:
        pinned.POOL.give(self._block)


class CopyIn:
    """A copy in flight into `target`."""

    def __init__(self, copied: device_copies.Ticket, target: Tensor) -> None:
        self._copied, self._target = copied, target

    def wait(self) -> None:
        self._copied.wait()

    def abandon(self, now: bool = False) -> None:
        """The target is no longer needed. May be called on any stream and thread, for example by a finalizer."""
        self._copied.release()
