"""An attempt at tracing a frame ends in an error: is it the program's, Dynamo's or this package's?

An error of this package's own, in a handler for instance, is the failure of a feature: the frame is traced again
without the feature, and so are the other frames of the compiled program (`dynamo/retracing.py`). An error is ours if
no method of Dynamo's raised it, if it is not one of Dynamo's exceptions (which also pass on the program's errors), and
if no number without a value caused it. Dynamo may catch our error and go on, so the trace keeps it.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import Any, NamedTuple

from torch._dynamo.exc import TorchDynamoException
from torch.utils.weak import WeakIdKeyDictionary

from fxpasses.dynamo.dynamo_names import DynamoNames, MissingName, asks_for_another_trace
from fxpasses.dynamo.features import Feature

_PASSED = "_fxpasses_passed"


class Rejected(RuntimeError):
    """Raised for a trace that must not be used: another follows, with other features, flags or answers."""


class CaptureRejected(Rejected):
    """Raised by the backend for a graph with unbacked symbols that it cannot compile: retrace with fewer flags."""


class FeatureRejected(Rejected):
    """Raised for a graph with an undischarged obligation of one feature: trace without the feature."""

    def __init__(self, feature: Feature, text: str) -> None:
        super().__init__(text)
        self.feature = feature


class Unprovable(Rejected):
    """No pass could discharge a branch, and the graph lacks some of its effects: the frame is traced again."""


class Unrolled(Rejected):
    """A loop over parts of the batch cannot be one computation: the frame is traced again with the loop unrolled."""


class Failure(NamedTuple):
    """An error of this package, and the feature without which it does not recur."""

    feature: Feature
    error: Exception


class FailedFeatures:
    """By compiled program: the features that failed while a frame of it was traced."""

    def __init__(self) -> None:
        self._found: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def note(self, program: Any, feature: Feature) -> None:
        self._found.setdefault(program, set()).add(feature)

    def of(self, program: Any) -> frozenset[Feature]:
        return frozenset(self._found.get(program, ()))


def mark_as_passed(error: BaseException) -> None:
    """Remember that a method of Dynamo's raised `error`."""
    with contextlib.suppress(Exception):  # an exception may refuse attributes
        setattr(error, _PASSED, True)


def is_ours(error: BaseException) -> bool:
    if getattr(error, _PASSED, False) or isinstance(error, TorchDynamoException):
        return False
    if isinstance(error, (Rejected, *asks_for_another_trace())):
        return False
    return not is_data_dependent(error)


def is_data_dependent(error: BaseException) -> bool:
    """Whether an unbacked symbol caused `error`: it is such an error, wraps one, or was raised while handling one."""
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
