"""The trace of a frame, from its start in Dynamo until its graph is guarded.

The handlers in Dynamo (`dynamo/interceptions.py`) are installed only while some thread traces a frame for this
package's backend. They find the trace in the running thread's context, and find none in traces for other backends.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import CodeType
from typing import Any

import torch._dynamo.config as _config
from torch.fx import GraphModule

from fxpasses.base.containment import contained, error_text, is_unsaid, say
from fxpasses.base.once import warn_once
from fxpasses.dynamo import collective_operands, guarding, variants
from fxpasses.dynamo.assumptions import assumptions_of
from fxpasses.dynamo.attempt import Attempt, Place
from fxpasses.dynamo.dynamo_names import in_short
from fxpasses.dynamo.failures import Failure, FeatureRejected, Unrolled
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.flags import Values
from fxpasses.dynamo.interceptions import Installation, current
from fxpasses.dynamo.trace import Trace
from fxpasses.dynamo.unproved import Function
from fxpasses.dynamo.whole_program import traces_what_was_given
from fxpasses.report import Reason, Refusal, Report

log = logging.getLogger(__name__)


def first_attempt(
    frame: Mapping[str, Any],
    flags: Values | None,
    captures: bool,
    given_up: frozenset[Function],
    strict: bool,
) -> Attempt:
    """The first attempt at a frame, given by the arguments of `trace_frame`.

    captures: whether the user enables features besides the flags. given_up: see `Attempt`.
    """
    code, names = frame["code"], {"L": frame.get("locals"), "G": frame.get("globals")}
    refused: frozenset[Place] = frozenset()
    with contained("counting the graphs of a frame", strict=strict):
        refused = variants.begin(code, described(code), names)
    if not captures or (flags is not None and not flags.scalar_outputs):
        return Attempt(flags, frozenset({Feature.FLOATS}), strict=strict)
    if flags is None:  # under `fullgraph=True`, where a break would be an error
        refused = frozenset()
    return Attempt(flags, frozenset(Feature), refused, given_up, strict=strict)


@contextmanager
def traced(attempt: Attempt) -> Iterator[Trace]:
    """Run with a new trace; features whose private names this torch lacks are off in its attempt."""
    with ExitStack() as stack:
        stack.enter_context(collective_operands.unknown())
        try:
            trace = _started(attempt, stack)
        except Exception as error:
            if attempt.strict:
                raise
            say("the capture", error, "Frames are traced with Dynamo's flags alone.")
            trace = Trace(replace(attempt, features=frozenset()))
        yield stack.enter_context(as_current(trace))


def _started(attempt: Attempt, stack: ExitStack) -> Trace:
    """A new trace; what it installs in Dynamo stays until `stack` is closed."""
    given = False
    if attempt.features:
        attempt = attempt.without(*_installation.enter())
        stack.callback(_installation.leave)
        # transformers' `logger.warning_once`, which some models call in every layer, would break the graph
        once: set[Any] = {getattr(logging.Logger, name, None) for name in ("warning_once", "info_once")} - {None}
        stack.enter_context(_config.patch(ignore_logging_functions=_config.ignore_logging_functions | once))
    if Feature.STORES in attempt.features:
        given = traces_what_was_given()
        attempt = attempt if given else attempt.without(Feature.STORES)
    return Trace(attempt, given)


@contextmanager
def as_current(trace: Trace | None) -> Iterator[Any]:
    """Run with `trace` as the current one; with None for another backend's trace inside one for ours."""
    token = current.set(trace)
    try:
        yield trace
    finally:
        if trace is not None:
            with contained("the end of a trace", "It may keep a batch in memory."):
                trace.end()
        current.reset(token)


def running() -> Trace:
    """The current trace; an empty one while a graph is compiled that Dynamo did not trace."""
    return current.get() or Trace(Attempt())


def described(code: CodeType) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"


def function_of(code: CodeType | None) -> tuple[str, str]:
    """The file and name of a frame's function, also for the continuations that Dynamo makes after graph breaks."""
    if code is None:
        return "", ""
    return code.co_filename, re.sub(r"^(torch_dynamo_resume_in_)+|(_at_\d+)+$", "", code.co_name)


def finish(trace: Trace, output: Any, code: CodeType) -> None:
    """Guard the assumptions of a finished trace about the batch, and show the warnings of its program.

    An error is noted as a failure of the trace: a graph whose assumptions cannot be guarded must not run.
    """
    try:
        batch_guard = guarding.guard(output, trace)
        if batch_guard is not None:
            log.info("%s assumes %s", code.co_name, batch_guard.text)
            variants.add(code, batch_guard)
    except Exception as error:
        trace.failure = trace.failure or Failure(Feature.HINTS, error)
        return
    for show in trace.warnings:
        show()


def warn_given_up(trace: Trace, code: CodeType, error: BaseException, reason: str) -> None:
    """Warn once that a frame's capture was given up, if the frame had read the batch's numbers or communicated."""
    many = trace.numbers_found()
    if many:
        what = f"reads {many} {'numbers' if many > 1 else 'number'} of its batch"
        effect = "The reads stay in every layer, as under stock PyTorch."
    elif trace.has_communicated:
        what, reason = "issues collectives", reason + _place_of(error)
        effect = "It runs as under stock PyTorch, in eager mode or in several graphs."
    else:
        return
    text = f"capture was given up for {described(code)}, which {what}: {reason}. {effect}"
    cause = error
    while (inner := getattr(cause, "inner_exception", None) or cause.__cause__) is not None:
        cause = inner
    if is_unsaid(cause, function_of(code)):  # a graph that runs uncompiled may have said it
        warn_once(("given up", function_of(code)), f"{text} TORCH_LOGS=graph_breaks shows the place.")


def _place_of(error: BaseException) -> str:
    """The line of the program that Dynamo could not trace; `real_stack` of its errors was checked on torch 2.13."""
    stack: Any = getattr(error, "real_stack", None)
    return f", at {in_short(stack[-1].filename, stack[-1].lineno or 0)}" if stack else ""


def report(trace: Trace) -> Report | None:
    """A report of a trace's assumptions about its batch and of checkpoints left to eager mode; None if it has neither.

    Raises `FeatureRejected` if the trace has failed.
    """
    trace.close()
    if trace.unrolled or trace.one_by_one:
        raise Unrolled("a loop over parts of the batch is left before its end")
    if trace.failure is not None:
        raise FeatureRejected(trace.failure.feature, error_text(trace.failure.error))
    found = [assumption for assumption in assumptions_of(trace) if not assumption.is_tacit]
    left = sorted(trace.attempt.left, key=lambda checkpoint: checkpoint.where)
    refusals = [Refusal(c.write, Reason.REPEATED_WRITE, c.text, c.where) for c in left]
    refusals += [Refusal("loop", Reason.UNROLLED, text, in_short(*place[:2])) for place, text in trace.attempt.unrolled]
    loops = list(dict.fromkeys(trace.loops))
    if not found:
        many = f"{len(loops)} loops" if len(loops) > 1 else "1 loop"
        summary = f"{many} over parts of the batch traced once" if loops else ""
        figures = {"loops_traced_once": len(loops)} if loops else {}
        empty = not loops and not refusals
        return None if empty else Report("capture", summary=summary, changes=loops, figures=figures, refusals=refusals)
    many = f"{len(found)} assumptions" if len(found) > 1 else "1 assumption"
    what = "compiles another graph" if guarding.can_guard() else "raises AssumptionError"
    return Report(
        "capture",
        summary=f"{many} on the batch; a batch that breaks one {what}",
        changes=[*loops, *(f"assumed: {assumption}" for assumption in found)],
        figures={"assumptions": len(found)} | ({"loops_traced_once": len(loops)} if loops else {}),
        refusals=refusals,
    )


def check(trace: Trace, gm: GraphModule | None = None, rewritten: GraphModule | None = None) -> None:
    """Raise `FeatureRejected` for an unproved branch, a visible store in a checkpoint, or a lost gradient;
    `WrongDefault` for a graph that fails for the traced batch, and `UnknownDefault` for one that may.

    gm: the graph, once it is complete. rewritten: the graph after the passes.
    """
    if unproved := trace.unproved():
        text = f"the branch at {unproved[0].where} is not known to have no effect without tokens"
        raise FeatureRejected(Feature.SPECULATION, text)
    for check_feature in trace.hooks("check"):
        check_feature(trace, gm, rewritten)
    trace.sizes.check(rewritten)


@contextmanager
def without_caches() -> Iterator[None]:
    """Compile without caches and with hints: a graph from a cache would ask no questions, and so have no guards."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    with functorch.patch(enable_autograd_cache=False), inductor.patch(fx_graph_cache=False), _without_warnings():
        yield


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Inside, suppress PyTorch's warning about each size that a hint determines."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("propagate_real_tensors")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


_installation = Installation()
