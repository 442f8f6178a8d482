"""Rates of this machine, by short measurements once per device and process."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fxpasses.offload.runtime import layout, stats, tiers
from fxpasses.offload.runtime.tier import Tier

log = logging.getLogger(__name__)

_BYTES = 16 << 20
_WIDTH = 1024


@dataclass(frozen=True)
class Rates:
    """Per second: bytes copied out and back, floating-point operations, and bytes read and written.

    taken: seconds in which to copy a byte out and back keeps a core from computing, whatever it hides behind.
    """

    out: float
    back: float
    flops: float
    memory: float
    taken: float = 0.0


# Used if nothing can be measured: a slow disk and a fast device, so that copies do not seem to be free.
_FALLBACK = Rates(1e9, 1e9, 1e11, 1e10)


@functools.lru_cache
def rates(tier: str, directory: str, device: torch.device) -> Rates:
    """The rates, measured in tens of milliseconds; a guess if the tier does not work, which its first use reports."""
    try:
        # Called while a graph is compiled, when tensors are fake. Private name, checked on torch 2.11 and 2.13.
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad(), stats.uncounted():
            return _measure(tier, directory, device)
    except (OSError, RuntimeError, MemoryError) as error:
        log.debug("calibration failed", exc_info=error)
        return _FALLBACK


def _measure(tier: str, directory: str, device: torch.device) -> Rates:
    out, back, taken = _copies(tiers.of(tier, directory), device)
    found = Rates(out, back, *_compute(device), taken if device.type == "cpu" and _all_cores_compute() else 0.0)
    log.info("%s on %s: %s", tier, device, found)
    return found


def _all_cores_compute() -> bool:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return torch.get_num_threads() >= cores


def _copies(tier: Tier, device: torch.device) -> tuple[float, float, float]:
    data = torch.ones(_BYTES, dtype=torch.uint8, device=device)
    handle, stored = tier.store(data)  # the first use pays for pages, streams and threads
    stored.settle()
    back = layout.empty_like(data, device)

    def out() -> None:
        nonlocal handle, stored
        stored.release()
        handle, stored = tier.store(data)
        stored.settle()

    out_seconds, out_taken = _seconds(out, device)
    back_seconds, back_taken = _seconds(lambda: stored.fetch(back).wait(), device)
    del handle
    stored.release()
    return _BYTES / out_seconds, _BYTES / back_seconds, (out_taken + back_taken) / _BYTES


def _compute(device: torch.device) -> tuple[float, float]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    matrix = torch.ones(_WIDTH, _WIDTH, dtype=dtype, device=device)
    data = torch.ones(_BYTES // 4, device=device)
    product, _ = _seconds(lambda: torch.mm(matrix, matrix), device)
    touched, _ = _seconds(lambda: data.add(1.0), device)
    return 2 * _WIDTH**3 / product, 2 * _BYTES / touched


def _seconds(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """The time of the faster of two runs, and the least that the process's threads had of the cores."""
    measured, of_cores = [], []
    for _ in range(2):
        _finish(device)
        started, had = time.perf_counter(), time.process_time()
        work()
        _finish(device)
        measured.append(time.perf_counter() - started)
        of_cores.append(time.process_time() - had)
    return max(min(measured), 1e-9), min(of_cores)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
