"""The simulated device of the tests, as a case uses it: in the timed order, with set costs.

It lets a machine without an accelerator measure what depends on a device's asynchrony alone: how often the host waits,
and how copies overlap with compute. It says nothing of the speed of any real device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from bench.case import Parameters

DEVICE = "sim"
NOTE = (
    "**This is a simulation**: the device is the one of `tests/device`, memory of the host with a thread for each "
    "stream. Each kernel and each copy takes the time that is set for it, mostly asleep, in slow motion against the "
    "host. Counts are exact; times show what waits for what, and not how fast any device is."
)
CALIBRATION = 30  # kernels
_plugged = contextlib.ExitStack()  # PyTorch registers a backend once per process, and it stays


def unavailable(parameters: Parameters, device: str) -> str:
    if device != "cpu":
        return "the device is simulated on the host: it is measured with --device cpu"
    from tests.device import building

    missing = building.missing()
    return f"the simulated device cannot be built: {missing}" if missing else ""


def plug_in() -> Any:
    """Build and register the device in this process, and have it run in the timed order; returns its controls.

    Call it before anything runs backward: autograd makes its threads then, one for each device.
    """
    from tests.device import simulated

    simulated.load()
    _plugged.enter_context(simulated.plugged_in("timed"))
    return simulated


def device_seconds(run: Callable[[], object]) -> float:
    """From an idle device to the end of all that `run` queues on the current stream, by the device's own events."""
    import torch

    torch.accelerator.synchronize()
    start, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.accelerator.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def kernel_seconds() -> float:
    """What a queued kernel takes: the set time, unless the machine is busier than that."""
    import torch

    x = torch.ones(8, device=DEVICE)

    def queue() -> None:
        for _ in range(CALIBRATION):
            x.mul_(1)

    return device_seconds(queue) / CALIBRATION
