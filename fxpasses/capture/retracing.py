"""Retrace a frame that fails because of the capture flags with fewer of them, and finally with stock PyTorch's flags.

With the flags on, `.item()` and `nonzero` become unbacked symbols instead of graph breaks. If the program then needs
the symbol's value, tracing may end in an error that stock PyTorch does not have:

    for i in mask.nonzero().flatten().tolist():   # GuardOnDataDependentSymNode: Eq(u0, 0), in Dynamo
    w[e]                                          # the same error inside the backend, with e a 0-d integer tensor
    for k in range(4): if n.item() > k: ...       # no error, but a break in a loop: the whole frame runs eagerly
    x[: a.item() + b.item()], in two checkpoints  # an internal assertion of Dynamo, which lost one of the symbols

The attempts at such a frame are (`.item()` captured, data-dependent shapes captured) = (yes, yes), (yes, no), (no, no).
The second helps most: `nonzero` breaks the graph as in stock PyTorch, and the rest, traced with both flags, has a
tensor of known size whose `.tolist()` is captured. The last has the graph breaks and errors of stock PyTorch.

With `fullgraph=True`, stock PyTorch captures both, and no frame is retraced. Likewise, a frame whose trace contains an
undischarged obligation (a speculated branch that no pass proved) is retraced without the feature behind it; if that
fails, without both flags, and other frames do not try forever (`capture/unproved.py`). Only traces for this package's
backend are concerned.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import torch._dynamo.config as _config
from torch._dynamo.exc import TorchDynamoException
from torch.utils.weak import WeakIdKeyDictionary

from fxpasses import ddp_buckets, default_options
from fxpasses.capture import flags, generation, tracing, variants
from fxpasses.capture.attempt import Attempt, Feature
from fxpasses.capture.dynamo_names import DynamoNames, MissingName
from fxpasses.capture.flags import Values
from fxpasses.capture.trace import Trace
from fxpasses.capture.tracing import FeatureRejected
from fxpasses.capture.unproved import Unproved
from fxpasses.graph.provenance import forget_leftovers
from fxpasses.once import warn_once
from fxpasses.options import PREFIX

log = logging.getLogger(__name__)

MARKER = "_is_fastpack"
CAPTURES = "_captures"  # of a backend for whose frames the flags are on, whatever the process has set
_MAX_WRAPPERS = 16

_installing = threading.Lock()


class CaptureRejected(RuntimeError):
    """Raised by the backend for a graph with unbacked symbols that it cannot compile: retrace with fewer flags."""


def may_trace_again(trace: Trace, error: BaseException, has_unbacked_symbols: bool) -> bool:
    """Whether tracing with fewer flags may help after `error` in the backend, which then raises `CaptureRejected`."""
    return trace.attempt.with_fewer_flags() is not None and (has_unbacked_symbols or is_data_dependent(error))


def is_data_dependent(error: BaseException) -> bool:
    """Whether an unbacked symbol caused `error`: it is such an error, wraps one or was raised while handling one."""
    try:
        kinds = (*DynamoNames.find().data_dependent, CaptureRejected)
    except MissingName:
        return False
    pending: list[Any] = [error]
    seen: set[int] = set()
    while pending:
        error = pending.pop()
        if not isinstance(error, BaseException) or id(error) in seen:
            continue
        if isinstance(error, kinds):
            return True
        seen.add(id(error))
        # `BackendCompilerFailed` keeps what the backend raised as `inner_exception`.
        pending += [error.__cause__, error.__context__, getattr(error, "inner_exception", None)]
    return False


def comes_of_capture(error: BaseException) -> bool:
    """Whether tracing with fewer flags may avoid `error`: it is data-dependent, or an internal error of Dynamo.

    Dynamo wraps errors of the program and the backend; an unwrapped error is its own.
    """
    if is_data_dependent(error):
        return True
    if isinstance(error, TorchDynamoException) or error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith(("torch._dynamo.", "torch.fx.", "torch.utils._sympy."))


def install() -> bool:
    """Intercept Dynamo's traces for this package's backend. False, after one warning, if torch lacks a private name."""
    with _installing:
        try:
            names = DynamoNames.find()
        except MissingName as missing:
            warnings.warn(
                f"fxpasses: {missing}. Code that needs the value of a captured `.item()` may raise "
                "GuardOnDataDependentSymNode; FXPASSES_KEEP_DYNAMO_CONFIG=1 in the environment avoids it.",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        if not isinstance(names.trace_frame, _TraceFrameInAttempts):
            names.convert_frame.trace_frame = _TraceFrameInAttempts(names)  # type: ignore[attr-defined]
        try:
            generation.install(_keeps_generation_apart)
        except MissingName as missing:
            warn_once(
                str(missing), f"{missing}: models that generate while they train may pass Dynamo's limit of graphs"
            )
        return True


def is_installed() -> bool:
    """Whether traces are intercepted, so that a backend's own flags hold while its frames are traced."""
    try:
        return isinstance(DynamoNames.find().convert_frame.trace_frame, _TraceFrameInAttempts)
    except MissingName:
        return False


def is_fastpack(backend: Any) -> bool:
    """Whether `backend` is this package's, perhaps wrapped by `torch.compile`, `functools.partial` and DDP."""
    return any(getattr(function, MARKER, False) is True for function in _unwrapped(backend))


def _keeps_generation_apart(backend: Any) -> bool:
    return is_fastpack(backend) and option(backend, "generation") != "compiled"


def option(backend: Any, name: str) -> Any:
    """The option `fastpack.<name>` of a backend: as `torch.compile` or `fxpasses.compile` gave it, or the default's."""
    for function in _unwrapped(backend):
        given = function.keywords if isinstance(function, functools.partial) else getattr(function, "kwargs", None)
        options = given.get("options") if isinstance(given, Mapping) else None
        if isinstance(options, Mapping) and PREFIX + name in options:
            return options[PREFIX + name]
    return default_options.get(PREFIX + name)


def _unwrapped(backend: Any) -> Iterator[Any]:
    """`backend` and the backends that it wraps, outermost first. Torch 2.11, 2.13 and 2.15 wrap in the same way:

    WrapBackendDebug -> _TorchCompileWrapper -> backend, and under DDP DDPOptimizer.compile_fn -> WrapBackendDebug -> …
    """
    for _ in range(_MAX_WRAPPERS):
        if backend is None:
            return
        yield backend
        backend = _wrapped_in(backend)


def _wrapped_in(function: Any) -> Any:
    if isinstance(function, functools.partial):
        return function.func
    for name in ("_torchdynamo_orig_backend", "compiler_fn", "__wrapped__"):
        inner = getattr(function, name, None)
        if inner is not None:
            return inner
    return getattr(getattr(function, "__self__", None), "backend_compile_fn", None)  # a method of DDPOptimizer


def _program(backend: Any) -> Any:
    """What `torch.compile` made of this package's backend and its options; the backend itself where it is bare."""
    found = backend
    for function in _unwrapped(backend):
        if getattr(function, MARKER, False) is True:
            break
        found = function
    return found


class _TraceFrameInAttempts:
    """Replaces `convert_frame.trace_frame`."""

    def __init__(self, names: DynamoNames) -> None:
        functools.update_wrapper(self, names.trace_frame)
        self.original = names.trace_frame
        self._signature = inspect.signature(names.trace_frame)
        self._names = names
        # The next attempt of each compilation with a failed one, by its speculation log: the only object that Dynamo
        # keeps from one attempt to the next.
        self._next: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._unproved = Unproved()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        frame = bound.arguments
        if not is_fastpack(frame["compiler_fn"]):
            with tracing.as_current(None):
                return self.original(*args, **kwargs)
        optimizer = ddp_buckets.optimizer_among(_unwrapped(frame["compiler_fn"]))
        if optimizer is not None:
            frame["compiler_fn"] = optimizer.backend_compile_fn
        with ddp_buckets.moved_inside(optimizer):
            return self._trace(frame, bound.args, bound.kwargs)

    def _trace(self, frame: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One attempt. If it fails and another one may succeed, have Dynamo start that."""
        forget_leftovers()
        code, speculation_log = frame["code"], frame["speculation_log"]
        attempt = self._next.get(speculation_log)
        captures = any(getattr(function, CAPTURES, False) for function in _unwrapped(frame["compiler_fn"]))
        if attempt is None:
            flags_wanted = None if frame["one_graph"] else flags.ON if captures else flags.wanted()
            given_up = self._unproved.given_up(_program(frame["compiler_fn"]))
            wanted = option(frame["compiler_fn"], "capture") != "off"
            attempt = tracing.first_attempt(code, flags_wanted, wanted, given_up)
        values = attempt.flags or (flags.ON if captures else None)
        held = flags.held_at(values) if values is not None else contextlib.nullcontext()
        with held, tracing.traced(attempt) as trace:
            try:
                result = self.original(*args, **kwargs)
                tracing.check(trace)
            except Exception as error:
                following = self._after(trace, error)
                if trace.crowded:  # also if Dynamo itself traces the frame again, up to a graph break
                    variants.give_up(code, trace.crowded)
                    attempt = self._next[speculation_log] = attempt.refusing(trace.crowded)
                    following = following and following.refusing(trace.crowded)
                if following is not None and trace.unproved():
                    self._unproved.note(_program(frame["compiler_fn"]), trace.speculation.unproved_in())
                if self._is_given_up(trace, error, following):
                    tracing.warn_given_up(trace, code, _first_line(error))
                if following is None:
                    raise
                raise self._restarting(speculation_log, code, following, error) from error
            try:
                tracing.finish(trace, result.output_graph, code)
            except Exception as error:  # a graph whose assumptions cannot be guarded must not run
                tracing.warn_given_up(trace, code, _first_line(error))
                log.debug("the guard could not be made", exc_info=error)
                following = trace.attempt.without(Feature.HINTS)
                raise self._restarting(speculation_log, code, following, error) from error
            return result

    def _after(self, trace: Trace, error: Exception) -> Attempt | None:
        """The attempt after an error; None if another attempt would fail in the same way."""
        if isinstance(error, (self._names.restart, self._names.skip)):
            return None
        rejected, unproved = _backend_error(error), trace.unproved()
        if isinstance(rejected, FeatureRejected) and rejected.feature is not Feature.SPECULATION:
            return trace.attempt.without(rejected.feature)
        if unproved:  # first without counts in NumPy arrays, if there are any
            uses_numbers = any(branch.kind == "numbers" for branch in trace.speculated())
            return trace.attempt.without(Feature.NUMPY if uses_numbers else Feature.SPECULATION)
        if isinstance(error, self._names.unsupported) and trace.attempt.refused:  # the break may have no other place
            return trace.attempt.without_flags()
        return trace.attempt.with_fewer_flags() if comes_of_capture(error) else None

    def _is_given_up(self, trace: Trace, error: Exception, following: Attempt | None) -> bool:
        """Whether the frame's reads stay uncaptured after an error, and it runs all the same."""
        if trace.attempt.flags is None or isinstance(error, self._names.restart):
            return False
        if following is not None:
            return following.flags == Values(False, False)
        return isinstance(error, (self._names.skip, self._names.unsupported)) or _config.suppress_errors

    def _restarting(self, speculation_log: Any, code: CodeType, following: Attempt, error: Exception) -> Exception:
        log.info("%s is traced again as %s: %s", tracing.described(code), following, _first_line(error))
        speculation_log.clear()  # it records positions in a trace that the next one does not repeat
        self._next[speculation_log] = following
        restart = self._names.restart(restart_reason=f"data-dependent error with capture flags: {_first_line(error)}")
        # Dynamo frees the failed attempt's graph through this attribute.
        restart._torch_dynamo_tracer_output = getattr(error, "_torch_dynamo_tracer_output", None)
        return restart


def _backend_error(error: BaseException) -> BaseException:
    """The error of the backend, if Dynamo has wrapped it, else `error`."""
    return getattr(error, "inner_exception", None) or error


def _first_line(error: BaseException) -> str:
    error = _backend_error(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
