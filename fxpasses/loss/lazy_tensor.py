"""A returned tensor that is computed when something reads it.

    out = compiled(input_ids=ids, labels=ids)
    out.loss.backward()                         nothing reads `out.logits`
    out.logits.shape, out.logits.float()        nor does this
    out.logits.argmax(-1)                       runs the captured graph, as eager mode would have

Its form (sizes, dtype, device) is known, and a cast or `detach` gives another such tensor. Anything else reads it, be
it an operator, an index, a print, NumPy or pickle, and gets what eager mode would have returned, with gradients. Where
parameters or inputs have changed since, that is no more to be had, and reading raises.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_CASTS = ("bfloat16", "detach", "double", "float", "half", "to", "type")
# Attributes and methods that ask for the form of a tensor.
_FORM = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized",
     "is_mkldnn", "is_nested", "is_mps", "is_xpu", "itemsize", "nbytes"}
)  # fmt: skip
_FORM_METHODS = frozenset(
    {"dim", "size", "numel", "nelement", "ndimension", "is_floating_point", "is_complex", "is_signed", "element_size",
     "get_device", "__len__", "is_inference", "is_same_size"}
)  # fmt: skip


class Source:
    """Computes the values that one call of a graph left out, once, when the first of them is read.

    compute: gives all of them. inputs: of the call; when one of its tensors has changed, nothing can be computed any
    more. on_read: called before.
    """

    def __init__(
        self, compute: Callable[[], Sequence[Tensor]], inputs: Sequence[Any], on_read: Callable[[], None]
    ) -> None:
        self._compute: Callable[[], Sequence[Tensor]] | None = compute
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        self._before = [(x, _state_of(x)) for x in tensors]
        self._on_read = on_read
        self._values: Sequence[Tensor] = ()
        self._lock = threading.RLock()

    def value(self, at: int) -> Tensor:
        with self._lock:
            if self._compute is not None:
                changed = [x for x, state in self._before if _state_of(x) != state]
                if changed:
                    raise RuntimeError(
                        "this output was not computed, since nothing had read it, and of the parameters and inputs "
                        f"that it depends on have changed {len(changed)} (one is {tuple(changed[0].shape)}): read it "
                        'before optimizer.step(), or compile with options={"fastpack.outputs": "exact"}'
                    )
                self._on_read()
                self._values = self._compute()
                self._compute, self._before = None, []
            return self._values[at]


def _state_of(tensor: Tensor) -> tuple[int, int]:
    try:
        return (-1 if tensor.is_inference() else tensor._version), tensor.data_ptr()
    except RuntimeError:  # it has no data of its own
        return -1, 0


class LazyTensor(Tensor):
    """The value `at` of a source, after the casts in `steps`, each a method's name with its arguments."""

    _source: Source
    _at: int
    _steps: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...]
    _requires_grad: bool
    _hooks: list[Callable[..., Any]]
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls: type[LazyTensor],
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        source: Source,
        at: int,
        steps: tuple[Any, ...] = (),
    ) -> LazyTensor:
        made = Tensor._make_wrapper_subclass(cls, tuple(sizes), dtype=dtype, device=device)
        made._source, made._at, made._steps, made._requires_grad = source, at, steps, requires_grad
        made._hooks, made._value = [], None
        return made

    def read(self) -> Tensor:
        """The tensor; raises `RuntimeError` if it cannot be computed any more."""
        if self._value is None:
            value = self._source.value(self._at)
            with torch.set_grad_enabled(self._requires_grad or torch.is_grad_enabled()):
                for name, args, kwargs in self._steps:
                    value = getattr(value, name)(*args, **kwargs)
            for hook in self._hooks:
                value.register_hook(hook)
            self._value = value
        return self._value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(first, LazyTensor) and first._value is None:
            if name == "__get__":
                found = _attribute(first, getattr(getattr(func, "__self__", None), "__name__", ""))
                if found is not None:
                    return found[0]
            elif name in _FORM_METHODS and func is getattr(Tensor, name, None):
                return _without_reading(func, *args, **kwargs)
            elif name in _CASTS and func is getattr(Tensor, name, None) and _is_plain((args[1:], kwargs)):
                return _cast(first, name, args[1:], kwargs)
            elif name == "register_hook" and first._requires_grad:
                return _Hook(first, args[1])
        args, kwargs = pytree.tree_map(_read, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = pytree.tree_map(_read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.read(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.read())

    def __format__(self, spec: str) -> str:
        return format(self.read(), spec)


def _without_reading(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


class _Hook:
    """The handle of a hook on gradients of a tensor that nothing has read."""

    def __init__(self, tensor: LazyTensor, hook: Callable[..., Any]) -> None:
        self._hooks, self._hook = tensor._hooks, hook
        self._hooks.append(hook)

    def remove(self) -> None:
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)


def _attribute(tensor: LazyTensor, name: str) -> tuple[Any] | None:
    """An attribute that needs no value, in a tuple."""
    if name in _FORM:
        with torch._C.DisableTorchFunctionSubclass():
            return (getattr(tensor, name),)
    if name == "requires_grad":
        return (tensor._requires_grad,)
    return {"is_leaf": (not tensor._requires_grad,), "retains_grad": (False,)}.get(name)


def _cast(tensor: LazyTensor, name: str, args: Any, kwargs: Any) -> Any:
    """A tensor that is cast when it is read."""
    with torch._C.DisableTorchFunctionSubclass():
        example = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        sizes = tuple(tensor.shape)
    found = getattr(example, name)(*args, **kwargs)
    if not isinstance(found, Tensor):  # x.type() is a string
        return found
    needs = tensor._requires_grad and name != "detach" and found.is_floating_point()
    if found.dtype == tensor.dtype and found.device == tensor.device and name != "detach" and not kwargs.get("copy"):
        return tensor
    steps = (*tensor._steps, (name, args, kwargs))
    return LazyTensor(sizes, found.dtype, found.device, needs, tensor._source, tensor._at, steps)


def _is_plain(arguments: Any) -> bool:
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(arguments))


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, LazyTensor) else value
