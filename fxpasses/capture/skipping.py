"""Capture loops that pass over experts without tokens: the trace goes through every body, and notes what that assumed.

Only the router knows whether an expert has tokens, so `if tok.numel() == 0: continue` is a question that no trace can
answer. It is answered here by "it has some", without a trace in the shape environment: nothing that is traced later
rests on it. From the jump to the place where both ways meet, Python's state is watched. A variable that is used later
and holds another tensor than before is noted for the pass; any other difference (a counter, a list that grew, an
attribute, an iterator that went on, a random number) means that passing over the body makes a difference, or might: the
skip cannot be proved, and tracing stops at once (`Unprovable`). A program that asks until the answer is another one,
`while (ids == pad).any()`, would be traced forever. So it is with assertions, but for those that speak of
sizes which the body itself made (`rows[start:stop]` has 0 rows or more, and no more than `rows`): nothing older is
known better by them, and they are in the graph for the pass to judge.

`for e in hit`, over a tensor of the experts that have tokens, is a loop over all experts with such a body: `hit` is
replaced, in this loop alone, by all of them, and numbers read from it are known.

Every `Skip` must be proved by a pass. See `graph/skips.py`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._dynamo import variables
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._guards import TracingContext
from torch.fx import Node

from fxpasses.capture.experts_hit import (
    AssumedValues,
    counted_mask,
    ends_compared,
    is_routing,
    list_of_hits,
)
from fxpasses.capture.grown_lists import GrownList, grow, may_grow
from fxpasses.capture.liveness import follow, live_at
from fxpasses.capture.numpy_counts import NumpyCounts
from fxpasses.graph.routing import Routing
from fxpasses.graph.skips import AFTER, BEFORE, CONDITION, INSIDE, PART, Skip, mark
from fxpasses.graph.symbols import is_unbacked

_clock = itertools.count()
_COUNTS = (0, 1, 2, 3, 10**9)
_PLAIN = (bool, int, float, complex, str, bytes)  # equal ones are the same; by `repr`, because 0.0 == -0.0


class Unprovable(Exception):
    """Tracing on is of no use: what runs only with tokens changes what no pass looks at. The frame is traced again."""


class _Known:
    """What the shape environment knows at one time: its symbols, and how many assertions it has of each."""

    def __init__(self, shape_env: Any) -> None:
        self._shape_env = shape_env
        self._symbols = frozenset(shape_env.var_to_range)
        self._counts = {key: len(found) for key, found in shape_env.deferred_runtime_asserts.items()}

    def is_asserted_more(self) -> bool:
        """Whether something was asserted since of what was there before, other than that sizes are within its own."""
        lists = self._shape_env.deferred_runtime_asserts.items()
        return any(self._is_more(found.expr) for key, every in lists for found in every[self._counts.get(key, 0) :])

    def _is_more(self, asserted: Any) -> bool:
        older = asserted.free_symbols & self._symbols
        is_bound = isinstance(asserted, (sympy.Le, sympy.Lt)) and older <= self._shape_env.backed_var_to_val.keys()
        return older == asserted.free_symbols or bool(older and not is_bound)


@dataclass(eq=False)
class _Body:
    """A body that is being traced: from where, to where, and how things were before it."""

    skip: Skip
    tx: Any
    start: int
    end: int
    live: frozenset[str]
    variables: dict[str, Any]
    stack: list[Any]
    blocks: int
    graph: Any
    last_node: Any
    noted: Any
    known: _Known
    born: int
    spoiled: bool = False


class Skipping:
    """The skips of one attempt at tracing one frame. numbers: whether counts may be read from NumPy's arrays."""

    def __init__(self, numbers: bool = True) -> None:
        self.skips: list[Skip] = []
        self.discharged: set[int] = set()  # by number: those that are proved
        self.values = AssumedValues()
        self.arrays = NumpyCounts(self.values.routing, lambda: self._new("numbers")) if numbers else None
        self.answers = 0  # questions that the batch answered (`capture/hints.py`)
        self._bodies: list[_Body] = []
        self._loops: dict[tuple[Any, int], tuple[Any, Any]] = {}  # by translator and FOR_ITER: the node, and a count
        self._lists: dict[int, tuple[Any, Any]] = {}  # lists of all experts, by id: the list, and the node of the hits

    @property
    def unproved(self) -> list[Skip]:
        return [skip for skip in self.skips if skip.number not in self.discharged]

    def finish(self) -> None:
        """The graph is written."""
        if self.arrays is not None:
            self.arrays.finish()

    # Numbers from NumPy's arrays

    def numbers(self, tx: Any, array: Any) -> list[Any] | None:
        """The elements of an array of counts; None of others. What a body read first would be unknown without it."""
        return self.arrays.of(tx, array, may_begin=not self._bodies) if self.arrays is not None else None

    def check_use(self, function: Any, args: Any) -> None:
        """Raises `Unprovable` where NumPy's integers might give something else than Python's."""
        if self.arrays is not None and not self.arrays.allows(function, args):
            raise self.refusal(f"`{getattr(function, '__name__', function)}` of numbers from NumPy")

    # Jumps

    def truth(self, tx: Any, instruction: Any, value: Any, jumps_if: bool) -> bool | None:
        """What to take for the truth of a condition at a jump; None where it is no question about routing."""
        known = self.values.of(value)
        if known is not None and known.numel() == 1:
            return bool(known)
        found = _condition(value, self.values.routing)
        if found is None:
            return None
        truth, node, fields = found
        skip = self._new(truth=truth, **fields)
        mark(node, skip, CONDITION)
        places = {other: place for place, other in enumerate(tx.instructions)}
        target, following = places[instruction.target], tx.instruction_pointer
        passed_over = following if truth is jumps_if else target
        self._begin(tx, following - 1, follow(tx.instructions, passed_over), skip, popped=1)
        return truth

    def _new(self, kind: str, **fields: Any) -> Skip:
        self.skips.append(Skip(len(self.skips), kind, _user_line(), **fields))
        return self.skips[-1]

    # Loops over the experts that have tokens

    def all_experts(self, tx: Any, tensor: Any) -> Any:
        """All experts, in place of those in `tensor` that have tokens, as a tensor in Dynamo's hands; or None."""
        node = tensor.as_proxy().node
        if not is_unbacked_size(node) or not self._begins_loop(tx):
            return None
        value = self.values.if_all_are_hit(node)
        if value is None:
            return None
        device = node.meta["example_value"].device
        build = variables.TorchInGraphFunctionVariable
        constant = variables.ConstantVariable.create
        options = {"dtype": constant(value.dtype), "device": constant(device)}
        every: Any = build(torch.arange).call_function(tx, [constant(value.shape[0])], options)
        if value.ndim == 2:
            every = every.call_method(tx, "unsqueeze", [constant(1)], {})
        self.values.note(every.as_proxy().node, value)
        self._loops[tx, tx.instruction_pointer] = (list_of_hits(node), itertools.count())
        return every

    def list_of_all_experts(self, tx: Any, tensor: Any) -> Any:
        """The same for `tensor.tolist()`, where the program does nothing with the list but to loop over it; or None."""
        node = tensor.as_proxy().node
        if not is_unbacked_size(node) or not self._is_only_looped_over(tx):
            return None
        value = self.values.if_all_are_hit(node)
        if value is None or value.ndim != 1:
            return None
        numbers = [variables.ConstantVariable.create(int(number)) for number in value]
        made = variables.TupleVariable(numbers)
        self._lists[id(made)] = (made, list_of_hits(node))
        return made

    def begin_list(self, tx: Any, value: Any) -> None:
        """`for e in hit.tolist()` begins."""
        made, node = self._lists.get(id(value), (None, None))
        if made is value and node is not None:
            self._loops[tx, tx.instruction_pointer] = (node, itertools.count())

    def begin_round(self, tx: Any, place: int) -> None:
        """FOR_ITER, the instruction at `place`, has taken the next element."""
        node, count = self._loops.get((tx, place), (None, None))
        if node is None or tx.instruction_pointer != place + 1:
            return
        skip = self._new("hit", index=next(count))
        mark(node, skip, CONDITION)
        self._begin(tx, place, place, skip, popped=1)

    def _begins_loop(self, tx: Any) -> bool:
        return tx.instructions[tx.instruction_pointer].opname == "FOR_ITER"

    def _is_only_looped_over(self, tx: Any) -> bool:
        code, place = tx.instructions, tx.instruction_pointer
        if code[place].opname == "GET_ITER":
            return code[place + 1].opname == "FOR_ITER"
        if code[place].opname != "STORE_FAST":
            return False
        name = code[place].argval
        uses = [at for at, i in enumerate(code) if i.argval == name and "FAST" in i.opname and at != place]
        return len(uses) == 1 and [i.opname for i in code[uses[0] : uses[0] + 3]] == [
            "LOAD_FAST",
            "GET_ITER",
            "FOR_ITER",
        ]

    # Bodies

    def _begin(self, tx: Any, start: int, end: int, skip: Skip, popped: int) -> None:
        """popped: how many values on the stack the body does not find there when it is passed over."""
        graph = tx.output.current_tracer.graph
        self._bodies.append(
            _Body(
                skip=skip,
                tx=tx,
                start=start,
                end=end,
                live=live_at(tx.instructions, end),
                variables=dict(tx.symbolic_locals),
                stack=list(tx.stack[:-popped]),
                blocks=len(tx.block_stack),
                graph=graph,
                last_node=graph._root.prev,
                noted=self._noted(tx.output),
                known=_Known(tx.output.shape_env),
                born=next(_clock),
            )
        )

    def before_step(self, tx: Any) -> None:
        """The translator is about to trace its next instruction. Raises `Unprovable`."""
        place = tx.instruction_pointer
        while (found := self._ending(tx, place)) is not None:
            body = self._bodies[found]
            if found != len(self._bodies) - 1:  # those in it never came to their end
                raise _unprovable(self._bodies[-1])
            self._end(body)
            self._bodies.pop()
        for body in self._bodies:
            again = body.tx is tx and body.start == place  # and did not come to where the other way would meet it
            if body.spoiled or again or not _is_running(body.tx, tx):
                raise _unprovable(body)

    def _ending(self, tx: Any, place: int) -> int | None:
        bodies = reversed(list(enumerate(self._bodies)))
        return next((at for at, body in bodies if body.tx is tx and body.end == place), None)

    # Lists

    def append(self, tx: Any, variable: Any, value: Any, append: Callable[[], Any]) -> Any:
        """`outputs.append(value)`, which `append` does; None where it is nothing special."""
        older = [body for body in self._bodies if born(variable) < body.born]
        if not older or not may_grow(variable) or not isinstance(value, TensorVariable):
            return None
        if len(self._bodies) > 1 or born(variable) < 0 or value.as_proxy().node.graph is not older[0].graph:
            return None
        skip = older[0].skip
        with grow(variable, self.refusal).opened(), self._allowed():
            result = append()
        mark(value.as_proxy().node, skip, PART)
        skip.parts += 1
        return result

    def join(self, grown: GrownList, join: Callable[[], Any]) -> Any:
        """`torch.cat(outputs)`, which `join` does."""
        if self._bodies:
            raise self.refusal("a list that grows where experts have tokens is joined there")
        with grown.opened():
            return join()

    def is_empty_asked(self, tx: Any, value: Any) -> bool:
        """Whether `value` is a list that has grown; from now on, it must not grow any more."""
        if type(value) is not GrownList:
            return False
        if self._bodies:
            raise self.refusal("a list that grows where experts have tokens is asked there")
        value.is_asked = True
        return True

    def refusal(self, text: str) -> Unprovable:
        """What to raise where something that was proved already turns out to be used otherwise."""
        self._new("refused")
        return Unprovable(text)

    @contextmanager
    def _allowed(self) -> Iterator[None]:
        spoiled = [body.spoiled for body in self._bodies]
        yield
        for body, before in zip(self._bodies, spoiled, strict=True):
            body.spoiled = before

    def changed(self, born: int) -> None:
        """Something in Python is changed that was made at the time `born`: by a body itself, it may be."""
        for body in self._bodies:
            body.spoiled |= born < body.born

    def _noted(self, output: Any) -> tuple[Any, ...]:
        """What is done whether or not a body runs: random numbers, hooks, what the batch was asked."""
        return len(output.random_calls), tuple(output.side_effects.tensor_hooks), self.answers

    def _end(self, body: _Body) -> None:
        skip = body.skip
        tx = body.tx
        is_where_it_was = len(tx.block_stack) == body.blocks and tx.output.current_tracer.graph is body.graph
        is_where_it_was &= len(tx.stack) == len(body.stack)
        if body.spoiled or not is_where_it_was or self._noted(tx.output) != body.noted or body.known.is_asserted_more():
            raise _unprovable(body)
        names = [name for name in body.live if name in body.variables or name in tx.symbolic_locals]
        pairs = [(body.variables.get(name), tx.symbolic_locals.get(name)) for name in names]
        pairs += list(zip(body.stack, tx.stack, strict=True))
        different: list[Any] = [pair for pair in pairs if not _same(*pair, skip)]
        if not all(isinstance(value, TensorVariable) for pair in different for value in pair):
            raise _unprovable(body)  # a number, a list, something new: no pass could prove it equal
        made = []
        node = body.graph._root.prev
        while node is not body.last_node and node is not body.graph._root:
            made.append(node)
            node = node.prev
        for node in made:
            mark(node, skip, INSIDE)
        for place, (before, after) in enumerate(different):
            mark(before.as_proxy().node, skip, f"{BEFORE}{place}")
            mark(after.as_proxy().node, skip, f"{AFTER}{place}")
        skip.pairs = len(different)
        skip.ended = True
        if not made and not different and not skip.parts:
            self.discharged.add(skip.number)


def _unprovable(body: _Body) -> Unprovable:
    return Unprovable(f"what runs only with tokens, at {body.skip.where}, may do more than to compute")


def _is_running(tx: Any, callee: Any) -> bool:
    """Whether `callee` is traced for `tx`, or is it."""
    while callee is not None and callee is not tx:
        callee = getattr(callee, "parent", None)
    return callee is not None


def is_unbacked_size(node: Any) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.ndim > 0 and is_unbacked(example.shape[0])


def _condition(value: Any, routing: Routing) -> tuple[bool, Node, dict[str, Any]] | None:
    """(truth if there are tokens, node, fields of a `Skip`) of a condition that may ask whether there are tokens."""
    if isinstance(value, SymNodeVariable):
        expression, node = value.sym_num.node.expr, value.as_proxy().node
        if not is_unbacked(value.sym_num) or not all(symbol.is_integer for symbol in expression.free_symbols):
            return None
        ask = _count_asked if len(expression.free_symbols) == 1 else _end_asked
        asked = ask(expression, node, routing)
        if asked is None:
            return None
        asked_of, counts, fields = asked
        symbol, empty = fields["symbol"], fields.get("empty", 0)
        none, *some = (_truth(expression.xreplace({symbol: empty + sympy.Integer(count)})) for count in counts)
        if none is None or any(truth is None or truth is none for truth in some):
            return None
        return not none, asked_of, fields
    if isinstance(value, TensorVariable):
        node = value.as_proxy().node
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor) or any(size != 1 for size in example.shape):
            return None
        truth = is_routing(routing, node)
        return None if truth is None else (truth, node, {"kind": "tensor"})
    return None


def _count_asked(expression: Any, node: Node, routing: Routing) -> tuple[Node, tuple[int, ...], dict[str, Any]] | None:
    """`count > 0`, `tok.numel() == 0`: what is counted, and some counts, that of no tokens first."""
    (symbol,) = expression.free_symbols
    asked = counted_mask(node, symbol)
    if asked is None or not routing.concerns(asked):
        return None
    example = asked.meta.get("example_value")  # Dynamo leaves it out where it unrolls `tolist`
    is_flag = isinstance(example, torch.Tensor) and example.ndim == 0 and example.dtype is torch.bool
    return asked, (0, 1) if is_flag else _COUNTS, {"kind": "count", "symbol": symbol}


def _end_asked(expression: Any, node: Node, routing: Routing) -> tuple[Node, tuple[int, ...], dict[str, Any]] | None:
    """`ends[e - 1] == ends[e]`, the same in between: the rows of expert e end where the last expert's do."""
    ends = ends_compared(routing, node) if len(expression.free_symbols) == 2 else None
    if ends is None:
        return None
    tensor, index, (before, symbol) = ends
    if {before, symbol} != expression.free_symbols:
        return None
    return tensor, _COUNTS, {"kind": "end", "index": index, "symbol": symbol, "empty": before}


def _truth(value: Any) -> bool | None:
    if value in (sympy.true, sympy.false):
        return bool(value)
    return bool(value != 0) if value.is_number else None


def _same(before: Any, after: Any, skip: Skip) -> bool:
    before, after = (v.unwrap() if hasattr(v, "unwrap") else v for v in (before, after))
    if before is after:
        return True
    if before is None or after is None:
        return False
    if skip.symbol is not None and isinstance(after, SymNodeVariable):
        empty = after.sym_num.node.expr.xreplace({skip.symbol: sympy.sympify(skip.empty)})
        return _is_number(before) and bool(empty == _expression(before))
    if type(before) is not type(after):
        return False
    if before.is_python_constant() and after.is_python_constant():
        one, other = before.as_python_constant(), after.as_python_constant()
        return type(one) is type(other) and (one is other or (type(one) in _PLAIN and repr(one) == repr(other)))
    if isinstance(before, TensorVariable):
        return before.as_proxy().node is after.as_proxy().node
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, SymNodeVariable) or (
        value.is_python_constant() and type(value.as_python_constant()) is int
    )


def _expression(number: Any) -> Any:
    if isinstance(number, SymNodeVariable):
        return number.sym_num.node.expr
    return sympy.Integer(number.as_python_constant())


def _user_line() -> str:
    frames = TracingContext.extract_stack()
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def stamped(original: Any) -> Any:
    """Wrap the constructor of Dynamo's iterators and marks on new objects: they remember when they were made."""

    def init(self: Any, *args: Any, fxpasses_born: int | None = None, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.fxpasses_born = next(_clock) if fxpasses_born is None else fxpasses_born  # Dynamo clones by attributes

    return init


def born(variable: Any) -> int:
    """When a thing in Dynamo's hands was made, -1 if before the trace or not known."""
    mark = getattr(variable, "mutation_type", None)
    return getattr(variable, "fxpasses_born", getattr(mark, "fxpasses_born", -1))
