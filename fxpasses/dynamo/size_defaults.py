"""PyTorch's default answers about sizes that only the batch determines, and the batches for which they are wrong.

Operators on fake tensors ask whether a size is 1, to broadcast or to squeeze it. For a size without a value PyTorch
consults no hint: it assumes "no" (`guard_or_false(size == 1)`), and asserts that the sizes are equal when the graph
runs. So the graph would raise for a batch in which the size is 1, which eager mode broadcasts.

Here each operator's questions are kept together with the assertions that it leaves. When the trace is complete, the
batch at hand determines which assertions fail:

- If a question explains the failure, the frame is traced again, and that question is answered. The answer is an
  assumption like any other, and guarded.
- If none does, the operator fails in eager mode as well. The program may catch that error, or fail before: the frame is
  traced with stock PyTorch's flags. Assertions that the program itself makes stay, and raise `MetadataError`.

Where an assertion holds, the default answers behind it are guarded: a later batch in which the size is 1 gets another
graph. Inside `try`, where its error would be caught, the assertion itself is guarded too. `squeeze` leaves no
assertion; its questions are answered and guarded at once. If activations determine such a size, nothing is known of it,
and the graph breaks before the operator, as under stock PyTorch.

Private names, checked on torch 2.13: `ShapeEnv.evaluate_expr(..., fallback_value=)`, by which `guard_or_false` and
`guard_or_true` ask, also from C++, by way of `SymNode.guard_or_false(file, line)`;
`ShapeEnv.guard_or_defer_runtime_assert`, which records an assertion, and counts it in `num_deferred_runtime_asserts`;
`ShapeEnv.size_like`, a set of symbols; `ShapeEnv._inner_evaluate_expr`, a `functools.lru_cache`. With a torch without
them, such a batch raises when the graph runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Protocol

import sympy
import torch
from torch.fx import GraphModule, Node

from fxpasses.dynamo.attempt import Attempt, Place, Question
from fxpasses.dynamo.dynamo_names import in_short
from fxpasses.dynamo.failures import Failure, Rejected
from fxpasses.dynamo.features import Feature
from fxpasses.graph.bodies import nodes_in
from fxpasses.graph.collectives import is_all_to_all

# The C++ files that ask about a tensor's layout in memory: a wrong answer only makes a copy, and changes no result.
_LAYOUT_IN_CPP = ("Contiguity.h", "EmptyTensor.cpp", "Resize.h", "TensorBase.h", "TensorImpl.h", "TensorUtils.cpp")
_LAYOUT = (
    "__lt__",
    "_compute_stride",
    "contiguous",
    "maybe_guard_or",
    "non_overlapping",
    "should_swap",
    "strides_like",
)
_ON_THE_WAY = ("symbolic_shapes.py", "sym_node.py", "recording.py", os.path.basename(__file__))

OF_PROGRAM = frozenset({"_check", "_check_is_size", "_assert", "_assert_async", "_assert_scalar"})
_SQUEEZES = frozenset({"squeeze", "squeeze_"})
_NO_ANSWER: Any = object()


class WrongDefault(Rejected):
    """Raised for a graph that would fail for the traced batch. questions: the questions to answer in another trace."""

    def __init__(self, text: str, questions: frozenset[Question] = frozenset()) -> None:
        super().__init__(text)
        self.questions = questions


class UnknownDefault(Rejected):
    """Raised for a graph that may fail for any batch, because of a size that activations determine."""


@dataclass(eq=False)
class _Run:
    """One run of an operator on fake tensors.

    questions: whether sizes are 0 or 1, each with PyTorch's default answer. assertions: conditions, each with its value
    for the batch, or None.
    """

    place: Place
    name: str
    is_caught: bool
    questions: dict[Any, bool] = field(default_factory=dict)
    assertions: dict[Any, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"`{self.name}` at {in_short(*self.place[:2])}"

    def about(self, assertion: Any) -> Iterator[Any]:
        """The questions whether a size is 1 for the sizes that an assertion compares: `u0 == 1` for `u0 == 12`."""
        equal = [part for part in sympy.Or.make_args(assertion) if isinstance(part, sympy.Eq)]
        compared = {side for part in equal for side in part.args}
        yield from (question for question in self.questions if _size(question, 1) in compared)


class Trace(Protocol):
    """The part of the trace (`dynamo/trace.py`) that is used here."""

    attempt: Attempt
    failure: Failure | None

    @property
    def is_tracing(self) -> bool: ...

    def number(self, expression: Any) -> Any: ...

    def is_of_part(self, expression: Any) -> bool: ...

    def is_of_one_part(self, expression: Any) -> bool: ...

    def compute(self, symbols: Iterable[Any]) -> None: ...

    def place(self) -> Place: ...

    def is_in_try(self) -> bool: ...

    def choosing(self) -> AbstractContextManager[None]: ...

    def asking(self, question: Any) -> AbstractContextManager[None]: ...

    def note_choice(self, question: Any, answer: bool, place: Place) -> None: ...

    def note_error(self, feature: Feature, error: Exception) -> None: ...


class SizeDefaults:
    """The questions and the assertions of one trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._runs: list[_Run] = []
        self.asserted: frozenset[str] = frozenset()  # by the program, in a trace that is taken from a file
        self._node: Any = None  # the node that runs
        self._run: _Run | None = None  # its run, once it asks or asserts
        self._shape_env: Any = None
        self._unknown = ""  # an operator that depends on a size that the batch does not determine
        self._is_over = False
        self._is_checked = False

    def attach(self, shape_env: Any) -> None:
        """Have the shape environment ask here first."""
        if has_fallbacks(shape_env):
            self._shape_env = shape_env
            shape_env.evaluate_expr = self._asking(shape_env.evaluate_expr)
            shape_env.guard_or_defer_runtime_assert = self._asserting(shape_env.guard_or_defer_runtime_assert)

    def close(self) -> None:
        """The graph is complete: from now on compilers get PyTorch's own answers."""
        self._is_over = True

    def detach(self) -> None:
        if self._shape_env is not None:
            del self._shape_env.evaluate_expr, self._shape_env.guard_or_defer_runtime_assert
            self._shape_env = None

    @contextmanager
    def running(self, node: Any) -> Iterator[None]:
        """Run an operator. An operator that it runs in turn is part of it."""
        if self._node is not None:
            yield
            return
        self._node = node
        try:
            self._contained(_assert_splits, node)
            yield
        finally:
            self._node = self._run = None

    @property
    def is_caught(self) -> bool:
        """Whether the program may catch an error of the operator that runs."""
        return self._node is not None and self._current().is_caught

    def concerns(self, symbol: Any) -> bool:
        """Whether a question or an assertion is about a symbol."""
        found = (condition for run in self._runs for condition in (*run.questions, *run.assertions))
        return any(symbol in condition.free_symbols for condition in found)

    def forget(self, symbols: set[Any]) -> None:
        """Drop the questions and assertions about symbols that no node has any more."""
        for run in self._runs:
            for conditions in (run.questions, run.assertions):
                for condition in [found for found in conditions if not symbols.isdisjoint(found.free_symbols)]:
                    del conditions[condition]

    # When the trace is complete

    def check(self, rewritten: GraphModule | None = None) -> None:
        """Raise `WrongDefault` if the graph would fail for the traced batch, `UnknownDefault` if it may; else guard.

        rewritten: the graph after passes, if they ran. They may remove operators whose sizes were unknown.
        """
        if self._is_checked:
            return
        may_break = self._trace.attempt.flags is not None  # the graph, where this one is rejected
        checked = [(run, a) for run in self._runs if run.name not in OF_PROGRAM for a in run.assertions]
        self._trace.compute({found for _, assertion in checked for found in assertion.free_symbols})
        failing = [(run, a) for run, a in checked if self._fails(run, a)]
        if new := self._wrong(dict.fromkeys(run for run, _ in failing)):
            raise WrongDefault("what was taken for granted of sizes does not hold for this batch", new)
        for run, _ in failing if may_break else ():
            raise WrongDefault(f"{run} fails for this batch")
        bound = _bound(rewritten) if rewritten is not None else None
        for run, assertion in checked if may_break else ():
            is_left = bound is None or bound & assertion.free_symbols
            if is_left and self._is_unknown(run, assertion):
                self._unknown = self._unknown or str(run)
        if self._unknown and may_break:
            raise UnknownDefault(f"{self._unknown} depends on whether a size is 1 that activations determine")
        self._is_checked = True
        self._guard()

    def asserted_by_program(self) -> frozenset[str]:
        """The conditions that the program asserts itself, as text."""
        found = (str(each) for run in self._runs if run.name in OF_PROGRAM for each in run.assertions)
        return self.asserted.union(found)

    def wrong(self) -> frozenset[Question]:
        """All questions to which the batch has another answer than the default; one may have caused a tracing error."""
        return self._wrong(self._runs)

    def _guard(self) -> None:
        """Note as choices the default answers and assertions that a later batch may break."""
        for run in self._runs:
            for assertion in run.assertions:
                if run.is_caught and run.name not in OF_PROGRAM and self._trace.number(assertion) is not None:
                    self._trace.note_choice(assertion, True, run.place)
                granted = [
                    question if run.questions[question] else sympy.Not(question)
                    for question in run.about(assertion)
                    if self._trace.number(question) is not None
                ]
                if granted:  # while the defaults hold, the assertion fails only for batches that eager mode refuses too
                    self._trace.note_choice(sympy.Or(assertion, sympy.And(*granted)), True, run.place)

    def _wrong(self, runs: Iterable[_Run]) -> frozenset[Question]:
        asked = ((run, question) for run in runs for question in run.questions)
        found = {(run.place, str(question)) for run, question in asked if self._differs(run, question)}
        return frozenset(found - self._trace.attempt.answered)

    def _fails(self, run: _Run, assertion: Any) -> bool:
        value = run.assertions[assertion]
        return bool((self._trace.number(assertion) if value is None else value) == sympy.false)

    def _is_unknown(self, run: _Run, assertion: Any) -> bool:
        """Whether a size that activations determine is compared with one that they do not.

        Two sizes that activations determine are mostly those of one mask: `y[mask] = f(x[mask])`.
        """
        unknown = [_size(question, 1) for question in run.about(assertion) if self._trace.number(question) is None]
        sides = [side for part in sympy.Or.make_args(assertion) for side in part.args] if unknown else []
        return any(self._trace.number(side) is not None for side in sides)

    def _differs(self, run: _Run, question: Any) -> bool:
        value = self._trace.number(question)
        return value is not None and bool(value) is not run.questions[question]

    # While the shape environment asks

    def _asking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate_expr(expression: Any, *args: Any, fallback_value: Any = None, **kwargs: Any) -> Any:
            if fallback_value is None and self._listens() and self._contained(self._is_of_one_part, expression):
                return sympy.true if isinstance(expression, sympy.Ne) else sympy.false
            if fallback_value is None or not self._listens() or not self._contained(_is_about_a_dimension, expression):
                with self._trace.asking(expression if fallback_value is None else None):
                    return original(expression, *args, fallback_value=fallback_value, **kwargs)
            answer = original(expression, *args, fallback_value=_NO_ANSWER, **kwargs)
            if answer is not _NO_ANSWER:
                return answer
            if self._trace.is_of_part(expression) or self._trace.is_of_one_part(expression):
                return fallback_value
            if self._contained(self._is_answered, expression, fallback_value):
                # PyTorch never learns that a symbol in this set is 0 or 1, and compilers would ask again.
                self._shape_env.size_like.difference_update(expression.free_symbols)
                with self._trace.choosing():
                    return original(expression, *args, **kwargs)
            return fallback_value

        return evaluate_expr

    def _is_of_one_part(self, question: Any) -> bool:
        """Whether a question is whether a part that operators will run for alone has a size of 0 or 1."""
        return self._trace.is_of_one_part(question) and is_of_one(question)

    def _is_answered(self, question: Any, granted: bool) -> bool:
        """Whether the batch answers a question unlike PyTorch's default `granted`; notes the default otherwise."""
        run = self._current()
        squeezes = _size(question, 1) is not None and _asking_operator() in _SQUEEZES
        if not squeezes and (run.place, str(question)) not in self._trace.attempt.answered:
            run.questions[question] = granted
            return False
        value = self._trace.number(question)
        if value is None:
            if squeezes:
                self._unknown = self._unknown or str(run)
            return False
        if bool(value) is granted:
            self._trace.note_choice(question, granted, run.place)
        return bool(value) is not granted

    def _asserting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def guard_or_defer_runtime_assert(condition: Any, message: str, *args: Any, **kwargs: Any) -> Any:
            before = self._shape_env.num_deferred_runtime_asserts
            answer = original(condition, message, *args, **kwargs)
            is_new = self._shape_env.num_deferred_runtime_asserts != before
            if is_new:
                self._contained(_forget_answers, self._shape_env)
            if is_new and self._listens() and not message.startswith("propagate_real_tensors"):
                self._contained(self._note_assertion, condition)
            return answer

        return guard_or_defer_runtime_assert

    def _note_assertion(self, condition: Any) -> None:
        run = self._current()
        at_once = run.is_caught or isinstance(condition, (sympy.Eq, sympy.Or))  # not the bounds of each slice
        run.assertions[condition] = self._trace.number(condition) if at_once else None

    def _contained(self, own: Callable[..., Any], *args: Any) -> Any:
        """The result of `own`. Inside an operator, Dynamo takes errors for the program's, so ours is noted."""
        try:
            return own(*args)
        except Exception as error:
            self._trace.note_error(Feature.HINTS, error)
            if self._trace.failure is None:  # the error is not ours
                raise
            return None

    def _listens(self) -> bool:
        return not self._is_over and self._node is not None and self._trace.is_tracing

    def _current(self) -> _Run:
        if self._run is None:
            target = self._node.target
            name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
            self._run = _Run(self._trace.place(), name.partition(".")[0], self._trace.is_in_try())
            self._runs.append(self._run)
        return self._run


def _forget_answers(shape_env: Any) -> None:
    """Drop PyTorch's cached answers from before it learned of an assertion.

    `guard_or_false(n == 1)` is cached, so it would stay false after `n == 1` has become known.
    """
    cached: Any = getattr(type(shape_env), "_inner_evaluate_expr", None)
    if hasattr(cached, "cache_clear"):
        cached.cache_clear()


def has_fallbacks(shape_env: Any) -> bool:
    """Whether this torch has the private names."""
    ask = getattr(shape_env, "evaluate_expr", None)
    names = ("guard_or_defer_runtime_assert", "num_deferred_runtime_asserts")
    return (
        ask is not None and "fallback_value" in signature(ask).parameters and all(hasattr(shape_env, n) for n in names)
    )


def _assert_splits(node: Node) -> None:
    """Assert that the splits of an all-to-all sum to its rows, which its kernel checks and its fake kernel does not.

    Where as many rows come back, it is then known that they are not one.
    """
    if node.op != "call_function" or not is_all_to_all(node.target):
        return
    x, _, sent = (*node.args, None, None, None)[:3]
    if isinstance(x, Node) and isinstance(sent, (list, tuple)):
        sizes = [size.meta["example_value"] if isinstance(size, Node) else size for size in sent]
        torch._check(sum(sizes) == x.meta["example_value"].shape[0])


def _bound(gm: GraphModule) -> set[Any]:
    """The unbacked symbols that a graph's nodes bind when it runs."""
    return {symbol for node in nodes_in(gm) for symbol in node.meta.get("unbacked_bindings") or ()}


def _size(question: Any, number: int) -> Any:
    """n for the question whether n is or is not `number`; None for others."""
    if not isinstance(question, (sympy.Eq, sympy.Ne)) or number not in question.args:
        return None
    return question.lhs if question.rhs == number else question.rhs


def is_of_one(question: Any) -> bool:
    """Whether a question is whether a size is 0 or 1."""
    return _size(question, 1) is not None or _size(question, 0) is not None


def _is_about_a_dimension(question: Any) -> bool:
    return is_of_one(question) and not _is_of_layout()


def _asking_operator() -> str:
    """The operator that asks. It may be a part of the one that runs: `unbind` squeezes."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("fake_tensor.py"):
            operator = frame.f_locals.get("func")
            if isinstance(operator, torch._ops.OpOverload):
                return operator._schema.name.rpartition("::")[2]
        frame = frame.f_back
    return ""


def _is_of_layout() -> bool:
    """Whether the question that is being asked is about a tensor's layout in memory."""
    frame = sys._getframe(1)
    while frame is not None and os.path.basename(frame.f_code.co_filename) in _ON_THE_WAY:
        file = frame.f_locals.get("file")  # of `SymNode.guard_or_false`, if C++ asks
        if isinstance(file, str) and file:
            return file.endswith(_LAYOUT_IN_CPP)
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and any(word in frame.f_code.co_name for word in _LAYOUT)
