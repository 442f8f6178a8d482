"""Features that only CUDA has; each improves on what `torch.accelerator`, `torch.Stream` and `torch.Event` offer.

Checked on torch 2.11 to 2.15: `torch.cuda.cudart`, `torch.cuda.check_error`, and `is_integrated` of the properties of a
device, which is private.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_used() -> bool:
    """Whether the accelerator is a CUDA device (or ROCm's, under that name)."""
    return torch.cuda.is_available()


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream's work is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_recording() -> bool:
    """Whether this thread's work goes into a CUDA graph. Never initialises CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def shares_memory_with_host(device: torch.device) -> bool:
    return device.type == "cuda" and bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def register(memory: Tensor) -> None:
    """Pin existing host memory; raises `RuntimeError`."""
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)))


def unregister(memory: Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))
