"""Hides computations that run once per batch from the program's dispatch modes: they are not part of the program.

Selective checkpointing counts the operators of a layer's forward pass, and expects the same operators when it
recomputes the layer. By then the batch's results exist, and fewer operators run.

Private names, checked on torch 2.11 and 2.13: `torch._C._len_torch_dispatch_stack`, `torch._C._get_dispatch_mode`,
`torch._C._TorchDispatchModeKey` and `torch.utils._python_dispatch._disable_current_modes`; and
`torch._C._ForceDispatchKeyGuard` with the functions for its two sets.
"""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import _disable_current_modes


def unseen() -> contextlib.AbstractContextManager[object]:
    """Disable dispatch modes inside, unless a compiler traces: its modes stay."""
    if torch._C._len_torch_dispatch_stack() == 0 or _a_compiler_traces():
        return contextlib.nullcontext()
    return _disable_current_modes()


def _a_compiler_traces() -> bool:
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))


def with_autograd() -> contextlib.AbstractContextManager[object]:
    """Inside an operator, where PyTorch excludes autograd, make autograd work as outside."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(include, exclude)
