"""The state of one attempt at tracing a frame: the batch's numbers, which answer questions, and the answers given.

Dynamo represents every `.item()` and every data-dependent size by a symbol without a value. A question about it (`if n
> 512`, whether an [n, n] mask fits [t, t] scores) breaks the graph or raises. PyTorch's shape environment accepts
values for such symbols: it uses them to answer, and adds each answer to the graph as a run-time assertion. Here a value
is computed only on demand, and only for metadata (`dynamo/partial_graph.py`); each answer is recorded, and becomes an
assumption (`dynamo/assumptions.py`), so that a batch with another answer gets another graph.

A loop with a question for each token would get another graph for each batch, after a trace as long as the batch. A
place that has asked about 8 numbers, and got both answers, gets no more answers: the graph breaks there, as under stock
PyTorch. So does a place that asks about a number of each part, in a loop that had to be unrolled for another number of
parts.

Private names, checked on torch 2.11, 2.13 and 2.15: `ShapeEnv.real_tensor_prop_unbacked_vals`, a dict from symbols to
values that `evaluate_expr` consults last, and `ShapeEnv._log_real_tensor_propagation(expression, answer)`, which it
calls if the dict determined the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils._sympy.functions import FloorDiv

from fxpasses.dynamo.attempt import Attempt, Left, Place
from fxpasses.dynamo.dynamo_names import in_short, is_in_try, user_place
from fxpasses.dynamo.failures import Failure, is_ours
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.partial_graph import NotKnown, PartialGraph, input_of
from fxpasses.dynamo.size_defaults import SizeDefaults, is_of_one
from fxpasses.dynamo.unproved import Function
from fxpasses.graph.symbols import BatchValues, is_younger
from fxpasses.metadata.runtime.prologue import autocast_state

if TYPE_CHECKING:
    from fxpasses.experts.branches import SpeculatedBranch

State = TypeVar("State")

_MOST_QUESTIONS = 8  # at one place: as many as the graphs that Dynamo keeps of a frame, since each may make another


@dataclass(frozen=True)
class Answer:
    """The batch's answer to a question about symbols, as a condition that holds.

    is_number: whether the question asked for a number, and not for a truth value. is_choice: whether eager mode is
    known to run a batch with another answer. is_tacit: whether the answer is PyTorch's default.
    """

    condition: Any
    place: Place
    is_number: bool = False
    is_choice: bool = False
    is_tacit: bool = False

    @property
    def inside_operator(self) -> bool:
        """Whether an operator asked the question, and not the user's program."""
        return self.place[2]

    @property
    def where(self) -> str:
        """`file.py:12`, or ""."""
        return in_short(*self.place[:2])

    @property
    def states_consistency(self) -> bool:
        """Whether the operator fails for any other answer, because two sizes must be equal.

        A size of 1 is broadcast, and an operator that asks for a number (`x.unbind()`) accepts any.
        """
        if self.is_number or self.is_choice or not self.inside_operator:
            return False
        return isinstance(self.condition, sympy.Eq) and not {0, 1}.intersection(self.condition.args)


@dataclass(frozen=True)
class PartSize:
    """The size of a part of the batch, while a loop over the parts is traced.

    places: the program's lists of sizes. extremes: makes the symbols of the smallest and the largest one. by_itself:
    whether operators will run for each part by itself, so that what they assume of its size need not hold for all.
    """

    places: frozenset[Place]
    extremes: Callable[[], tuple[Any, Any]]
    by_itself: bool = False


@dataclass(frozen=True)
class Definition:
    """The value of a symbol that an operator created: an expression over other symbols, if the conditions hold."""

    value: Any
    conditions: tuple[Any, ...]


class OpenPart(Protocol):
    """A part of the batch, while a loop that will run part by part is traced: the numbers that its body computes."""

    def number(self, symbol: Any) -> Any:
        """The value of such a number for the first part; None if it is none, or if it is not known."""

    def is_about(self, question: Any) -> bool:
        """Whether a question, an expression, asks for such a number."""

    def note(self, question: Any, answer: Any) -> None:
        """Note the answer to such a question, or have the frame traced again if other parts answer differently."""


class Trace:
    """The state of one attempt.

    given: whether the traced frame is known to be the one passed to `torch.compile`. branches: the obligations that
    speculation has made, which a pass must discharge.
    """

    def __init__(self, attempt: Attempt, given: bool = False) -> None:
        self.attempt = attempt
        self.given = given
        self.code: CodeType | None = None  # of the frame
        self.failure: Failure | None = None  # the first error of this package's own
        self.is_over = False  # Dynamo has traced the frame, or given up: its graph may no longer be valid
        self.graph: PartialGraph | None = None
        self.answers: list[Answer] = []
        self.crowded: dict[Place, str] = {}  # places that have asked too many questions, with a text that says how many
        self._truths: dict[Place, dict[Any, bool]] = {}  # the answers to the program's own questions
        self.definitions: dict[Any, Definition] = {}
        self.warnings: list[Callable[[], None]] = []  # the program's warnings, to be shown if the trace succeeds
        self.companions: list[str] = []  # sources of the tensors that the graph's prologue copies to the host
        self.operators = 0  # the depth of operators that are running on fake tensors
        self.left: set[Left] = set()  # checkpoints at which this attempt breaks the graph
        self.unrolled: dict[Place, str] = {}  # lists over whose parts another attempt unrolls the loops, and why
        self.one_by_one: dict[Place, str] = {}  # or runs them part by part
        self.carried: set[tuple[Place, str]] = set()  # and carries numbers from part to part
        self.called: set[CodeType] = set()  # and calls functions instead of tracing them
        self.part: OpenPart | None = None  # of the loop that is being traced to run part by part
        # Lists that have another number of parts than in an earlier compilation, or whose loops run part by part.
        self.varying = {place for place, _ in attempt.one_by_one}
        self.loops: list[str] = []  # what was done to loops over parts, for the report
        self.sizes_of_parts: dict[Any, PartSize] = {}  # by symbol
        self.suspects: set[Feature] = set()  # to be left out first if the graph does not compile
        self.has_communicated = False  # whether the program has issued a collective
        self.needs_batch = False  # whether compiling the graph took numbers of the batch
        self.has_read = False  # whether a number was read since the last walk
        self.autocast = autocast_state()
        self.grad_enabled = torch.is_grad_enabled()
        self.branches: list[SpeculatedBranch] = []
        self.discharged: set[int] = set()  # the numbers of the branches that were proved
        self._states: dict[Any, Any] = {}
        self._answering = True
        self._insists = False
        self._asked: Any = None  # what an operator insists on
        self._choosing = False  # whether the question that is being answered is a choice
        self.sizes = SizeDefaults(self)

    def state(self, kind: Callable[[Trace], State]) -> State:
        """A feature's state for this trace: an instance of `kind`, made with the trace on first use."""
        if kind not in self._states:
            self._states[kind] = kind(self)
        return self._states[kind]

    def has(self, feature: Feature) -> bool:
        return feature in self.attempt.features

    def note_error(self, feature: Feature, error: Exception) -> None:
        """Note an error that passes through a feature's code; if it is this package's own, the feature has failed."""
        if self.failure is None and is_ours(error):
            self.failure = Failure(feature, error)

    def _note_failed_walk(self, error: Exception) -> None:
        if not self.is_over:
            self.note_error(Feature.HINTS, error)

    def attach(self, output: Any) -> None:
        """Attach Dynamo's `OutputGraph`, which exists once the frame's first instruction is traced."""
        if self.graph is None:
            self.graph = PartialGraph(output, self.autocast, self._note_failed_walk)
            output.shape_env.real_tensor_prop_unbacked_vals = _Values(self)
            output.shape_env._log_real_tensor_propagation = self.note
            self.sizes.attach(output.shape_env)

    def inputs(self, gm: GraphModule, positions: Iterable[int]) -> list[Any]:
        """The inputs of a captured graph at some positions, for the batch at hand."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        return [input_of(placeholders[position]) for position in positions]

    def is_in_try(self) -> bool:
        """Whether the program may catch an error of the traced instruction."""
        return self.graph is not None and is_in_try(self.graph.output.current_tx)

    def erase(self, nodes: list[Node]) -> None:
        """Take nodes out of the graph that is being written, which nothing else reads."""
        if self.graph is not None:
            self.graph.erase(nodes)

    def close(self) -> None:
        """Called when the graph is complete: its analysis is final."""
        self.sizes.close()
        if self.graph is not None:
            self.graph.close()
        for close in self.hooks("close"):
            close(self)

    def end(self) -> None:
        """Called when the frame is compiled: restore the shape environment, and release the batch."""
        self._answering = False
        if self.graph is not None:
            shape_env = self.graph.output.shape_env
            shape_env.real_tensor_prop_unbacked_vals = {}
            del shape_env._log_real_tensor_propagation
            self.sizes.detach()
            self.graph = None

    def catch_up(self) -> None:
        """Walk the numbers read so far: the tracer of a body that fails is gone when `numbers_found` is called."""
        if self.has_read and self.graph is not None:
            self.graph.walk_on()
            self.has_read = False

    def numbers_found(self) -> int:
        """How many distinct numbers of the batch the trace has captured so far."""
        if self.graph is None:
            return 0
        self.close()
        return len({extra for extra in self.graph.walk.numbers.values() if extra.dimension is None})

    def hooks(self, name: str) -> Iterator[Callable[..., Any]]:
        """The functions called `name` in the modules of the attempt's features (`dynamo/features.py`)."""
        for feature in Feature:
            if self.has(feature) and (found := getattr(sys.modules.get(feature.module), name, None)) is not None:
                yield found

    def speculated(self) -> list[SpeculatedBranch]:
        """The speculated branches of the complete graph."""
        self.close()
        return self.branches

    def unproved(self) -> list[SpeculatedBranch]:
        return [branch for branch in self.speculated() if branch.number not in self.discharged]

    def unproved_functions(self) -> set[Function]:
        """The functions of unproved branches; if none of these has a function, those of all branches."""
        found = {branch.function for branch in self.unproved() if branch.function is not None}
        return found or {branch.function for branch in self.branches if branch.function is not None}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No hints inside: a compiler must not specialise the graph on the numbers of one batch."""
        before, self._answering = self._answering, False
        try:
            yield
        finally:
            self._answering = before

    def value(self, symbol: Any) -> Any:
        """The value of a symbol, or None."""
        if not self._answering or self.graph is None or self._is_refused():
            return None
        if symbol in self.sizes_of_parts:
            return self._part_size(self.sizes_of_parts[symbol])
        if symbol in self.definitions:
            return self.number(self.definitions[symbol].value)
        try:
            value = sympy.sympify(self.graph.value(symbol))
        except NotKnown:
            return None
        return None if value is sympy.nan else value  # sympy does not compare NaN

    def is_metadata(self, symbol: Any) -> bool:
        """Whether the batch alone determines a symbol."""
        return self.graph is None or self.graph.is_number(symbol)

    def answer(self, symbol: Any) -> Any:
        """The value of a symbol with which the batch answers a question, or None: that of a part is the first one's."""
        if self.part is not None and not self.operators and self._answering and not self._is_refused():
            value = self.part.number(symbol)
            if value is not None:
                return value
        return self.value(symbol)

    def compute(self, symbols: Iterable[Any]) -> None:
        """Compute the values of symbols together, which takes less time than one by one."""
        if self.graph is not None and self._answering:
            self.graph.compute(symbols)

    def number(self, expression: Any) -> Any:
        """The value of an expression over symbols and sizes, or None."""
        graph = self.graph
        values = {
            found: graph.size(found) if graph is not None and graph.is_size(found) else self.value(found)
            for found in expression.free_symbols
        }
        return None if None in values.values() else expression.xreplace(values)

    def defined(self, condition: Any) -> Any:
        """A condition in which symbols that operators created are replaced by their definitions."""
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
        """Record that the batch's answer to `question`, an expression, is `answer`, a number or a truth value."""
        try:
            self._note(question, answer)
        except Exception as error:
            self.note_error(Feature.HINTS, error)
            raise

    def is_of_part(self, expression: Any) -> bool:
        """Whether an expression depends on the size of a part."""
        return bool(self.sizes_of_parts) and not self.sizes_of_parts.keys().isdisjoint(expression.free_symbols)

    def is_of_one_part(self, expression: Any) -> bool:
        """Whether an expression depends on a size that operators have made of a part which they will run for alone."""
        parts = [symbol for symbol, part in self.sizes_of_parts.items() if part.by_itself]
        return bool(parts) and any(is_younger(found, parts[0]) for found in expression.free_symbols)

    def _part_size(self, part: PartSize) -> Any:
        """The size of a part, as an answer: of the smallest to the program, and neither 0 nor 1 to an operator.

        An operator that will run for each part gets an answer if it insists, and if the extremes can answer for all.
        """
        if self.operators and not part.by_itself:
            return 2
        if self.operators:
            asked = [found for found in getattr(self._asked, "free_symbols", ()) if found in self.sizes_of_parts]
            if len(asked) != 1 or not _is_monotonic(self._asked, asked[0]):
                return None
        return self.value(part.extremes()[0])

    def _note_of_part(self, question: Any, answer: Any) -> None:
        """Note that all parts answer a question of the program's alike, as they do if the smallest and the largest do
        and the question is an inequality. Operators may only ask whether a size is 0 or 1 (`sequences/batching.py`).
        """
        symbol, *others = question.free_symbols & self.sizes_of_parts.keys()
        part = self.sizes_of_parts[symbol]
        if self.operators and not part.by_itself:
            if not others and is_of_one(question):
                return
        elif not others and self._is_on_one_side(question, symbol, part):
            return
        elif not others and (_is_monotonic(question, symbol) or self._are_equal(part)):
            extremes = [question.xreplace({symbol: extreme}) for extreme in part.extremes()]
            if all(self.number(extreme) == answer for extreme in extremes):
                for extreme in extremes:
                    self._note(extreme, answer)
                return
        if self.part is not None and not self.operators:
            self.part.note(question, answer)
        else:
            self.unrolled.update(dict.fromkeys(part.places, "its parts may answer a question differently"))

    def _is_on_one_side(self, question: Any, symbol: Any, part: PartSize) -> bool:
        """Whether no part equals what the question compares it with, as all are smaller or all are larger, guarded."""
        if not isinstance(question, (sympy.Eq, sympy.Ne)):
            return False
        for side in (sympy.Gt, sympy.Lt):
            conditions = [side(question.lhs, question.rhs).xreplace({symbol: each}) for each in part.extremes()]
            if _is_monotonic(side(question.lhs, question.rhs), symbol):
                if all(self.number(condition) == sympy.true for condition in conditions):
                    for condition in conditions:
                        self._note(condition, sympy.true)
                    return True
        return False

    def _are_equal(self, part: PartSize) -> bool:
        """Whether all parts have the same size, which is guarded."""
        least, most = part.extremes()
        if self.number(least) != self.number(most):
            return False
        self._note(sympy.Eq(least, most), sympy.true)
        return True

    def _note(self, question: Any, answer: Any) -> None:
        if self.part is not None and not self.operators and self.part.is_about(question):
            self.part.note(question, answer)
            return
        if self.is_of_part(question):
            self._note_of_part(question, answer)
            return
        if answer == sympy.true:
            condition = question
        elif answer == sympy.false:
            condition = sympy.Not(question)
        else:
            condition = sympy.Eq(question, answer)
        is_number, is_choice = answer not in (sympy.true, sympy.false), self._choosing or self.sizes.is_caught
        found = Answer(condition, self.place(), is_number, is_choice)
        self.answers.append(found)
        if not found.is_number and not found.inside_operator:
            self._count(found, question, answer == sympy.true)

    def note_choice(self, question: Any, answer: bool, place: Place) -> None:
        """Record a default answer at a place; the shape environment does not know of it."""
        condition = question if answer else sympy.Not(question)
        self.answers.append(Answer(condition, place, is_choice=True, is_tacit=True))

    @contextmanager
    def running(self, node: Node) -> Iterator[None]:
        """Inside, questions are those of an operator that runs on fake tensors."""
        self.operators += 1
        try:
            with self.sizes.running(node):
                yield
        finally:
            self.operators -= 1

    @contextmanager
    def asking(self, question: Any) -> Iterator[None]:
        """Inside, an operator insists on an answer to a question; to none if that is None."""
        before, self._asked = self._asked, question
        try:
            yield
        finally:
            self._asked = before

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Inside, answers are choices."""
        self._choosing = True
        try:
            yield
        finally:
            self._choosing = False

    @property
    def is_tracing(self) -> bool:
        """Whether a running operator is the program's, and not one that the walk runs again."""
        return self._answering and self.graph is not None and not self.graph.is_walking

    def _count(self, answer: Answer, question: Any, truth: bool) -> None:
        truths = self._truths.setdefault(answer.place, {})
        truths[question] = truth
        if self.attempt.flags is None:
            return
        if len(truths) >= _MOST_QUESTIONS and len(set(truths.values())) == 2:
            text = f"{answer.where} asks for {len(truths)} numbers of one batch, and their answers differ"
            self.crowded.setdefault(answer.place, text)
        elif len(truths) > 1 and answer.where and any(place in self.varying for place, _ in self.attempt.unrolled):
            text = f"{answer.where} asks for a number of each part of a batch, and batches have other numbers of parts"
            self.crowded.setdefault(answer.place, text)

    def place(self) -> Place:
        """The place of the question that is being asked."""
        walking = self.graph is not None and self.graph.is_walking  # the walk runs operators again
        return (*user_place(), self.operators > 0 or walking)

    @contextmanager
    def insisting(self) -> Iterator[None]:
        """Inside, questions are those of an operator that needs an answer, also where the program gets none."""
        before, self._insists = self._insists, True
        self.operators += 1
        try:
            yield
        finally:
            self.operators -= 1
            self._insists = before

    def _is_refused(self) -> bool:
        if self._insists:
            return False
        refused = self.attempt.refused.union(self.crowded) if self.crowded else self.attempt.refused
        return bool(refused) and self.place() in refused


class _Values(BatchValues):
    """A dict of the values of all symbols, each computed on lookup; what passes note is in the dict itself."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __bool__(self) -> bool:
        return self._trace._answering

    def __contains__(self, symbol: object) -> bool:
        return self.get(symbol) is not None

    def __getitem__(self, symbol: Any) -> Any:
        value = self.get(symbol)
        if value is None:
            raise KeyError(symbol)
        return value

    def get(self, symbol: Any, default: Any = None) -> Any:
        if (noted := super().get(symbol)) is not None:
            return noted
        try:
            value = self._trace.answer(symbol) if isinstance(symbol, sympy.Symbol) else None
        except Exception as error:
            self._trace.note_error(Feature.HINTS, error)
            raise
        return default if value is None else value


def _is_monotonic(question: Any, symbol: Any) -> bool:
    """Whether the truth of a question, as a function of one symbol, changes at most once."""
    if not isinstance(question, (sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le)):
        return False
    difference = question.lhs - question.rhs
    parts = [*sympy.preorder_traversal(difference)]
    if parts.count(symbol) != 1:
        return bool(sympy.diff(difference, symbol).is_number)
    return all(
        isinstance(part, (sympy.Symbol, sympy.Number, sympy.Add, sympy.Mul))
        or (isinstance(part, FloorDiv) and symbol not in part.args[1].free_symbols)
        for part in parts
    )
