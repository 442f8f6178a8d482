"""The trace of a frame, from the moment when Dynamo begins with it until the graph that came of it is guarded.

What is put into Dynamo (`capture/interceptions.py`) is installed only while a frame is traced for this package's
backend, in whatever thread, and looks for the trace in the context of the thread that runs it: other backends' traces
find none.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

import torch
import torch._dynamo.config as _config
from torch.fx import GraphModule

from fxpasses.capture import guarding
from fxpasses.capture.assumptions import assumptions_of
from fxpasses.capture.attempt import Attempt, Feature
from fxpasses.capture.flags import Values
from fxpasses.capture.interceptions import Installation, current
from fxpasses.capture.trace import Trace
from fxpasses.graph.regions import CHECKPOINT
from fxpasses.once import warn_once
from fxpasses.report import Report

log = logging.getLogger(__name__)

# Graphs of one frame that differ in their assumptions. Dynamo gives a frame up at its limit (8): before that, the
# frame is traced without hints, and the questions break the graph as they do in stock PyTorch.
_MOST_VARIANTS = 6


class FeatureRejected(RuntimeError):
    """Raised for a graph whose capture by one feature was not justified: trace without it."""

    def __init__(self, feature: Feature, text: str) -> None:
        super().__init__(text)
        self.feature = feature


def first_attempt(code: CodeType, flags: Values | None, captures: bool) -> Attempt:
    """What the first attempt at a frame may do. captures: whether the user wants more than the flags."""
    compilation = torch._guards.CompileContext.current_compile_id()
    is_first = compilation is not None and compilation.frame_compile_id == 0  # `torch._dynamo.reset` forgot the others
    variant = 0 if is_first else _variants.get(code, 0)
    if not captures or variant >= _MOST_VARIANTS or (flags is not None and not flags.scalar_outputs):
        return Attempt(flags, variant=variant)
    return Attempt(flags, frozenset(Feature), variant)


@contextmanager
def traced(attempt: Attempt) -> Iterator[Trace]:
    """A trace for what is traced inside; what this torch has no private names for is off in its attempt."""
    with ExitStack() as stack:
        if attempt.features:
            attempt = attempt.without(*_installation.enter())
            stack.callback(_installation.leave)
            ignored = _config.ignore_logging_functions | _said_once()
            stack.enter_context(_config.patch(ignore_logging_functions=ignored))
        if Feature.STORES in attempt.features:
            from fxpasses.capture.stored_numbers import traces_what_was_given

            attempt = attempt if traces_what_was_given() else attempt.without(Feature.STORES)
        yield stack.enter_context(as_current(Trace(attempt)))


@contextmanager
def as_current(trace: Trace | None) -> Iterator[Any]:
    """None: for what is traced on behalf of another backend, inside a trace for ours."""
    token = current.set(trace)
    try:
        yield trace
    finally:
        if trace is not None:
            trace.end()
        current.reset(token)


def running() -> Trace:
    """The trace that runs; one that knows nothing where a graph is compiled that Dynamo does not trace."""
    return current.get() or Trace(Attempt())


def _said_once() -> set[Any]:
    """transformers' `logger.warning_once`, which some models call in every layer, and which breaks the graph."""
    methods = (getattr(logging.Logger, name, None) for name in ("warning_once", "info_once"))
    return {method for method in methods if method is not None}


def described(code: CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def finish(trace: Trace, output: Any, code: CodeType) -> None:
    """Guard what a finished trace assumed of the batch."""
    found = guarding.guard(output, trace) if guarding.can_guard() else []
    if not found:
        return
    log.info("%s assumes %s", code.co_name, "; ".join(map(str, found)))
    _variants[code] = trace.attempt.variant + 1
    if _variants[code] == _MOST_VARIANTS:
        text = f"{described(code)} was compiled {_MOST_VARIANTS} times because batches differ in what the program asks"
        text += (
            f" of them ({'; '.join(map(str, found))}). From now on these questions break the graph, as they do without"
        )
        warnings.warn(f"fxpasses: {text} fxpasses.", stacklevel=2)


def warn_given_up(trace: Trace, code: CodeType, reason: str) -> None:
    """Say once for a frame that its capture was given up, if the failed trace had read numbers of the batch."""
    if many := trace.numbers_found():
        numbers = f"{many} {'numbers' if many > 1 else 'number'}"
        text = (
            f"capture was given up for {described(code)}, which reads {numbers} of its batch: {reason}. The reads stay"
        )
        text += " in every layer, as under stock PyTorch. TORCH_LOGS=graph_breaks shows the place."
        warn_once(("given up", code), text)


def report(trace: Trace) -> Report | None:
    """What a trace assumes of its batch, for the record; None where it assumes nothing."""
    trace.close()
    found = assumptions_of(trace)
    if not found:
        return None
    many = f"{len(found)} assumptions" if len(found) > 1 else "1 assumption"
    what = "compiles another graph" if guarding.can_guard() else "raises AssumptionError"
    return Report(
        "capture",
        summary=f"{many} on the batch; a batch that breaks one {what}",
        changes=[f"assumed: {assumption}" for assumption in found],
        figures={"assumptions": len(found)},
    )


def check(trace: Trace, gm: GraphModule | None = None) -> None:
    """Raise `FeatureRejected` where a branch was speculated and not proved, or a store in a checkpoint would show.

    gm: the graph, once it is written.
    """
    unproved = trace.unproved()
    if unproved:
        text = f"the body at {unproved[0].where} is not known to do nothing without tokens"
        raise FeatureRejected(Feature.SPECULATION, text)
    if in_the_way := _store_in_the_way(trace, gm):
        raise FeatureRejected(Feature.STORES, in_the_way)


def _store_in_the_way(trace: Trace, gm: GraphModule | None) -> str:
    """Why a store in a checkpoint, which was captured, would show; "" if it would not."""
    if not trace.has(Feature.STORES) or not trace.stores.any:
        return ""
    from fxpasses.capture.stored_numbers import is_part_of_frame

    calls = gm.graph.find_nodes(op="call_function", target=CHECKPOINT) if gm is not None else []
    if any(call.kwargs.get("preserve_rng_state") is False for call in calls):
        return "a recomputation draws other random numbers"
    if gm is not None and (trace.graph is None or is_part_of_frame(trace.graph.output)):
        return "the graph breaks in the frame"
    return next(iter(trace.stores.conflicts), "")


def checked(trace: Trace, compiled: Callable[..., Any], gm: GraphModule) -> Callable[..., Any]:
    """What the backend returns for `gm`: where this torch has no data guards, it checks the assumptions itself."""
    return compiled if guarding.can_guard() else guarding.checked(compiled, gm, trace)


@contextmanager
def without_caches() -> Iterator[None]:
    """Hints also while a graph is compiled further; a graph from a cache would not ask, and so not be guarded."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    with functorch.patch(enable_autograd_cache=False), inductor.patch(fx_graph_cache=False), _without_warnings():
        yield


@contextmanager
def _without_warnings() -> Iterator[None]:
    """PyTorch warns of every size that it estimates by a hint."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("propagate_real_tensors")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


_installation = Installation()
_variants: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()
