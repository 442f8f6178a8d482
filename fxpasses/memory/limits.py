"""The memory of a device, in bytes: how much there is, and how much of it this process uses.

An accelerator's module (`torch.cuda`, `torch.xpu`) says it, as far as it has the functions that CUDA's has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_BLOCK = 512  # bytes: CUDA's caching allocator rounds up to multiples of it, and so do those of other accelerators
_STATUS = Path("/proc/self/status")
# The limits of control groups, of both versions; those of the groups above hold as well. A container sees its own as
# the root.
_GROUPS = (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def in_use(device: torch.device) -> int:
    """The bytes that PyTorch's allocator has given out on a device; on the CPU, the resident bytes of the process.

    0 where the system does not say.
    """
    if device.type == "cpu":
        return _of_process("VmRSS")
    return int(_asked("memory_allocated", device) or 0)


def highest(device: torch.device) -> int:
    """The most bytes that `in_use` has been so far, or since somebody has reset PyTorch's statistics."""
    if device.type == "cpu":
        return _of_process("VmHWM")
    return int(_asked("max_memory_allocated", device) or 0)


def rounded(size: int, device: str) -> int:
    """The bytes that PyTorch's allocator gives out for a tensor of this size on a type of device."""
    return size if device == "cpu" else -(-size // _BLOCK) * _BLOCK


def _asked(function: str, device: torch.device) -> Any:
    """What the module of an accelerator answers about a device; None if it cannot tell."""
    try:
        ask = getattr(torch.get_device_module(device), function, None)
    except RuntimeError:  # there is no such module
        return None
    return None if ask is None else ask(device)


def _of_process(field: str) -> int:
    found = [line for line in _lines(_STATUS) if line.startswith(f"{field}:")]
    return 1024 * int(found[0].split()[1]) if found else 0


def available(device: torch.device) -> int | None:
    """The bytes of a device; on the CPU, those that the process may use. None where the system does not say."""
    if device.type != "cpu":
        found = _asked("mem_get_info", device)
        return None if found is None else int(found[1])
    limits = list(_limits())
    with contextlib.suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def _limits() -> Iterator[int]:
    own = [line.split(":") for line in _lines(_OWN_GROUPS)]
    for controller, file in _GROUPS:
        paths = [fields[2].lstrip("/") for fields in own if len(fields) == 3 and controller in fields[1].split(",")]
        for place in {"", *paths, *(str(above) for path in paths for above in Path(path).parents)}:
            for line in _lines(_ROOT / controller / place / file):
                if line.isdigit():
                    yield int(line)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
