"""Which implementation computes a grouped product; the only place that asks what a device can do."""

from __future__ import annotations

import functools
import importlib.util
from enum import Enum

import torch

VECTOR = 16  # bytes: F.grouped_mm takes only rows and columns that start at multiples of this

_TRITON_DEVICES = ("cuda", "xpu")
_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LIBRARY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of F.grouped_mm on the CPU


class Way(Enum):
    """LIBRARY: `torch.nn.functional.grouped_mm`. TRITON: `grouped_triton.py`. EACH: one `mm` for each group, for which
    the host needs the offsets."""

    LIBRARY = "library"
    TRITON = "triton"
    EACH = "each"


def way_of(device: torch.device, dtype: torch.dtype, *widths: int | torch.SymInt) -> Way:
    """How to compute products of `dtype` on `device`; widths: the operands' sizes besides the number of rows."""
    if _has_library_kernel(device, dtype, widths):
        return Way.LIBRARY
    return Way.TRITON if dtype in _TRITON_DTYPES and _has_triton(device) else Way.EACH


def reads_offsets(offsets: torch.device, device: torch.device, dtype: torch.dtype, *widths: int | torch.SymInt) -> bool:
    """Whether each product on `device`, as in `way_of`, would make the host wait for offsets on a device."""
    return offsets.type != "cpu" and way_of(device, dtype, *widths) is Way.EACH


def _has_library_kernel(device: torch.device, dtype: torch.dtype, widths: tuple[int | torch.SymInt, ...]) -> bool:
    """Whether `F.grouped_mm` runs without reading the offsets on the host.

    Follows aten/src/ATen/native/cuda/GroupedBlas.cpp and its checks of strides; written without a device to run it on.
    """
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and dtype == torch.bfloat16
        and _capability(device) in (9, 10)
        and all(isinstance(width, int) and width > 0 and width * dtype.itemsize % VECTOR == 0 for width in widths)
    )


def _has_triton(device: torch.device) -> bool:
    if device.type not in _TRITON_DEVICES or not _has_triton_package():
        return False
    return device.type != "cuda" or torch.version.hip is not None or _capability(device) >= 8


def _capability(device: torch.device) -> int:
    """The major number of the compute capability; 0 for fake tensors on a device that is absent."""
    return torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else 0


@functools.cache
def _has_triton_package() -> bool:
    """Whether Triton is installed. Importing it takes a second, and only products on a device need it."""
    return importlib.util.find_spec("triton") is not None
