"""The memory of a training step beyond what is held between steps."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import torch


class PeakMemory:
    """Memory of a step beyond what is held between steps: the device's, or on Linux the process's."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.start = device.type == "cuda", 0

    def reset(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.start = torch.cuda.memory_allocated()
        elif STATUS.exists():
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident
            self.start = resident("VmRSS")

    def peak(self) -> int:
        """Bytes since the reset; 0 where the system does not report them."""
        if self.cuda:
            return torch.cuda.max_memory_allocated() - self.start
        return resident("VmHWM") - self.start if STATUS.exists() else 0


STATUS = Path("/proc/self/status")


def resident(name: str) -> int:
    return 1024 * int(STATUS.read_text().split(f"{name}:")[1].split()[0])


def return_memory_at_once() -> None:
    """Make the C library return freed tensors to the system: otherwise the peak would include them."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: from 64 KiB on, memory of its own
