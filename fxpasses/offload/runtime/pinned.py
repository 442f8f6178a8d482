"""Pinned host memory in blocks of exact size, reused across steps.

PyTorch's own allocator of pinned memory for CUDA rounds sizes up to a power of two, which would waste up to half of the
memory: there, blocks are ordinary host memory, registered with the driver. Other accelerators have no such call, and
blocks are PyTorch's pinned memory. If neither works, blocks stay pageable: copies are slower, and the results the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from fxpasses.offload.runtime import stats
from fxpasses.offload.runtime.device_copies import Ticket
from fxpasses.runtime import cuda_extras


class Block:
    """Host bytes [size]. tickets: the copies that read or write them, and may not have ended yet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = torch.empty(size, dtype=torch.uint8)
        self.tickets: Sequence[Ticket] = ()
        self.pinned = False

    def pin(self) -> None:
        try:
            self.memory = pin(self.memory)
            self.pinned = True
        except RuntimeError as error:
            text = f"{self.size} bytes of host memory cannot be pinned ({error}); they are pageable, and copied slower"
            stats.fell_back("pinned", text)

    def drop(self) -> None:
        """Return the memory to the system once no copy uses it."""
        for ticket in self.tickets:
            ticket.synchronize()
        if self.pinned:
            unpin(self.memory)
            self.pinned = False


class Pool:
    """Blocks by size. Unused ones are kept up to the number of bytes that were ever in use at once."""

    def __init__(self) -> None:
        self._free: dict[int, list[Block]] = {}
        self._lock = threading.Lock()
        self._returned: list[Block] = []  # returned by finalizers, which may run while this thread holds the lock
        self.used = self.free = self._most_used = 0

    def take(self, size: int, budget: int | None = None) -> Block:
        """A block of `size` bytes; raises `MemoryError` beyond `budget` bytes in use, or if the host has no more."""
        with self._lock:
            self._sort_returned()
            if budget is not None and self.used + size > budget:
                raise MemoryError(f"fastpack.offload.host_budget is {budget} bytes, and {self.used} are in use")
            self.used += size
            self._most_used = max(self._most_used, self.used)
            blocks = self._free.get(size)
            found = blocks.pop() if blocks else None
            if found is not None:
                self.free -= size
            dropped = self._over()
            stats.pool_holds(self.used + self.free)
        for block in dropped:
            block.drop()
        if found is None:
            try:
                found = Block(size)
            except RuntimeError as error:  # PyTorch's error if the host has no memory
                with self._lock:
                    self.used -= size
                raise MemoryError(f"the host has no {size} bytes: {error}") from error
            found.pin()
        return found

    def give(self, block: Block) -> None:
        """Return a block to the pool. Takes no lock: storages may die anywhere."""
        self._returned.append(block)

    def clear(self) -> None:
        """Return all unused blocks to the system."""
        with self._lock:
            self._sort_returned()
            dropped = [block for blocks in self._free.values() for block in blocks]
            self._free.clear()
            self.free = 0
            stats.pool_holds(self.used)
        for block in dropped:
            block.drop()

    def _sort_returned(self) -> None:
        while self._returned:
            block = self._returned.pop()
            self.used -= block.size
            self.free += block.size
            self._free.setdefault(block.size, []).append(block)

    def _over(self) -> list[Block]:
        """Unused blocks beyond the limit, from the sizes that were unused for longest."""
        dropped: list[Block] = []
        for size in list(self._free):
            while self.used + self.free > self._most_used and self._free[size]:
                dropped.append(self._free[size].pop())
                self.free -= size
            if not self._free[size]:
                del self._free[size]
        return dropped


POOL = Pool()


def pin(memory: Tensor) -> Tensor:
    """`memory`, or in its place pinned memory of its size; raises `RuntimeError` if there is none."""
    if not cuda_extras.is_used():
        return torch.empty_like(memory, pin_memory=True)
    cuda_extras.register(memory)
    return memory


def unpin(memory: Tensor) -> None:
    """Undo `pin`; PyTorch's own pinned memory is freed like any tensor."""
    if cuda_extras.is_used():
        cuda_extras.unregister(memory)
