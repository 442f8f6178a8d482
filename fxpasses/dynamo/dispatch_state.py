"""The state in which operators are called: as in a new thread, or as before an attempt that failed.

The program's questions reach us from anywhere: from an operator on fake tensors, from C++ that has switched Python's
dispatch off (`torch.as_tensor([n])` asks for `n` there), from below autograd, from a function transform, from regions
of inference mode or autocast. Our own operators run on fake tensors, which need Python's dispatch (without it, real
kernels touch memory that is not there, and the process dies), and on the batch, whose values must not depend on where
the question came from.

A compiler runs a graph's `torch._C._set_grad_enabled(False)` and enters its function transforms. If it raises before
the graph restores them, the next attempt would trace without gradients, or inside a transform.

Private names, checked on torch 2.13: `FakeTensorMode.in_kernel_invocation`, `torch._C._ForceDispatchKeyGuard`,
`torch._C._dispatch_tls_local_include_set` and `..._exclude_set`, `torch._C._DisablePythonDispatcher`,
`torch.utils._python_dispatch._disable_current_modes`,
`torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack`, `torch._C._PreserveDispatchKeyGuard`, and in
`torch._C._functorch` `get_dynamic_layer_stack_depth` and `pop_dynamic_layer_stack_and_undo_to_depth`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from fxpasses.metadata.runtime.prologue import AutocastState


@contextlib.contextmanager
def as_in_new_thread(
    autocast: AutocastState = (), inference: bool = False, fake_mode: FakeTensorMode | None = None
) -> Iterator[None]:
    """Run without modes, transforms and excluded dispatch keys, in these regions of autocast and inference mode.

    fake_mode: a mode whose tensors are used inside, and which may be running a kernel.
    """
    with contextlib.ExitStack() as stack:
        if fake_mode is not None:
            stack.enter_context(_outside_kernels(fake_mode))
        stack.enter_context(torch._C._ForceDispatchKeyGuard(*_keys()))
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C._DisablePythonDispatcher())
        stack.enter_context(torch.inference_mode(inference))
        for device_type, dtype, enabled in autocast:
            stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled))
        yield


@contextlib.contextmanager
def restored_if_it_fails() -> Iterator[None]:
    """After an error, restore the modes and transforms that were active before."""
    transforms, gradients = torch._C._functorch.get_dynamic_layer_stack_depth(), torch.is_grad_enabled()
    autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in ("cpu", "cuda")]
    with torch._C._PreserveDispatchKeyGuard():
        try:
            yield
        except BaseException:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(transforms)
            torch._C._set_grad_enabled(gradients)
            for device_type, enabled, dtype in autocast:
                torch.set_autocast_enabled(device_type, enabled)
                torch.set_autocast_dtype(device_type, dtype)
            raise


@contextlib.contextmanager
def _outside_kernels(fake_mode: FakeTensorMode) -> Iterator[None]:
    before, fake_mode.in_kernel_invocation = fake_mode.in_kernel_invocation, False
    try:
        yield
    finally:
        fake_mode.in_kernel_invocation = before


@functools.cache
def _keys() -> tuple[Any, Any]:
    """The dispatch keys that a new thread includes and excludes."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_own_keys).result()


def _own_keys() -> tuple[Any, Any]:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
