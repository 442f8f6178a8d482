"""The memory of a device, in bytes: how much there is, and how much of it this process uses."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
# The limits of control groups, of both versions, for the group itself; a container sees its own as the root.
_GROUPS = (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def in_use(device: torch.device) -> int:
    """The bytes that PyTorch's allocator has given out on a device; on the CPU, the resident bytes of the process.

    0 where the system does not say.
    """
    if device.type == "cpu":
        return _of_process("VmRSS")
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def highest(device: torch.device) -> int:
    """The most bytes that `in_use` has been so far, or since somebody has reset PyTorch's statistics."""
    if device.type == "cpu":
        return _of_process("VmHWM")
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _of_process(field: str) -> int:
    found = [line for line in _lines(_STATUS) if line.startswith(f"{field}:")]
    return 1024 * int(found[0].split()[1]) if found else 0


def available(device: torch.device) -> int | None:
    """The bytes of a device; on the CPU, those that the process may use. None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type != "cpu":
        return None
    limits = list(_limits())
    with contextlib.suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def _limits() -> Iterator[int]:
    own = [line.split(":") for line in _lines(_OWN_GROUPS)]
    for controller, file in _GROUPS:
        paths = [fields[2].lstrip("/") for fields in own if len(fields) == 3 and controller in fields[1].split(",")]
        for path in {"", *paths}:
            for line in _lines(_ROOT / controller / path / file):
                if line.isdigit():
                    yield int(line)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
