"""No collective runs while a graph is traced, and no collective's result is known.

PyTorch computes on constants while it traces: a tensor that `torch.tensor` makes of numbers has a value then, and so
have the results of operators on it. The trace would issue a collective on such a tensor, which would meet other ranks'
steps, and the graph would keep the result for this batch:

    n = torch.tensor(lengths.shape[0])
    dist.all_reduce(n, dist.ReduceOp.MAX)
    return x * int(n)                          the number of the batch that was traced

Here the operands of a collective have no values while it is traced, and a tensor that it writes to has none afterwards.
A tensor that it only reads stays a constant for the program.

Private names, checked on torch 2.13: `FakeTensorMode.dispatch`, `FakeTensor.constant`,
`FakeTensorConverter.invalidate_constant_aliases`; `proxy_tensor.proxy_call` and `get_proxy_slot`, by which AOTAutograd
finds constants. A torch without these names traces collectives on constants as it always did.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from fxpasses.graph.collectives import is_collective, spans_ranks

_tracing: ContextVar[bool] = ContextVar("fxpasses_tracing_collectives", default=False)
_installing = threading.Lock()


@contextlib.contextmanager
def unknown() -> Iterator[None]:
    """Inside, trace collectives on constants like those on other tensors; on one process nothing changes."""
    if not spans_ranks() or _tracing.get():
        yield
        return
    _install()
    token = _tracing.set(True)
    try:
        yield
    finally:
        _tracing.reset(token)


@functools.cache
def _install() -> None:
    """Install the replacements once for the process: in other traces they only call the originals."""
    with _installing:
        _replace(FakeTensorMode, "dispatch", _dispatch)
        _replace(proxy_tensor, "proxy_call", _proxy_call)


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def replaced(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if not _tracing.get() or not isinstance(func, torch._ops.OpOverload) or not is_collective(func):
            return original(mode, func, *args, **kwargs)
        return replacement(original, mode, func, *args, **kwargs)

    setattr(owner, name, replaced)


def _dispatch(original: Callable[..., Any], mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    """FakeTensorMode.dispatch(self, func, types, args=(), kwargs=...)"""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
    if func._schema.is_mutable:
        for constant in [tensor.constant for tensor in tensors if tensor.constant is not None]:
            mode.fake_tensor_converter.invalidate_constant_aliases(constant)
    with _without_constants(func, tensors):
        return original(mode, func, *args, **kwargs)


def _proxy_call(original: Callable[..., Any], mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """proxy_call(proxy_mode, func, pre_dispatch, args, kwargs)"""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    with _without_constants(func, [proxy_tensor.get_proxy_slot(tensor, mode.tracer, None) for tensor in tensors]):
        return original(mode, func, *args, **kwargs)


@contextlib.contextmanager
def _without_constants(func: torch._ops.OpOverload, holders: list[Any]) -> Iterator[None]:
    """Hide the attribute `constant` of fake tensors, or of the proxies for tensors in a joint graph."""
    constants = [(holder, found) for holder in holders if (found := getattr(holder, "constant", None)) is not None]
    for holder, _ in constants:
        holder.constant = None
    try:
        yield
    finally:
        for holder, constant in () if func._schema.is_mutable else constants:
            holder.constant = constant
