"""The simulated device "sim": two accelerators over host memory, whose streams run in the order that a test chooses.

`load()` builds and registers it, before the first backward pass of the process: that is when autograd makes a thread
for each device. `simulator/` says what it does; what a test may set and read is here.
"""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from tests.device import building

ORDERS = ("late", "early", "random", "timed")
DEVICES = 2
_device: Any = None  # the library; PyTorch registers a backend once per process


@dataclass(frozen=True)
class Counts:
    """Of all devices since the last reset. copies_in: host to device; bytes likewise. streams: that had work.

    reads, shapes, blocking_copies, synchronizations: why the host waited. late_writes: memory that was written to after
    it had been released.
    """

    copies_out: int = 0
    bytes_out: int = 0
    copies_in: int = 0
    bytes_in: int = 0
    copies_between: int = 0
    bytes_between: int = 0
    kernels: int = 0
    reads: int = 0
    shapes: int = 0
    blocking_copies: int = 0
    synchronizations: int = 0
    streams: int = 0
    late_writes: int = 0

    @property
    def stalls(self) -> int:
        return self.reads + self.shapes + self.blocking_copies + self.synchronizations


def load() -> None:
    global _device
    if _device is not None:
        return
    import torch._meta_registrations  # kernels for meta tensors that are written in Python

    path = str(building.library())
    torch.ops.load_library(path)
    _device = ctypes.CDLL(path)
    _device.sim_allocated.restype = _device.sim_most_allocated.restype = ctypes.c_size_t
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


@contextlib.contextmanager
def plugged_in(order: str = "late", seed: int = 0) -> Iterator[None]:
    """The devices are there, in a fresh state, and run in `order`; afterwards `torch.accelerator` finds none."""
    _device.sim_plug_in(1)
    set_order(order, seed)
    reset()
    torch.get_device_module("sim").manual_seed_all(0)
    try:
        yield
    finally:
        reset()
        with contextlib.suppress(RuntimeError):
            set_order("late")
        _device.sim_plug_in(0)


def reset() -> None:
    """No limits, no costs, no counts."""
    for device in range(DEVICES):
        limit(device, None)
        refuse(device, times=0)
    refuse_pinning(False)
    costs()
    reset_counts()


def counts() -> Counts:
    values = (ctypes.c_int64 * len(fields(Counts)))()
    _device.sim_counts(values)
    return Counts(*values)


def reset_counts() -> None:
    _device.sim_reset_counts()
    for device in range(DEVICES):
        _device.sim_forget_most_allocated(device)


def set_order(order: str, seed: int = 0) -> None:
    """One of `ORDERS` (`simulator/schedule.h` says what they are). Waits for all work that was queued before."""
    if _device.sim_set_order(ORDERS.index(order), ctypes.c_uint64(seed)):
        raise RuntimeError("work that was queued on a simulated device has failed")


def costs(out: float = 0.0, in_: float = 0.0, between: float = 0.0, kernel: float = 0.0) -> None:
    """In the timed order: bytes a second of copies by direction (0: no limit), seconds that a kernel takes at least."""
    _device.sim_set_bandwidth(ctypes.c_double(out), ctypes.c_double(in_), ctypes.c_double(between))
    _device.sim_set_kernel_seconds(ctypes.c_double(kernel))


def sleep(seconds: float, device: int = 0) -> None:
    """A kernel on the device's current stream that takes so long in the timed order."""
    _device.sim_sleep(device, ctypes.c_double(seconds))


def limit(device: int, size: int | None) -> None:
    """Bytes that may be allocated at once; more is out of memory."""
    _device.sim_set_limit(device, ctypes.c_size_t(size or 0))


def refuse(device: int = 0, at_least: int = 0, after: int = 0, times: int = 1) -> None:
    """Be out of memory `times` times, after the next `after` allocations of at least `at_least` bytes."""
    _device.sim_refuse(device, ctypes.c_size_t(at_least), ctypes.c_int64(after), ctypes.c_int64(times))


def refuse_pinning(refuses: bool = True) -> None:
    _device.sim_refuse_pinning(int(refuses))


def allocated(device: int = 0) -> int:
    """Bytes, in blocks of 512."""
    return _device.sim_allocated(device)


def most_allocated(device: int = 0) -> int:
    """The most since the last reset of the counts."""
    return _device.sim_most_allocated(device)


def _module() -> types.ModuleType:
    """`torch.sim`, as far as PyTorch asks for it."""
    module: Any = types.ModuleType("torch.sim")

    def index(device: Any) -> int:
        found = torch.device(device).index if isinstance(device, (str, torch.device)) else device
        return _device.sim_current_device() if found is None or found < 0 else found

    def get_rng_state(device: Any = "sim") -> torch.Tensor:
        found = (ctypes.c_uint64 * 2)()
        _device.sim_generator(index(device), found)
        return torch.frombuffer(bytearray(found), dtype=torch.uint8)

    def set_rng_state(new: torch.Tensor, device: Any = "sim") -> None:
        _device.sim_set_generator(index(device), (ctypes.c_uint64 * 2).from_buffer_copy(bytes(new.tolist())))

    def manual_seed_all(seed: int) -> None:
        for device in range(DEVICES):
            _device.sim_set_generator(device, (ctypes.c_uint64 * 2)(seed % 2**64, 0))

    module.is_initialized = lambda: True
    module.memory_allocated = lambda device="sim": allocated(index(device))
    module.max_memory_allocated = lambda device="sim": most_allocated(index(device))
    # Without it, torch 2.11 never marks the device as initialized, and torch.accelerator.synchronize does not wait.
    module._lazy_init = lambda: None
    module._initialized = True  # without it, a checkpoint of eager mode draws new random numbers when it recomputes
    module.is_available = lambda: bool(_device.sim_is_plugged_in())
    module.device_count = lambda: DEVICES * _device.sim_is_plugged_in()
    module.current_device = lambda: _device.sim_current_device()
    module.set_device = torch.accelerator.set_device_index
    module.device = torch.accelerator.device_index
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module.Stream, module.Event = torch.Stream, torch.Event
    module._is_in_bad_fork = lambda: False
    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    module.manual_seed_all = module.manual_seed = manual_seed_all
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
