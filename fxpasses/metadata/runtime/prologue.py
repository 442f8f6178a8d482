"""Runs a prologue: once per batch, with all host reads in one transfer."""

from __future__ import annotations

import contextlib
import operator
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from fxpasses.base import sample
from fxpasses.base.containment import say
from fxpasses.errors import MetadataError, RecordingError
from fxpasses.metadata.program import Check, Output, Program
from fxpasses.metadata.runtime.batch_cache import BatchCache, State, batch_cache
from fxpasses.metadata.runtime.transfers import to_device, to_host
from fxpasses.runtime import cuda_extras
from fxpasses.runtime.dispatch_modes import unseen

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip

Inputs = Sequence[Any] | Mapping[int, Any]  # by position; a prologue reads only those in `positions()`
AutocastState = tuple[tuple[str, torch.dtype, bool], ...]


class Later(Protocol):
    """What has the compiled device graph of a prologue after some batches."""

    def took(self, seconds: float) -> None:
        """A batch has taken so long without it."""

    def found(self) -> Callable[..., Sequence[Any]] | None:
        """The compiled graph, if it is there."""


class OperatorFailed(RuntimeError):
    """An operator of the program failed on a batch, as `__cause__` says."""


class Prologue:
    """Computes the extra inputs of a main graph from its original inputs.

    sources: Dynamo's expression for each input of the main graph (`L['lengths']`), for prefetching.
    autocast: the autocast state to compute under, by default the current one; Dynamo's guards keep it valid.
    compiled: the compiled device graph of the program; if it fails, the graph runs uncompiled, with one warning. later:
    has the compiled graph from some batch on.
    """

    def __init__(
        self,
        program: Program,
        sources: Sequence[str] = (),
        cache: BatchCache = batch_cache,
        autocast: AutocastState | None = None,
        compiled: Callable[..., Sequence[Any]] | None = None,
        later: Later | None = None,
    ) -> None:
        self.program = program
        self.compiled = compiled
        self.later = later
        self.sources = tuple(sources)
        self.cache = cache
        self._autocast = autocast_state() if autocast is None else autocast
        self.key = f"{program.key()}:{self._autocast}:{torch.get_default_dtype()}:{torch.get_default_device()}"
        self.key += ":compiled" * (compiled is not None)  # fused operators may round differently
        self.runs = 0
        if sources:
            _live.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Its copy computes under the same autocast, with the cache of its process, and uncompiled."""
        return _copy, (self.program, self.sources, self._autocast)

    def __call__(self, inputs: Inputs) -> tuple[Any, ...]:
        """The extra inputs for `inputs`, those of the captured graph.

        Raises `MetadataError` if an assertion fails, and `OperatorFailed` if an operator of the program does. If a CUDA
        graph is being recorded around the caller, the prologue becomes a part of it, or raises `RecordingError`.
        """
        if cuda_extras.is_recording():
            with unseen():
                return self._record(inputs)
        with unseen():
            found = self.known(inputs)
            if found is None:
                state = State.of(self.roots(inputs))
                found = self._compute(inputs)
                self.keep(inputs, state, found)
        return found

    def known(self, inputs: Inputs) -> tuple[Any, ...] | None:
        """The extra inputs for `inputs`, if they were computed since these tensors were last written to."""
        found: tuple[Any, ...] | None = self.cache.get(self.key, self.roots(inputs), self.sizes(inputs))
        return found

    def keep(self, inputs: Inputs, state: State, results: tuple[Any, ...]) -> None:
        """Keep `results` for `inputs` as long as these live. state: that of the roots they were computed from."""
        self.cache.put(self.key, self.roots(inputs), state, results, self.sizes(inputs))

    def roots(self, inputs: Inputs) -> list[Any]:
        """The tensors on which any result depends."""
        return [inputs[position] for position in self.program.roots]

    def sizes(self, inputs: Inputs) -> tuple[int, ...]:
        """The integers that the results depend on, besides the roots and `key` (the program, and its modes)."""
        return tuple(inputs[i] for i in self.positions() if isinstance(inputs[i], int))

    def is_valid(self, inputs: Sequence[Any]) -> bool:
        """Whether no input that the main graph writes to shares memory with an input that the prologue reads."""
        if not self.program.written or not self.program.roots:
            return True
        written = {_storage(inputs[position]) for position in self.program.written}
        return written.isdisjoint(_storage(inputs[position]) for position in self.program.roots)

    def has_fake_root(self, inputs: Sequence[Any]) -> bool:
        return any(isinstance(inputs[position], FakeTensor) for position in self.program.roots)

    def positions(self) -> tuple[int, ...]:
        """The positions of the main graph's inputs that the prologue reads."""
        return (*self.program.host_inputs, *self.program.device_inputs)

    def _record(self, inputs: Inputs) -> tuple[Any, ...]:
        """Compute into new memory, which no other caller shares: replays overwrite the results of this run.

        A copy from the host to the device cannot be recorded: replays would read host memory that is free by then.
        """
        copied = [device for _, device in self.program.imports if device is not None and device.type != "cpu"]
        if copied:
            raise RecordingError(
                f"a CUDA graph is recorded around a model whose metadata is copied from the host to {copied[0]} for "
                'each batch. Leave it to the backend: with mode="reduce-overhead" it runs before each replay what '
                "depends on the batch"
            )
        return self._compute(inputs)

    def _compute(self, inputs: Inputs) -> tuple[Any, ...]:
        self.runs += 1
        program = self.program
        with torch.inference_mode(False), torch.no_grad(), contextlib.ExitStack() as stack:
            for device_type, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled))
            results = {"host": self._run_host(inputs)}
            self._check(results)
            if program.device is not None:
                imported = [
                    to_device(results["host"][position], device) if device is not None else results["host"][position]
                    for position, device in program.imports
                ]
                results["device"] = self._run_device([*(inputs[i] for i in program.device_inputs), *imported])
            return tuple(_convert(output, results[output.side][output.position]) for output in program.outputs)

    def _run_host(self, inputs: Inputs) -> tuple[Any, ...]:
        arguments = [inputs[position] for position in self.program.host_inputs]
        if self.program.device is not None or any(
            isinstance(a, torch.Tensor) and a.device.type != "cpu" for a in arguments
        ):
            tensors = iter(to_host([a for a in arguments if isinstance(a, torch.Tensor)], self.cache))
            arguments = [next(tensors) if isinstance(a, torch.Tensor) else a for a in arguments]
        return _run_operators(self.program.host, arguments)

    def _run_device(self, arguments: list[Any]) -> tuple[Any, ...]:
        assert self.program.device is not None
        later = self.later
        if later is not None and (found := later.found()) is not None:
            self.compiled, self.later = found, None
        compiled = self.compiled
        if compiled is not None:
            try:
                return tuple(compiled(*arguments))
            except Exception as error:
                self.compiled = None
                warnings.warn(
                    f"fxpasses: a compiled prologue failed ({type(error).__name__}: {error}). It runs operator by "
                    "operator from now on.",
                    stacklevel=2,
                )
        started = time.perf_counter()
        results: tuple[Any, ...] = _run_operators(self.program.device, arguments)
        if later is not None:
            later.took(time.perf_counter() - started)
        return results

    def _check(self, results: dict[str, tuple[Any, ...]]) -> None:
        for check in self.program.checks:
            left, right = (
                results[value.side][value.position] if isinstance(value, Output) else value
                for value in (check.left, check.right)
            )
            if not (_COMPARISONS[check.comparison](left, right) if check.comparison else left):
                raise MetadataError(_message(check, left, right))


def _copy(program: Program, sources: Sequence[str], autocast: AutocastState) -> Prologue:
    return Prologue(program, sources, autocast=autocast)


def _run_operators(part: GraphModule, arguments: Sequence[Any]) -> Any:
    """Run the operators of a program; their errors are the program's or the batch's, and not this package's."""
    try:
        return part.forward(*arguments)  # unlike a call, this prints no traceback if it fails
    except Exception as error:
        raise OperatorFailed(f"{type(error).__name__}: {error}") from error


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _convert(output: Output, value: Any) -> Any:
    if output.dimension is not None:
        return value.shape[output.dimension]
    if output.as_dtype is not None:
        return torch.scalar_tensor(value, dtype=output.as_dtype, device="cpu")
    return int(value) if output.as_int else value


def _message(check: Check, left: Any, right: Any) -> str:
    place = f" (at {check.where})" if check.where else ""
    if not check.comparison:
        return f"the batch breaks an assertion of the model: {check.left_text} does not hold{place}"
    right_text = "" if check.right_text == str(right) else f" and {check.right_text} is {right}"
    return (
        f"the batch breaks an assertion of the model: {check.left_text} {check.comparison} {check.right_text}, but "
        f"{check.left_text} is {left}{right_text}{place}"
    )


# All prologues in use: `torch.compile` offers no way from a compiled model to the callables of its backend.
_live: weakref.WeakSet[Prologue] = weakref.WeakSet()


def live_prologues() -> list[Prologue]:
    return list(_live)


def autocast_state() -> AutocastState:
    """The autocast regions that are open now: device type, dtype and whether autocast is on."""
    types = ["cpu"]
    if torch.accelerator.is_available():
        types.append(str(torch.accelerator.current_accelerator()).split(":")[0])
    return tuple((t, torch.get_autocast_dtype(t), True) for t in types if torch.is_autocast_enabled(t))


def with_prologue(
    main: Callable[..., Any],
    prologue: Prologue,
    captured: Callable[..., Any],
    fakes: Sequence[Any],
    raising: Callable[..., Any] | None = None,
    strict: bool = False,
) -> Callable[..., Any]:
    """A callable that takes the captured graph's inputs and passes them to `main` with the prologue's outputs.

    captured: runs the captured graph, for inputs for which the prologue is not valid, and for a batch on which it
    fails; the failure gives one warning, unless the program fails as well. fakes: stand for the prologue's outputs if
    inputs are fake tensors, which have no values: DDPOptimizer runs each compiled piece once on these. raising: runs a
    batch that breaks an assertion up to the point where eager mode raises, with the collectives before it, for which
    other ranks wait; None to raise before anything else runs. strict: raise if the prologue fails.
    """

    def extras(inputs: Sequence[Any]) -> Sequence[Any] | None:
        """The prologue's outputs; None if it is not valid. Its errors pass through."""
        if prologue.has_fake_root(inputs):
            return fakes
        return prologue(inputs) if prologue.is_valid(inputs) else None

    def compiled(*inputs: Any) -> Any:
        try:
            found = extras(inputs)
        except RecordingError:
            raise
        except MetadataError as error:
            if raising is None:
                raise
            broken = error
        except Exception as error:
            if strict:
                raise
            results = captured(*inputs)  # or what the program itself raises
            say("a prologue", error, "Batches on which it fails run as captured.")
            return results
        else:
            if found is None:
                return captured(*inputs)
            sample.take_provided(fakes, found)
            return main(*inputs, *found)
        try:
            raising(*inputs)
        except Exception as error:
            raise broken from error
        raise broken

    return compiled
