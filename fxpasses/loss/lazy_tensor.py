"""A returned tensor that is computed when something reads it.

    out = compiled(input_ids=ids, labels=ids)
    out.loss.backward()                         nothing reads `out.logits`
    out.logits.shape, out.logits.float()        nor does this
    out.logits.argmax(-1)                       runs the captured graph, as eager mode would have

Its form (sizes, dtype, device) is known, and a cast or `detach` gives another such tensor. Anything else, such as an
operator, an index, a print, NumPy or pickle, reads it, and gets what eager mode would have returned. If parameters or
inputs have changed since, that value can no longer be computed, and reading raises.

Autograd sees it as an ordinary result of the call's inputs:

    inputs ◀── _FromInputs ── lazy ◀── _Cast ── lazy.float()
                               ▲
                               └── _Value ── the value that was read

Gradients that reach it, through the value that was read or through code that ignores `__torch_function__` (autograd's
functions, vmap, TorchScript), go through the captured graph. So its hooks run, and its gradient can be retained, as for
any tensor.

Private names, checked on torch 2.13: `DisableTorchFunctionSubclass`, the stack of hooks on saved tensors,
`temporarily_clear_interpreter_stack` and `_set_throw_on_mutable_data_ptr`, without which `torch.utils.dlpack.to_dlpack`
follows a null pointer.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from fxpasses.base.containment import contained

_CASTS = ("bfloat16", "detach", "double", "float", "half", "to", "type")
# Attributes and methods that only ask for the form of a tensor.
_FORM = frozenset(
    {"shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized",
     "is_mkldnn", "is_nested", "is_mps", "is_xpu", "itemsize", "nbytes"}
)  # fmt: skip
_FORM_METHODS = frozenset(
    {"dim", "size", "numel", "nelement", "ndimension", "is_floating_point", "is_complex", "is_signed", "element_size",
     "get_device", "__len__", "is_inference", "is_same_size"}
)  # fmt: skip
# Attributes of autograd, which need no value.
_OF_AUTOGRAD = frozenset(
    {"requires_grad", "is_leaf", "grad_fn", "grad", "retains_grad", "output_nr", "_backward_hooks"}
)
_OF_AUTOGRAD_METHODS = frozenset(
    {"register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "backward"}
)


class Source:
    """Computes the values that one call of a graph left out, once, when the first of them is read.

    compute: returns all of them for inputs. inputs: those of the call. reads: the positions of those that the values
    depend on; once one of these tensors has changed, nothing can be computed any more. on_read: called first, with
    whether they are computed.
    """

    def __init__(
        self,
        compute: Callable[..., Sequence[Tensor]],
        inputs: Sequence[Any],
        reads: Sequence[int],
        on_read: Callable[[bool], None],
    ) -> None:
        self._compute: Callable[..., Sequence[Tensor]] | None = compute
        self._inputs = inputs
        self.tensors = [x for x in inputs if isinstance(x, Tensor)]
        self.needing = [x for x in self.tensors if x.requires_grad]
        self._aliases: list[Tensor] = []  # aliases of `needing`, so that the hooks on these run once
        self._before = [(x, _state_of(x)) for at in reads if isinstance(x := inputs[at], Tensor)]
        self._on_read = on_read
        self._values: Sequence[Tensor] = ()
        self._lock = threading.RLock()
        self.stepped = False  # an optimizer has changed a parameter
        _see_optimizers()
        _pending.add(self)

    def value(self, at: int) -> Tensor:
        with self._lock:
            if self._compute is not None:
                changed = [x for x, state in self._before if _state_of(x) != state]
                self._on_read(not changed and not self.stepped)
                if changed or self.stepped:
                    which = f" ({len(changed)} of them; one is {tuple(changed[0].shape)})" if changed else ""
                    raise RuntimeError(
                        "this output was not computed, since nothing had read it, and parameters or inputs that it "
                        f"depends on have changed{which}: read it before optimizer.step(), or compile with "
                        'options={"fastpack.outputs": "exact"}'
                    )
                with _outside():
                    aliases = {id(x): _alias(x) for x in self.needing}
                    self._values = self._compute(*(aliases.get(id(x), x) for x in self._inputs))
                self._aliases = [aliases[id(x)] for x in self.needing]
                self._compute, self._before, self._inputs = None, [], ()
                _pending.discard(self)
            return self._values[at]

    def gradients(self, at: int, gradient: Tensor) -> Sequence[Tensor | None]:
        """The gradients of the inputs that need one, for a gradient of the value `at`."""
        value = self.value(at)
        create = torch.is_grad_enabled()
        return torch.autograd.grad(
            value, self._aliases, gradient, retain_graph=True, create_graph=create, allow_unused=True
        )


def _state_of(tensor: Tensor) -> tuple[int, int]:
    try:
        return (-1 if tensor.is_inference() else tensor._version), tensor.data_ptr()
    except RuntimeError:  # the tensor has no data of its own
        return -1, 0


# The sources that were not computed: fused optimizers write to parameters without changing their version.
_pending: weakref.WeakSet[Source] = weakref.WeakSet()
_hook: Any = None


def _see_optimizers() -> None:
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Any, *_: Any) -> None:
    sources = list(_pending)
    if not sources:
        return
    written: set[int] | None = None
    with contained("looking at what an optimizer has written", "Outputs that nothing has read are lost."):
        written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for source in sources:
        source.stepped |= written is None or any(id(x) in written for x in source.tensors)


class LazyTensor(Tensor):
    """An output that `"fastpack.outputs": "lazy"` leaves uncomputed until something reads it.

    Operators, indices, prints, NumPy and pickle read it; its form (sizes, dtype, device), casts and `detach` do not.
    Reading raises `RuntimeError` once parameters or inputs that it depends on have changed. See `lazy_output`.
    """

    _compute: Callable[[], Tensor] | None
    _data: Tensor | None  # the value, without gradients
    _value: Tensor | None  # the value, whose gradients flow to this tensor
    _read_version: int  # the version of that value when it was read
    _casts: list[weakref.ref[LazyTensor]]

    @staticmethod
    def __new__(
        cls: type[LazyTensor],
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        compute: Callable[[], Tensor],
    ) -> LazyTensor:
        made = Tensor._make_wrapper_subclass(cls, tuple(sizes), dtype=dtype, device=device)
        torch._C._set_throw_on_mutable_data_ptr(made)
        made._compute, made._data, made._value, made._casts = compute, None, None, []
        return made

    def read(self) -> Tensor:
        """The ordinary tensor with the value; raises `RuntimeError` if it can no longer be computed."""
        if self._value is not None:
            return self._value
        data = self.data_of()
        with _outside():
            value: Tensor = _Value.apply(self, data)
        if not self._is_trained_leaf():  # its value would keep such a leaf alive, through its gradient's accumulator
            self._value, self._read_version = value, value._version
        return value

    def data_of(self) -> Tensor:
        """The value without gradients, in the same memory as the result of `read`."""
        if self._data is None:
            assert self._compute is not None
            with _outside():
                self._data = self._compute().detach()
            self._compute = None
            for made in self._casts:  # compute casts from the present value, which may be written to later
                if (cast := made()) is not None:
                    cast.data_of()
        return self._data

    @classmethod
    @torch._dynamo.disable
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if func in (torch.autograd.grad, torch.autograd.backward):
            return _without_reading(func, *args, **kwargs)
        if isinstance(first, LazyTensor):
            is_method = func in (getattr(Tensor, name, None), getattr(torch, name, None))
            if name in ("__get__", "__set__"):
                of = getattr(getattr(func, "__self__", None), "__name__", "")
                if name == "__set__" and of == "data":
                    return first._set_data(_read(args[1]))
                if (of in _FORM and first._data is None) or (of in _OF_AUTOGRAD and not first._is_rewritten()):
                    if name == "__set__" and of == "requires_grad":
                        first._forget_value()
                    return _without_reading(func, *args, **kwargs)
            elif is_method and name in _OF_AUTOGRAD_METHODS and not first._is_rewritten():
                if name == "requires_grad_":
                    first._forget_value()
                return _without_reading(func, *args, **kwargs)
            elif (name == "__setitem__" or _is_in_place(name)) and first._is_trained_leaf() and torch.is_grad_enabled():
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
            elif name == "detach_":
                raise RuntimeError(
                    "an output that is computed when it is read can't be detached in place: use detach()"
                )
            elif is_method and first._data is None:
                if name in _FORM_METHODS:
                    return _without_reading(func, *args, **kwargs)
                if name in _CASTS and _is_plain((args[1:], kwargs)) and not torch.is_inference_mode_enabled():
                    return _cast(first, name, args[1:], kwargs)
        args, kwargs = pytree.tree_map(_read, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = pytree.tree_map(_read_data, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _is_rewritten(self) -> bool:
        """Whether the value that was read has been written to, so that autograd's state is with it, and not here."""
        return self._value is not None and self._value._version != self._read_version

    def _is_trained_leaf(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self.is_leaf and self.requires_grad

    def _set_data(self, data: Tensor) -> None:
        self.data_of()  # computes its casts too
        self._data, self._value = data.detach(), None

    def _forget_value(self) -> None:
        """Forget a value that was read before the tensor required gradients: it has none."""
        self._value = None

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.read(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.read())

    def __format__(self, spec: str) -> str:
        return format(self.read(), spec)


def lazy_output(
    sizes: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool, source: Source, at: int
) -> LazyTensor:
    """A lazy tensor of known sizes, dtype and device for the value `at` of a source."""

    def make() -> LazyTensor:
        return LazyTensor(sizes, dtype, device, lambda: source.value(at))

    if not (requires_grad and source.needing and torch.is_grad_enabled()):
        return make()
    made: LazyTensor = _FromInputs.apply(make, source, at, *source.needing)
    return made


class _FromInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[[], LazyTensor], source: Source, at: int, *needing: Tensor) -> LazyTensor:
        ctx.source, ctx.at = source, at
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None, None, None, *[None] * len(ctx.source.needing))
        return (None, None, None, *ctx.source.gradients(ctx.at, gradient))


class _Alias(torch.autograd.Function):
    """The same values in the same memory. A view would lose its place in autograd's graph if its base is written to."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


def _alias(tensor: Tensor) -> Tensor:
    if tensor.requires_grad:
        made: Tensor = _Alias.apply(tensor)
        return made
    return tensor.detach().requires_grad_()  # it has been frozen since


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[[], LazyTensor], tensor: LazyTensor) -> LazyTensor:
        ctx.dtype, ctx.device = tensor.dtype, tensor.device
        return make()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, gradient.to(ctx.device, ctx.dtype)


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: LazyTensor, data: Tensor) -> Tensor:
        return data.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Run outside of the modes, transforms and checkpoints in which a tensor happens to be read first."""
    hooks: Any = torch._C._autograd
    with torch.inference_mode(False), torch.enable_grad(), temporarily_clear_interpreter_stack():
        # Hooks are removed, not covered by others: autograd checks no versions of tensors that hooks have packed.
        packing = []
        while hooks._saved_tensors_hooks_is_enabled() and (top := hooks._top_saved_tensors_default_hooks(False)):
            packing.append(top)
            hooks._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            for pair in reversed(packing):
                hooks._push_saved_tensors_default_hooks(*pair)


def _without_reading(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _cast(tensor: LazyTensor, name: str, args: Any, kwargs: Any) -> Any:
    """A lazy tensor that is cast when it or the original is read."""
    with torch._C.DisableTorchFunctionSubclass():
        example = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        sizes = tuple(tensor.shape)
    found = getattr(example, name)(*args, **kwargs)
    if not isinstance(found, Tensor):  # x.type() is a string
        return found
    if found.dtype == tensor.dtype and found.device == tensor.device and name != "detach" and not kwargs.get("copy"):
        return tensor

    def make() -> LazyTensor:
        return LazyTensor(sizes, found.dtype, found.device, lambda: getattr(tensor.data_of(), name)(*args, **kwargs))

    made: LazyTensor = make() if name == "detach" or not found.is_floating_point() else _Cast.apply(make, tensor)
    tensor._casts.append(weakref.ref(made))
    return made


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "share_memory_")


def _is_plain(arguments: Any) -> bool:
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(arguments))


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, LazyTensor) else value


def _read_data(value: Any) -> Any:
    return value.data_of() if isinstance(value, LazyTensor) else value
