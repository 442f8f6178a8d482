"""The program that a step runs on each row of its logits, as data: a program of rows.

    def body(logits, target):                     logits: [n, V], target: [n]
        return cross_entropy(logits.float(), target, reduction="none"), logits.argmax(-1)

Each row of the results depends only on the same row of the operands, so the program may run on any rows at a time.
Together with its gradients it is one function, in which the gradient of the logits overwrites them:

    def step(logits, target, cotangent):
        losses, best = body(logits, target)
        total = (losses * cotangent).sum()
        logits.copy_(d total / d logits)
        return total, best

A program compiles for any number of rows, once, when it first runs.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxpasses.base.containment import say
from fxpasses.runtime.dispatch_modes import unseen, with_autograd

# Inductor of torch 2.11 may read an element of an operand after it has overwritten the operand; 2.12 was not tried.
_KEEPS_ORDER = torch.__version__ >= "2.13"
_ROWS = 48  # the number of rows while tracing: any number that is not a usual size


@dataclass(frozen=True)
class Result:
    """One result of a program: [n, *sizes] of a dtype. differentiable: whether a gradient may flow through it."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True)
class Wanted:
    """What one run computes. values: whether it returns the results, and not only their weighted sum.

    gradients: for each operand of the body, whether its gradient is computed.
    """

    values: bool
    gradients: tuple[bool, ...]


@dataclass(eq=False)
class RowProgram:
    """body: a graph that takes products [n, V], operands with rows [n, ...] and operands without, in this order, and
    returns a tuple of results [n, ...].

    products, rows, shared: how many operands of each kind. results: what it returns. inductor: the options with which
    Inductor compiles it, or None to run it operator by operator.
    """

    body: GraphModule
    products: int
    rows: int
    shared: int
    results: tuple[Result, ...]
    inductor: Mapping[str, Any] | None = None
    _compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    _saved: dict[Any, int] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def key(self) -> str:
        """A fingerprint: programs with equal keys compute the same."""
        text = [self.body.code, self.products, self.rows, self.shared, self.results, self.inductor]
        return hashlib.sha256(repr(text).encode()).hexdigest()[:32]

    @property
    def trained(self) -> list[int]:
        """The positions of the results through which gradients flow."""
        return [at for at, result in enumerate(self.results) if result.differentiable]

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which trained results are added: float32 or wider."""
        wide = torch.float32
        for at in self.trained:
            wide = torch.promote_types(wide, self.results[at].dtype)
        return wide

    def __call__(self, operands: Sequence[Tensor], cotangents: Sequence[Tensor], wanted: Wanted) -> list[Tensor]:
        """Run on some rows.

        operands: the body's. cotangents: for each trained result, a factor of the same size; none if only the results
        are wanted. All are contiguous. Returns the sum of trained results times cotangents, in float32 or wider, if
        there are cotangents; the results, if wanted; and the wanted gradients of that sum, except those of products,
        which overwrite the products.
        """
        inputs = [*operands, *cotangents]
        key = (
            wanted,
            tuple((x.dtype, x.shape[x.dim() and self._has_rows(at) :], x.device) for at, x in enumerate(inputs)),
        )
        run = self._compiled.get(key)
        if run is None:
            with self._lock:
                run = self._compiled.get(key) or self._compile(inputs, wanted)
                self._compiled[key] = run
        return run(*inputs)

    def bytes_saved_of_a_row(self, operands: Sequence[Tensor]) -> int:
        """How many bytes of each row autograd would save for the gradient of the logits: counted on fake tensors."""
        key = tuple((x.dtype, x.shape[1:]) for x in operands[: self.products])
        if key not in self._saved:
            self._saved[key] = self._count_saved(operands)
        return self._saved[key]

    def _count_saved(self, operands: Sequence[Tensor]) -> int:
        found: dict[int, Any] = {}

        def pack(x: Tensor) -> Tensor:
            if x.dim() and x.shape[0] == _ROWS:
                found[x.untyped_storage()._cdata] = x.untyped_storage()
            return x

        try:
            with unseen(), with_autograd(), torch.inference_mode(False), FakeTensorMode(), torch.enable_grad():
                fakes = self._like(operands, _ROWS)
                with saved_tensors_hooks(pack, pack), enable_python_dispatcher():
                    self.body(*(x.requires_grad_() if at < self.products else x for at, x in enumerate(fakes)))
        except Exception as error:
            say("counting what the loss of a row saves", error, "Chunks have half as many rows.")
            return sum(x.shape[-1] * x.element_size() for x in operands[: self.products])
        return sum(storage.nbytes() for storage in found.values()) // _ROWS

    def _has_rows(self, at: int) -> bool:
        return not self.products + self.rows <= at < self.products + self.rows + self.shared

    def _compile(self, inputs: Sequence[Tensor], wanted: Wanted) -> Callable[..., Any]:
        """Compile under Dynamo's lock: tracing changes state that Dynamo's guards check, in other threads as well."""
        overwrites = self.inductor is None or _KEEPS_ORDER
        step: Callable[..., Any] = self._step(wanted, overwrites)
        with compile_lock, unseen(), with_autograd(), torch.inference_mode(False), torch.no_grad():
            try:
                traced, fakes, fake_mode = self._traced(step, inputs)
                if self.inductor is None:
                    return traced
                from torch._inductor.compile_fx import compile_fx  # takes a second to import

                step = traced
                with tracing(TracingContext(fake_mode)):
                    compiled: Any = compile_fx(traced, fakes, config_patches=dict(self.inductor) | _FIXED)
                    run = _in_inference(compiled)
                    return run if overwrites else self._overwriting(run, wanted)
            except Exception as error:
                say("compiling the loss of some rows", error, "It runs operator by operator.")
        run = step if isinstance(step, GraphModule) else _with_autograd(step)
        return run if overwrites else self._overwriting(run, wanted)

    def _traced(self, step: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[GraphModule, list[Any], Any]:
        """The step as a graph of ATen operators for any number of rows, its fake inputs, and their mode."""
        shape_env = ShapeEnv()
        fake_mode = FakeTensorMode(shape_env=shape_env)
        fakes = self._fakes(inputs, fake_mode)
        with fake_mode, enable_python_dispatcher():  # also for numbers in the program, some of which become tensors
            traced = make_fx(step, tracing_mode="real")(*fakes)
        if shape_env.replacements:
            raise RuntimeError(f"a program of rows is traced for {_ROWS} rows alone")
        return traced, fakes, fake_mode

    def _fakes(self, inputs: Sequence[Tensor], fake_mode: FakeTensorMode) -> list[Tensor]:
        """Inputs whose number of rows is one symbol."""
        sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (inputs[0].dim() - 1)]
        with torch.no_grad():
            first = torch.empty(_ROWS, *inputs[0].shape[1:], dtype=inputs[0].dtype, device="meta")
        count = fake_mode.from_tensor(first, symbolic_context=StatelessSymbolicContext(sizes)).shape[0]
        with fake_mode:
            return self._like(inputs, count)

    def _like(self, inputs: Sequence[Tensor], count: Any) -> list[Tensor]:
        """Inputs with `count` rows, of arbitrary values."""
        found = []
        for at, x in enumerate(inputs):
            rows = [count] if self._has_rows(at) else []
            found.append(torch.empty((*rows, *x.shape[len(rows) :]), dtype=x.dtype, device=x.device))
        return found

    def _overwriting(self, run: Callable[..., Any], wanted: Wanted) -> Callable[..., Any]:
        """A step that returns the gradients of products last, made to overwrite the products with them."""
        at = [at for at in range(self.products) if wanted.gradients[at]]

        def overwriting(*inputs: Tensor) -> list[Tensor]:
            found = list(run(*inputs))
            for product, gradient in zip(at, found[len(found) - len(at) :], strict=True):
                inputs[product].copy_(gradient)
            return found[: len(found) - len(at)]

        return overwriting

    def _step(self, wanted: Wanted, overwrites: bool) -> Callable[..., Any]:
        count = self.products + self.rows + self.shared

        def step(*inputs: Tensor) -> list[Tensor]:
            operands, cotangents = inputs[:count], inputs[count:]
            leaves = [x.detach().requires_grad_(need) for x, need in zip(operands, wanted.gradients, strict=True)]
            with torch.enable_grad() if any(wanted.gradients) else torch.no_grad():
                results = self.body(*leaves)
            trained = [results[at].detach() for at in self.trained]
            found = [weighted_sum(trained, cotangents)] if cotangents else []
            if wanted.values:
                found += [result.detach() for result in results]
            if not any(wanted.gradients):
                return found
            needing = [leaf for leaf in leaves if leaf.requires_grad]
            outputs = [(results[at], c) for at, c in zip(self.trained, cotangents, strict=True)]
            outputs = [(result, c.to(result.dtype)) for result, c in outputs if result.requires_grad]
            gradients = iter(
                torch.autograd.grad(
                    [result for result, _ in outputs], needing, [c for _, c in outputs], materialize_grads=True
                )
            )
            of_products = []
            for at, operand in enumerate(operands):
                if wanted.gradients[at]:
                    gradient = next(gradients)
                    if at >= self.products:
                        found.append(gradient)
                    elif overwrites:
                        operand.copy_(gradient)
                    else:
                        of_products.append(gradient)
            return [*found, *of_products]

        return step


def _with_autograd(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that uses autograd, made to run inside of an operator."""

    def run(*inputs: Tensor) -> Any:
        with unseen(), with_autograd():
            return step(*inputs)

    return run


def _in_inference(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def run(*inputs: Tensor) -> Any:
        with torch.no_grad():
            return compiled(*inputs)

    return run


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of a dtype are added: float32 or wider."""
    return torch.promote_types(torch.float32, dtype)


def weighted_sum(results: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Tensor:
    """The sum of results times cotangents, in float32 or wider; times 0, even a result that is not finite counts 0."""
    sums = []
    for result, cotangent in zip(results, cotangents, strict=True):
        wide = widened(result.dtype)
        product = result.to(wide) * cotangent.to(wide)
        sums.append(product.masked_fill(cotangent == 0, 0).sum())
    return functools.reduce(torch.add, sums)


# Off inside a step, whose own graph may be recorded or frozen.
_FIXED = {"triton.cudagraphs": False, "freezing": False}

# A graph's operators take only plain data, so they find the programs of this process here, by key.
_programs: dict[str, RowProgram] = {}


def register(program: RowProgram) -> str:
    """The key by which operators find a program."""
    return _programs.setdefault(program.key, program).key


def registered(key: str) -> RowProgram:
    return _programs[key]
