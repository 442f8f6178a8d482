"""Retrace a frame that fails because of the capture flags with fewer of them, and finally with stock PyTorch's flags.

With the flags on, `.item()` and `nonzero` become unbacked symbols instead of graph breaks. If the program then needs
the symbol's value, tracing may end in an error that stock PyTorch does not have:

    for i in mask.nonzero().flatten().tolist():   # GuardOnDataDependentSymNode: Eq(u0, 0), in Dynamo
    w[e]                                          # the same error inside the backend, with e a 0-d integer tensor
    for k in range(4): if n.item() > k: ...       # no error, but a break in a loop: the whole frame runs eagerly
    x[: a.item() + b.item()], in two checkpoints  # an internal assertion of Dynamo, which lost one of the symbols

The attempts at such a frame are (`.item()` captured, data-dependent shapes captured) = (yes, yes), (yes, no), (no, no).
The second attempt helps most: `nonzero` breaks the graph as in stock PyTorch, and the rest, traced with both flags, has
a tensor of known size whose `.tolist()` is captured. The last has the graph breaks and errors of stock PyTorch.

With `fullgraph=True`, stock PyTorch captures both, and no frame is retraced. A frame whose trace contains an
undischarged obligation (a speculated branch that no pass proved) is retraced without the feature that made it; if that
fails, without both flags. After two such frames, a function's branches are no longer speculated on
(`dynamo/unproved.py`). Only traces for this package's backend are affected.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import torch._dynamo.config as _config
from torch.utils.weak import WeakIdKeyDictionary

from fxpasses import default_options
from fxpasses.base.collector import visiting_what_is_new
from fxpasses.base.containment import contained, error_text, say
from fxpasses.base.once import warn_once
from fxpasses.collectives import ddp_buckets
from fxpasses.dynamo import checks, flags, generation, tracing, variants
from fxpasses.dynamo.attempt import Attempt
from fxpasses.dynamo.dynamo_names import DynamoNames, MissingName, without_saved_tensors_hooks
from fxpasses.dynamo.failures import (
    FailedFeatures,
    FeatureRejected,
    comes_of_capture,
    is_data_dependent,
    is_ours,
    mark_as_passed,
)
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.flags import Values
from fxpasses.dynamo.size_defaults import UnknownDefault, WrongDefault
from fxpasses.dynamo.trace import Trace
from fxpasses.dynamo.unproved import Unproved
from fxpasses.graph.collectives import spans_ranks
from fxpasses.graph.provenance import forget_leftovers
from fxpasses.options import PREFIX

log = logging.getLogger(__name__)

MARKER = "_is_fastpack"
_MAX_WRAPPERS = 16
_MOST_BROKEN = 2  # frames of a program; an inner frame may be traced whole although an outer one is not

# The attempt at a frame that is traced as for any other backend.
_STOCK = Attempt(Values(False, False))

_installing = threading.Lock()


def may_trace_again(trace: Trace, error: BaseException, has_unbacked_symbols: bool) -> bool:
    """Whether tracing with fewer flags may help after `error` in the backend, which then raises `CaptureRejected`."""
    return trace.attempt.with_fewer_flags() is not None and (has_unbacked_symbols or is_data_dependent(error))


def install() -> bool:
    """Intercept Dynamo's traces for this package's backend. False, after one warning, if torch lacks a private name."""
    with _installing:
        try:
            names = DynamoNames.find()
        except Exception as missing:
            text = missing if isinstance(missing, MissingName) else error_text(missing)
            warnings.warn(
                f"fxpasses: {text}. Dynamo's capture flags are on for the whole process, and code that needs the "
                "value of a captured `.item()` may raise GuardOnDataDependentSymNode; FXPASSES_KEEP_DYNAMO_CONFIG=1 in "
                "the environment avoids both.",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        if not isinstance(names.trace_frame, _TraceFrameInAttempts):
            names.convert_frame.trace_frame = _TraceFrameInAttempts(names)  # type: ignore[attr-defined]
        try:
            generation.install(_keeps_generation_apart)
        except Exception as missing:
            text = missing if isinstance(missing, MissingName) else error_text(missing)
            warn_once(str(text), f"{text}: models that generate while they train may pass Dynamo's limit of graphs")
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
    """The object that `torch.compile` made of this package's backend and its options; a bare backend itself."""
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
        self._failed = FailedFeatures()
        # By program: how many frames had to be traced with fewer flags, because refused questions get no answer. The
        # frames that they call would be traced up to the same place.
        self._broken: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._of_this_backend(args, kwargs)
        if bound is None or self._next.get(bound.arguments["speculation_log"]) is _STOCK:
            with tracing.as_current(None), flags.as_outside():
                return self.original(*args, **kwargs)
        frame = bound.arguments
        strict = False
        try:
            strict = bool(option(frame["compiler_fn"], "strict"))
            optimizer = ddp_buckets.optimizer_among(_unwrapped(frame["compiler_fn"]))
            if optimizer is not None:
                frame["compiler_fn"] = optimizer.backend_compile_fn
            with ddp_buckets.moved_inside(optimizer), visiting_what_is_new(), without_saved_tensors_hooks():
                return self._trace(frame, bound.args, bound.kwargs, strict)
        except Exception as error:  # around the trace, of which nothing is left
            if strict or not is_ours(error):
                raise
            say("tracing for this backend", error, "Dynamo traces the frame as for any other backend.")
            raise self._restarting(frame["speculation_log"], frame["code"], _STOCK, error) from error

    def _of_this_backend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments | None:
        """The arguments of a trace for this package's backend; None for another's."""
        with contained("finding out whose a frame is", "Dynamo traces it as for any other backend."):
            bound = self._signature.bind(*args, **kwargs)
            return bound if is_fastpack(bound.arguments["compiler_fn"]) else None
        return None

    def _first(self, frame: Mapping[str, Any], strict: bool) -> Attempt:
        backend = frame["compiler_fn"]
        program = _program(backend)
        attempt = tracing.first_attempt(
            frame,
            None if frame["one_graph"] else flags.wanted(),
            option(backend, "capture") != "off",
            self._unproved.given_up(program),
            strict,
        )
        if attempt.refused and self._broken.get(program, 0) >= _MOST_BROKEN:
            attempt = attempt.with_fewer_flags() or attempt
        lost = self._failed.of(program) | checks.failed_in(frame["code"])
        return (Feature.HINTS in lost and attempt.without_flags()) or attempt.without(*lost)

    def _trace(self, frame: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], strict: bool) -> Any:
        """Make one attempt. If it fails and another may succeed, have Dynamo start that one."""
        forget_leftovers()
        code, speculation_log = frame["code"], frame["speculation_log"]
        attempt = self._next.get(speculation_log) or self._first(frame, strict)
        with flags.held_at(attempt.flags or flags.wanted()), tracing.traced(attempt) as trace:
            trace.code = code
            try:
                try:
                    result = self.original(*args, **kwargs)
                except Exception as error:
                    mark_as_passed(error)
                    raise
                finally:
                    trace.is_over = True
                tracing.check(trace)
            except Exception as error:
                trace.note_error(Feature.HINTS, error)
                following = self._after(trace, error)
                if trace.failure is not None:
                    raise self._after_failure(trace, frame, error) from trace.failure.error
                with contained("counting what a frame asks", strict=strict):
                    following = self._noting(trace, frame, error, following)
                if following is None and self._is_raised_by_program(error, frame):
                    raise self._left_to_eager_mode(error) from error
                if following is None:
                    raise
                raise self._restarting(speculation_log, code, following, error) from error
            tracing.finish(trace, result.output_graph, code)
            if trace.failure is not None:  # Dynamo may have caught the error and gone on
                raise self._after_failure(trace, frame, None, result) from trace.failure.error
            return result

    def _after_failure(
        self, trace: Trace, frame: Mapping[str, Any], error: Exception | None, result: Any = None
    ) -> Exception:
        """The exception to raise after an attempt in which a feature failed: a restart without it, or its own error.

        error: the error that ended the attempt; None if it came to a result.
        """
        assert trace.failure is not None
        feature, cause = trace.failure
        following = trace.attempt.after_failure(feature)
        if trace.attempt.strict or following is None:
            return cause
        self._failed.note(_program(frame["compiler_fn"]), feature)
        say(f"the capture's feature {feature.title!r}", cause, f"Programs are traced without it: {feature.effect}.")
        return self._restarting(frame["speculation_log"], frame["code"], following, error or cause, result)

    def _noting(
        self, trace: Trace, frame: Mapping[str, Any], error: Exception, following: Attempt | None
    ) -> Attempt | None:
        """Note for later frames what an attempt has shown, and warn; returns the next attempt."""
        code, speculation_log = frame["code"], frame["speculation_log"]
        if trace.crowded:  # also if Dynamo itself traces the frame again, up to a graph break
            variants.give_up(code, trace.crowded)
            self._next[speculation_log] = trace.attempt.refusing(trace.crowded)
            following = following and following.refusing(trace.crowded)
        if trace.left:  # Dynamo itself traces the frame again, up to the checkpoint
            self._next[speculation_log] = (self._next.get(speculation_log) or trace.attempt).leaving(trace.left)
            following = following and following.leaving(trace.left)
        if following is not None and trace.attempt.refused and following.flags != trace.attempt.flags:
            program = _program(frame["compiler_fn"])
            self._broken[program] = self._broken.get(program, 0) + 1
        if following is not None and trace.unproved():
            self._unproved.note(_program(frame["compiler_fn"]), trace.unproved_functions())
        if self._is_given_up(trace, error, following) and not trace.left:  # the user knows of a left checkpoint
            tracing.warn_given_up(trace, code, error, error_text(_backend_error(error)))
        return following

    def _after(self, trace: Trace, error: Exception) -> Attempt | None:
        """The attempt after an error; None if another attempt would fail in the same way, or if a feature failed."""
        try:
            return self._following(trace, error) if trace.failure is None else None
        except Exception as own:
            trace.note_error(Feature.HINTS, own)
            return None

    def _following(self, trace: Trace, error: Exception) -> Attempt | None:
        trace.close()
        if trace.unrolled:
            return trace.attempt.unrolling(trace.unrolled)
        if trace.one_by_one:
            return trace.attempt.running_one_by_one(trace.one_by_one, trace.carried, trace.called)
        if isinstance(error, (self._names.restart, self._names.skip)):
            return None
        rejected, unproved = _backend_error(error), trace.unproved()
        if isinstance(rejected, WrongDefault):
            return trace.attempt.answering(rejected.questions) if rejected.questions else trace.attempt.without_flags()
        if isinstance(rejected, FeatureRejected) and rejected.feature is not Feature.SPECULATION:
            return trace.attempt.without(rejected.feature)
        if isinstance(rejected, UnknownDefault):
            return trace.attempt.with_fewer_flags()
        if unproved:  # first without the feature for counts in NumPy arrays, if there are any
            uses_numbers = any(branch.kind == "numbers" for branch in trace.speculated())
            return trace.attempt.without(Feature.NUMPY if uses_numbers else Feature.SPECULATION)
        if isinstance(error, self._names.unsupported) and trace.attempt.refused:  # the break may have no other place
            return trace.attempt.without_flags()
        if isinstance(error, self._names.runtime_error):  # an operator failed on fake tensors
            wrong = trace.sizes.wrong()
            return trace.attempt.answering(wrong) if wrong else trace.attempt.without_flags()
        if not comes_of_capture(error):
            return None
        if suspects := trace.suspects & trace.attempt.features:
            return trace.attempt.without(*suspects)
        return trace.attempt.with_fewer_flags()

    def _is_raised_by_program(self, error: Exception, frame: Mapping[str, Any]) -> bool:
        """Whether an operator has raised for this batch while other ranks may wait in the collectives before it."""
        return spans_ranks() and not frame["one_graph"] and isinstance(error, (self._names.runtime_error, IndexError))

    def _left_to_eager_mode(self, error: Exception) -> Exception:
        """The exception by which Dynamo runs only this call of a frame in eager mode, which raises the program's."""
        left: Any = self._names.unsupported(f"an operator failed while it was traced: {error_text(error)}")
        left.frame_exec_strategy = self._names.this_call_alone
        left._torch_dynamo_tracer_output = getattr(error, "_torch_dynamo_tracer_output", None)
        return left

    def _is_given_up(self, trace: Trace, error: Exception, following: Attempt | None) -> bool:
        """Whether, after an error, the frame runs all the same, with its reads uncaptured."""
        if trace.attempt.flags is None or isinstance(error, self._names.restart):
            return False
        if following is not None:
            return following.flags == Values(False, False)
        return isinstance(error, (self._names.skip, self._names.unsupported)) or _config.suppress_errors

    def _restarting(
        self, speculation_log: Any, code: CodeType, following: Attempt, error: Exception, result: Any = None
    ) -> Exception:
        reason = error_text(_backend_error(error))
        log.info("%s is traced again as %s: %s", tracing.described(code), following, reason)
        speculation_log.clear()  # it records positions in a trace that the next one does not repeat
        self._next[speculation_log] = following
        restart = self._names.restart(restart_reason=f"data-dependent error with capture flags: {reason}")
        # Dynamo frees the failed attempt's graph through this attribute.
        restart._torch_dynamo_tracer_output = result or getattr(error, "_torch_dynamo_tracer_output", None)
        return restart


def _backend_error(error: BaseException) -> BaseException:
    """The error of the backend, if Dynamo has wrapped it, else `error`."""
    return getattr(error, "inner_exception", None) or error
