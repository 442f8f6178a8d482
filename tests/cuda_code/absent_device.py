"""A CUDA device that is not there: torch's CUDA build and Triton take it for an H100, and nothing can run on it.

    with absent_device() as device:
        model, x = device.tensors(model), device.tensors(x)     fake tensors on `cuda:0`, without data
        torch.compile(model, backend=...)(x)                     traced, lowered, its code written

What asks the driver is replaced while the device is open, by names checked on torch's CUDA build 2.15 and Triton 3.9:

| replaced | by whom it is asked |
|---|---|
| `torch.cuda._lazy_init` | everything in `torch.cuda`, before it asks the driver |
| `is_available`, `device_count`, `current_device`, `is_current_stream_capturing` of `torch.cuda` | Dynamo, Inductor |
| `torch.cuda._get_device_properties` | Inductor's heuristics, this package |
| `torch.cuda.get_rng_state` | Dynamo, around each trace |
| `torch.cuda._exchange_device`, `_maybe_exchange_device` | `torch.cuda.device(...)` |
| the patterns of `fuse_attention`, `misc_patterns`, `pad_mm` | Inductor, which traces them on tensors of the device |
| the device guard, as fake tensors do, for the rest of the process | autograd |
| `CUDAHooks::hasPrimaryContext` in C++, for the rest of the process | autograd, before each backward pass |
| `triton.runtime.driver` | Inductor and Triton, for the target |
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

DEVICE = torch.device("cuda:0")
CAPABILITY = (9, 0)

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=80 << 30,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    is_integrated=False,
    gcnArchName="",
)

T = TypeVar("T")


class AbsentDevice:
    """Fake tensors on the device."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fake = FakeTensor(self.mode, torch.empty_like(tensor, device="meta"), DEVICE)
        return fake.requires_grad_(tensor.requires_grad)

    def tensors(self, tree: T) -> T:
        """Each tensor of a tree, or each parameter and buffer of a copy of a module, without its data."""
        if not isinstance(tree, nn.Module):
            return pytree.tree_map_only(torch.Tensor, self.tensor, tree)
        module = copy.deepcopy(tree)
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = nn.Parameter(self.tensor(parameter.detach()), parameter.requires_grad)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = self.tensor(buffer)
        return module


class _Driver:
    """`triton.runtime.driver.active`, as far as compiling asks it. Names: checked on Triton 3.9."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], H100.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return DEVICE

    def get_device_interface(self) -> Any:
        return torch.cuda


_HAS_PRIMARY_CONTEXT = 4  # after two destructors, `isBuilt` and `isAvailable`: ATen/detail/AcceleratorHooksInterface.h
_TABLE = 2 + 64  # words copied; the offset to the top and the type come before a table


@functools.cache
def _say_there_is_no_context() -> tuple[Any, ...]:
    """Have the hooks of CUDA say that no device has a context, instead of asking a device that is not there.

    By a copy of the object's virtual table, which has another function at one place: C++ offers no other way in, short
    of an extension that is compiled for it. Returns what has to outlive the process's use of CUDA.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
    hooks = library._ZN2at6detail12getCUDAHooksEv
    hooks.restype = ctypes.c_void_p
    table = ctypes.c_void_p.from_address(hooks())
    word, words = ctypes.sizeof(ctypes.c_void_p), ctypes.c_void_p * _TABLE
    assert table.value is not None
    replaced = words.from_buffer_copy(words.from_address(table.value - 2 * word))
    answer = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda _, index: False)
    replaced[2 + _HAS_PRIMARY_CONTEXT] = ctypes.cast(answer, ctypes.c_void_p).value
    table.value = ctypes.addressof(replaced) + 2 * word
    return replaced, answer


@contextlib.contextmanager
def absent_device() -> Iterator[AbsentDevice]:
    """Have torch and Triton take the device for present."""
    import torch._inductor.fx_passes.fuse_attention
    import torch._inductor.fx_passes.misc_patterns
    import torch._inductor.fx_passes.pad_mm
    from triton.runtime import driver

    patterns = torch._inductor.fx_passes
    torch._C._ensureCUDADeviceGuardSet()
    _say_there_is_no_context()
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "_lazy_init", None),
        (torch.cuda, "is_available", True),
        (torch.cuda, "device_count", 1),
        (torch.cuda, "current_device", 0),
        (torch.cuda, "_exchange_device", 0),
        (torch.cuda, "_maybe_exchange_device", 0),
        (torch.cuda, "_get_device_properties", H100),
        (torch.cuda, "is_current_stream_capturing", False),
        (torch.cuda, "get_rng_state", torch.zeros(16, dtype=torch.uint8)),
        (patterns.fuse_attention, "_sfdp_init", None),
        (patterns.misc_patterns, "_misc_patterns_init", None),
        (patterns.pad_mm, "_pad_mm_init", None),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, lambda *_, value=value, **__: value, create=True))
        before = driver._active
        driver.set_active(_Driver())
        stack.callback(setattr, driver, "_active", before)
        yield AbsentDevice()
