"""While Dynamo traces, numbers that the batch holds are known: a question about them has the batch's answer.

Dynamo gives every `.item()` and every data-dependent size a symbol without a value. A question about it (`if n > 512`,
whether a [n, n] mask fits [t, t] scores) breaks the graph or raises. PyTorch's shape environment can be given values
for such symbols: it answers by them, and records each answer as an assertion to be checked when the graph runs. Here
the values are computed only when somebody asks, and only for metadata (`capture/live.py`); each answer is noted, and
`capture/assumptions.py` sees to it that a batch with another answer gets a graph of its own.

Private names, checked on torch 2.11, 2.13 and 2.15: `ShapeEnv.real_tensor_prop_unbacked_vals`, a dict from symbols to
values that `evaluate_expr` asks last, and `ShapeEnv._log_real_tensor_propagation(expression, answer)`, which it calls
when that gave the answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._guards import TracingContext

from fxpasses.capture.live import LiveMetadata, NotKnown
from fxpasses.capture.skipping import Skipping
from fxpasses.runtime.prologue import autocast_state


@dataclass(frozen=True)
class Answer:
    """A question about symbols that the batch answered, as a condition that holds.

    inside_operator: an operator asked, to check or to choose, and not the user's program. where: `file.py:12`, or "".
    """

    condition: Any
    inside_operator: bool
    where: str

    @property
    def states_consistency(self) -> bool:
        """Whether the operator fails without it: two sizes must be equal. (With 1, an operator broadcasts.)"""
        condition = self.condition
        return self.inside_operator and isinstance(condition, sympy.Eq) and not {0, 1}.intersection(condition.args)


@dataclass(frozen=True)
class Definition:
    """A symbol that an operator makes for itself, by an expression over others, where the conditions hold."""

    value: Any
    conditions: tuple[Any, ...]


class Hints:
    """The hints of one attempt at tracing one frame."""

    def __init__(self, skipping: Skipping | None = None) -> None:
        self.answers: list[Answer] = []
        self.metadata: LiveMetadata | None = None
        self.definitions: dict[Any, Definition] = {}
        self.skipping = skipping
        self.stores: Any = None  # what checkpoints store outside (`capture/stored_numbers.py`), where that may be
        self.companions: list[str] = []  # sources of what the graph's prologue brings to the host
        self.operators = 0  # that run on fake tensors now, one inside the other
        self.has_read = False  # a number, since the last question
        self.autocast = autocast_state()
        self._answering = True

    def attach(self, output: Any) -> None:
        """Begin with Dynamo's `OutputGraph`, which exists once the frame's first instruction is traced."""
        if self.metadata is None:
            self.metadata = LiveMetadata(output, self.autocast)
            output.shape_env.real_tensor_prop_unbacked_vals = _Values(self)
            output.shape_env._log_real_tensor_propagation = self.note

    def close(self) -> None:
        """Dynamo has written its graph, and nothing more will be known than now."""
        if self.metadata is not None:
            self.metadata.close()

    def end(self) -> None:
        """The frame is compiled: give the shape environment back as it was, and let go of the batch."""
        self._answering = False
        if self.metadata is not None:
            shape_env = self.metadata.output.shape_env
            shape_env.real_tensor_prop_unbacked_vals = {}
            del shape_env._log_real_tensor_propagation
            self.metadata = None

    def catch_up(self) -> None:
        """Note what the trace has read. A body that fails is gone with its tracer before `numbers_found` is asked."""
        if self.has_read and self.metadata is not None:
            self.metadata.walk_on()
            self.has_read = False

    def numbers_found(self) -> int:
        """How many different numbers of the batch the trace has captured so far, read once or in every layer."""
        if self.metadata is None:
            return 0
        self.close()
        return len({extra for extra in self.metadata.walk.numbers.values() if extra.dimension is None})

    def is_about(self, output: Any) -> bool:
        return self.metadata is None or self.metadata.output is output

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nobody gets a hint inside: what compiles the graph further has no use for one batch's numbers."""
        before, self._answering = self._answering, False
        try:
            yield
        finally:
            self._answering = before

    def value(self, symbol: Any) -> Any:
        """The value of a symbol, or None."""
        if not self._answering or self.metadata is None:
            return None
        if symbol in self.definitions:
            return self.number(self.definitions[symbol].value)
        try:
            return sympy.sympify(self.metadata.value(symbol))
        except NotKnown:
            return None

    def number(self, expression: Any) -> Any:
        """The value of an expression over symbols and sizes, or None."""
        values = {}
        for found in expression.free_symbols:
            is_size = self.metadata is not None and self.metadata.is_size(found)
            values[found] = self.metadata.size(found) if is_size and self.metadata is not None else self.value(found)
        return None if None in values.values() else expression.xreplace(values)

    def defined(self, condition: Any) -> Any:
        """A condition without the symbols that operators make for themselves."""
        while made := [found for found in condition.free_symbols if found in self.definitions]:
            conditions = [c for found in made for c in self.definitions[found].conditions]
            condition = sympy.And(condition.xreplace({s: self.definitions[s].value for s in made}), *conditions)
        return condition

    def can_answer(self, number: Any) -> bool:
        """Whether a question about `number`, symbolic or not, has an answer."""
        if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return True
        return self.number(number.node.expr) is not None

    def note(self, question: Any, answer: Any) -> None:
        """Keep that the batch gave `answer`, a number or a truth value, to `question`, an expression."""
        if self.skipping is not None:
            self.skipping.answers += 1
        if answer == sympy.true:
            condition = question
        elif answer == sympy.false:
            condition = sympy.Not(question)
        else:
            condition = sympy.Eq(question, answer)
        walking = self.metadata is not None and self.metadata.is_walking  # runs operators again, as they ran before
        self.answers.append(Answer(condition, self.operators > 0 or walking, _user_line()))


class _Values(dict[Any, Any]):
    """Looks like a dict of all symbols' values, and computes one when it is looked up."""

    def __init__(self, hints: Hints) -> None:
        super().__init__()
        self._hints = hints

    def __bool__(self) -> bool:
        return self._hints._answering

    def __contains__(self, symbol: object) -> bool:
        return self.get(symbol) is not None

    def __getitem__(self, symbol: Any) -> Any:
        value = self.get(symbol)
        if value is None:
            raise KeyError(symbol)
        return value

    def get(self, symbol: Any, default: Any = None) -> Any:
        value = self._hints.value(symbol) if isinstance(symbol, sympy.Symbol) else None
        return default if value is None else value


def _user_line() -> str:
    frames = TracingContext.extract_stack()
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


# The hints of the frame that this thread traces for this package's backend, if it traces one.
current: ContextVar[Hints | None] = ContextVar("fxpasses_hints", default=None)


def hints_for(output: Any) -> Hints | None:
    """The running trace's hints, if it is the trace that writes `output` (Dynamo's `OutputGraph`)."""
    found = current.get()
    if found is None or not found.is_about(output):
        return None
    found.attach(output)
    return found


def run_node_with_hints(original: Any) -> Any:
    """Wrap `torch._dynamo.utils.run_node(tracer, node, ...)`, which runs every operator on fake tensors."""

    def run_node(tracer: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        found = hints_for(tracer)
        if found is None:
            return original(tracer, node, *args, **kwargs)
        found.catch_up()
        found.operators += 1
        try:
            return original(tracer, node, *args, **kwargs)
        finally:
            found.operators -= 1
            found.has_read |= node.op == "call_method" and node.target == "item"

    return run_node
