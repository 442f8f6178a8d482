"""What steps have taken, as far as the allocator's highest mark tells.

step       1     2     3     4
mark       70    70    85    85         of the process so far; compiling, before the first step, took 60
its peak   70    -     85    -          a step below the mark is not known
"""

from __future__ import annotations

import torch

from fxpasses.memory import limits


class Peaks:
    """The peaks of steps on a device that went beyond all before them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mark = limits.highest(device)

    def new(self) -> int | None:
        """The bytes that the process has used at most since the last call, or since this was made; None if it has used
        as many before."""
        before, self._mark = self._mark, limits.highest(self._device)
        return self._mark if self._mark > before else None
