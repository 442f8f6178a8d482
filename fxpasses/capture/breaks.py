"""A frame that fails because of the capture flags is traced again with fewer of them, at last as stock PyTorch does.

With the flags on, `.item()` and `nonzero` become unbacked symbols instead of graph breaks. Where the program then needs
the symbol's value, tracing can end in an error that stock does not have:

    for i in mask.nonzero().flatten().tolist():   # GuardOnDataDependentSymNode: Eq(u0, 0), in Dynamo
    w[e]                                          # the same error inside the backend, with e a 0-d integer tensor
    for k in range(4): if n.item() > k: ...       # no error, but a break in a loop: the whole frame runs eagerly
    x[: a.item() + b.item()], in two checkpoints  # an assertion of Dynamo's own, which lost one of the symbols

Such a frame takes the steps (`.item()` captured, data-dependent shapes captured) = (yes, yes), (yes, no), (no, no).
The middle one is what helps most: `nonzero` breaks the graph as in stock, and what follows, traced with both flags,
finds a tensor of known size whose `.tolist()` is captured. The last is stock, and so are its graph breaks and errors.

Only traces for this package's backend are concerned, and none with `fullgraph=True`, where stock captures both.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import CodeType
from typing import Any, NoReturn, TypeVar

from torch._dynamo.exc import TorchDynamoException
from torch.fx import GraphModule

from fxpasses import ddp_buckets
from fxpasses.capture import flags, tracing
from fxpasses.capture.dynamo_names import DynamoNames, MissingName
from fxpasses.capture.flags import Values
from fxpasses.graph.provenance import forget_leftovers
from fxpasses.options import PREFIX

log = logging.getLogger(__name__)

MARKER = "_is_fastpack"
_STEPS = "_fxpasses_steps"  # those left, on the speculation log: it lives as long as the attempts at one compilation
_NO_HINTS = "_fxpasses_no_hints"  # likewise
_NO_SKIPS = "_fxpasses_no_skips"  # likewise
_NO_NUMBERS = "_fxpasses_no_numbers"  # likewise
_NO_STORES = "_fxpasses_no_stores"  # likewise
_MAX_WRAPPERS = 16

Backend = TypeVar("Backend", bound=Callable[..., Any])
_installing = threading.Lock()


class CaptureRejected(RuntimeError):
    """Raised by the backend for a graph that it cannot compile with unbacked symbols in it: trace with fewer flags."""


class SkipsRejected(RuntimeError):
    """Raised for a graph in which a loop passes over experts, and no pass proved that this makes no difference."""


class StoresRejected(RuntimeError):
    """Raised for a graph in which a checkpoint stores a number outside, and a recomputation would be seen."""


def check_captured(gm: GraphModule | None = None) -> None:
    """Raise `SkipsRejected` where the running trace has a skip that is not proved, and `StoresRejected` for a store."""
    unproved = tracing.unproved_skips()
    if unproved:
        raise SkipsRejected(f"the body at {unproved[0].where} is not known to do nothing without tokens")
    if in_the_way := tracing.store_in_the_way(gm):
        raise StoresRejected(in_the_way)


# While a frame is traced that could be traced with fewer flags: what tells the errors for which it would be.
_is_reason_to_retrace: ContextVar[Callable[[BaseException], bool] | None] = ContextVar("fxpasses_retrace", default=None)


def may_trace_again(error: BaseException, has_unbacked_symbols: bool) -> bool:
    """Whether tracing with fewer flags may help after `error`, met in the backend's call: raise `CaptureRejected`."""
    is_reason = _is_reason_to_retrace.get()
    return is_reason is not None and (has_unbacked_symbols or is_reason(error))


def is_data_dependent(error: BaseException) -> bool:
    """Whether `error` comes of an unbacked symbol: it is such an error, wraps one or was raised in handling one."""
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
    """Whether tracing with fewer flags may do without `error`: it is data-dependent, or fails inside of Dynamo itself.

    Dynamo wraps what the program or the backend raises; what it does not wrap is its own.
    """
    if is_data_dependent(error):
        return True
    if isinstance(error, TorchDynamoException) or error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith(("torch._dynamo.", "torch.fx.experimental."))


def install() -> bool:
    """Watch Dynamo's traces for this package's backend. False, after one warning, where torch lacks a private name."""
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
        if not isinstance(names.trace_frame, _TraceFrameInSteps):
            names.convert_frame.trace_frame = _TraceFrameInSteps(names)  # type: ignore[attr-defined]
        return True


def uninstall() -> None:
    """Undo `install`. Compiled code stays."""
    with _installing:
        try:
            names = DynamoNames.find()
        except MissingName:
            return
        if isinstance(names.trace_frame, _TraceFrameInSteps):
            names.convert_frame.trace_frame = names.trace_frame.original  # type: ignore[attr-defined]


def traces_for_fastpack(tx: Any) -> bool:
    """Whether the running `InstructionTranslator` traces for a backend that has the attribute `_is_fastpack`."""
    return is_fastpack(tx.output.compiler_fn)


def is_fastpack(backend: Any) -> bool:
    """Whether `backend` is marked, or wraps one that is: in what `torch.compile`, partial and DDP put around it."""
    return any(getattr(function, MARKER, False) is True for function in _unwrapped(backend))


def option(backend: Any, name: str) -> Any:
    """The option `fastpack.<name>` that a backend was given by `torch.compile` or `fxpasses.compile`, or None."""
    for function in _unwrapped(backend):
        given = function.keywords if isinstance(function, functools.partial) else getattr(function, "kwargs", None)
        options = given.get("options") if isinstance(given, Mapping) else None
        if isinstance(options, Mapping) and PREFIX + name in options:
            return options[PREFIX + name]
    return None


def _unwrapped(backend: Any) -> Iterator[Any]:
    """`backend` and what it wraps, outermost first. Torch 2.11, 2.13 and 2.15 wrap in the same way:

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


class _TraceFrameInSteps:
    """Stands in for `convert_frame.trace_frame`."""

    def __init__(self, names: DynamoNames) -> None:
        functools.update_wrapper(self, names.trace_frame)
        self.original = names.trace_frame
        self._signature = inspect.signature(names.trace_frame)
        self._passed_on = names.passed_on
        self._restart = names.restart
        self._restart_kind = names.passed_on[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        frame = bound.arguments
        if not is_fastpack(frame["compiler_fn"]):
            with tracing.no_hints():
                return self.original(*args, **kwargs)
        optimizer = ddp_buckets.optimizer_among(_unwrapped(frame["compiler_fn"]))
        if optimizer is not None:
            frame["compiler_fn"] = optimizer.backend_compile_fn
        with ddp_buckets.moved_inside(optimizer):
            return self._trace_in_steps(frame, bound.args, bound.kwargs)

    def _trace_in_steps(self, frame: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forget_leftovers()
        if frame["one_graph"]:
            return self._trace(frame, args, kwargs, lambda error: False)
        attempts = frame["speculation_log"]
        values, *fewer = getattr(attempts, _STEPS, None) or _steps_from(flags.wanted())
        token = _is_reason_to_retrace.set(is_data_dependent if fewer else None)

        def gives_up(error: Exception) -> bool:
            reads_are_captured_next = bool(fewer) and fewer[0].scalar_outputs and comes_of_capture(error)
            return not isinstance(error, self._restart_kind) and not reads_are_captured_next

        try:
            with flags.held_at(values):
                if not values.scalar_outputs:
                    return self.original(*args, **kwargs)
                return self._trace(frame, args, kwargs, gives_up)
        except self._passed_on:
            raise
        except Exception as error:
            if not fewer or not comes_of_capture(error):
                raise
            log.info("%s is traced again with %s: %s", _where(frame["code"]), fewer[0], _first_line(error))
            attempts.clear()  # it records positions in a trace that the next one does not repeat
            setattr(attempts, _STEPS, fewer)
            raise self._restarting(error) from error
        finally:
            _is_reason_to_retrace.reset(token)

    def _trace(
        self,
        frame: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        gives_up: Callable[[Exception], bool],
    ) -> Any:
        """One attempt with hints. gives_up: whether an error means that the frame's reads stay uncaptured."""
        attempts = frame["speculation_log"]
        if option(frame["compiler_fn"], "capture") == "off" or getattr(attempts, _NO_HINTS, False):
            return self.original(*args, **kwargs)
        may = [not getattr(attempts, flag, False) for flag in (_NO_SKIPS, _NO_NUMBERS, _NO_STORES)]
        with tracing.hints_while_tracing(frame["code"], *may) as hints:
            try:
                result = self.original(*args, **kwargs)
                check_captured()
            except Exception as error:
                rejected = tracing.unproved_skips() or isinstance(_backend_error(error), StoresRejected)
                if rejected and not isinstance(error, self._passed_on):
                    self._take_back(frame, error)
                if hints is not None and gives_up(error):
                    tracing.warn_given_up(hints, frame["code"], _first_line(error))
                raise
            try:
                if hints is not None:
                    tracing.finish(hints, result.output_graph, frame["code"])
            except Exception as error:  # a graph whose assumptions cannot be guarded must not run
                assert hints is not None
                tracing.warn_given_up(hints, frame["code"], _first_line(error))
                log.debug("the guard could not be made", exc_info=error)
                attempts.clear()
                setattr(attempts, _NO_HINTS, True)
                raise self._restarting(error) from error
            return result

    def _take_back(self, frame: Mapping[str, Any], error: Exception) -> NoReturn:
        """Trace again, without skips; first without those that count by NumPy's arrays alone, where there are some."""
        attempts, uses_numbers = frame["speculation_log"], any(skip.kind == "numbers" for skip in tracing.skips())
        flag, words = (_NO_NUMBERS, "NumPy's numbers") if uses_numbers else (_NO_SKIPS, "skips")
        if isinstance(_backend_error(error), StoresRejected):
            flag, words = _NO_STORES, "stores in checkpoints"
        log.info("%s is traced again without %s: %s", _where(frame["code"]), words, _first_line(error))
        attempts.clear()
        setattr(attempts, flag, True)
        raise self._restarting(error) from error

    def _restarting(self, error: Exception) -> Exception:
        restart = self._restart(restart_reason=f"data-dependent error with capture flags: {_first_line(error)}")
        # Dynamo frees the failed attempt's graph by this attribute.
        restart._torch_dynamo_tracer_output = getattr(error, "_torch_dynamo_tracer_output", None)  # type: ignore[attr-defined]
        return restart


def _steps_from(start: Values) -> list[Values]:
    """From `start` to both off, each step once: dict keeps the order and drops repetitions."""
    return list(dict.fromkeys([start, start._replace(dynamic_output_shapes=False), Values(False, False)]))


def _backend_error(error: BaseException) -> BaseException:
    """What the backend raised, where Dynamo has wrapped it."""
    return getattr(error, "inner_exception", None) or error


def _where(code: CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
