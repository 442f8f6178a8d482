"""A loop over the parts of a batch is traced once, for a part of unknown size.

    outputs = [attend(q, k, v) for q, k, v in zip(*splits)]

Dynamo traces the loop's body with parts of size u, a symbol that no question about the batch determines. At the end of
the body, `batching.py` computes it for all parts at once, in the same graph, and the nodes of the one part go; so does
the symbol. The list that the loop has appended to is `Results` from then on, which `torch.cat` and the like take.

The body has to do the same for each part. So a question about u, a change of Python's state other than an append, a
variable that is carried from part to part, a write, a random number, and a graph break have the frame traced again with
this loop unrolled, as under stock PyTorch. So has whatever no rule of `batching.py` covers, until the number of parts
changes: then the body becomes an operator that runs it part by part (`one_by_one.py`), for any number.

Private names, checked on torch 2.11, 2.13 and 2.15, besides the handlers' sites: `OutputGraph.current_tracer`,
`random_calls` and `side_effects.tensor_hooks`; `symbolic_locals`, `stack`, `block_stack` and
`instructions` of a translator; of the shape environment, `deferred_runtime_asserts` and `replace`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.iter import IteratorVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from fxpasses.base.containment import error_text
from fxpasses.dynamo.births import born, now
from fxpasses.dynamo.dynamo_names import DynamoNames, in_short
from fxpasses.dynamo.failures import Unrolled
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.trace import Trace
from fxpasses.graph.effects import impurity, storage_key
from fxpasses.graph.symbols import expression
from fxpasses.sequences.batched import Unbatched
from fxpasses.sequences.batching import Batching
from fxpasses.sequences.capture import called, lists
from fxpasses.sequences.capture.all_parts import AllParts
from fxpasses.sequences.capture.bodies import PartBody
from fxpasses.sequences.capture.carried import Carried
from fxpasses.sequences.capture.items import Columns, Tensors
from fxpasses.sequences.capture.lists import Lengths, Parts, Results
from fxpasses.sequences.capture.parts import OnePart
from fxpasses.sequences.capture.questions import Questions
from fxpasses.sequences.capture.writer import Writer


class Sequences:
    """The loops over parts of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._open: Loop | None = None
        self.is_reading = False  # a list, which calls the same function again inside a mode, such as a default device
        self.unrolled: list[tuple[Any, Any]] = []  # translators of loops, and the loops' places
        # By memory that is read later than the program reads it, the places of the loops' lists.
        self.kept: dict[int, frozenset[Any]] = {}

    @property
    def open(self) -> Loop | None:
        """The loop that is being traced."""
        return self._open

    @open.setter
    def open(self, loop: Loop | None) -> None:
        self._open = loop
        self.trace.part = None if loop is None else loop.questions

    def refuse(self, *places: Any, why: str, has_rules: bool = True, is_new: bool = False) -> Any:
        """Have the frame traced again with the loops over some lists unrolled.

        has_rules: False if only a rule is missing, so that they can run part by part. is_new: whether that differs from
        what this attempt does.
        """
        self.open = None
        can_run = not has_rules and self.trace.varying.issuperset(places)
        can_run = can_run and (is_new or not self.are_one_by_one(places))
        found = self.trace.one_by_one if can_run else self.trace.unrolled
        found.update(dict.fromkeys(places, why))
        raise Unrolled(f"a loop over parts of the batch is unrolled: {why}")

    def carry(self, name: str, *places: Any) -> None:
        """Have the frame traced again with a number that the loops over some lists carry from part to part."""
        carried = {(place, name) for place in places}
        if self.trace.varying.issuperset(places) and self.trace.attempt.carried.isdisjoint(carried):
            self.trace.carried |= carried
            self.refuse(*places, why=f"`{name}` counts from part to part", has_rules=False, is_new=True)

    def call(self, function: Any, *places: Any) -> None:
        """Have the frame traced again with a function that is called for each part of some lists, and not traced."""
        self.trace.varying |= set(places)
        self.trace.called.add(function.__code__)
        self.refuse(*places, why=f"`{function.__name__}` decides for each part", has_rules=False, is_new=True)

    def call_what_asks(self, tx: Any) -> None:
        """Have an unrolled loop run part by part, if a function asks in it what the parts answer differently.

        tx: Dynamo's innermost translator.
        """
        for loop_tx, place in self.unrolled:
            function = called.function_that_asks(tx, loop_tx, self.trace.attempt.called)
            if function is not None and not self.are_one_by_one([place]):
                self.trace.crowded.clear()
                self.call(function, place)

    def are_one_by_one(self, places: Iterable[Any]) -> bool:
        """Whether this attempt runs the loops over some lists part by part."""
        known = {place for place, _ in self.trace.attempt.one_by_one}
        return not known.isdisjoint(places)

    def check(self, tx: Any, value: Any, checked: set[Any]) -> None:
        """Refuse a list unless its lengths are those of the program's list, and sum to what they cut.

        checked: the keys of lengths that were found to; this adds to them.
        """
        rows = None
        if type(value) is Parts:
            rows = value.tensor.call_method(tx, "size", [ConstantVariable.create(value.dim)], {})
        writer = Writer(self.trace, tx, value.lengths, rows)
        if not writer.is_current():
            self.refuse(value.lengths.place, why="its lengths have been written to")
        if rows is not None and writer.key not in checked and not writer.fits():
            self.refuse(value.lengths.place, why="its parts do not sum to their tensor")
        checked.add(writer.key)

    def changed(self, when: int = -1) -> None:
        """Called for a change of a Python object that was created at the time `when`."""
        if self.open is not None and when < self.open.born:
            self.open.spoiled = True

    def written(self, tensor: Any) -> None:
        """Called before the program writes to a tensor: no loop may read it after that, in backward for instance."""
        places = self.kept.get(storage_key(tensor))
        if places:
            self.trace.unrolled.update(dict.fromkeys(places, "what it reads is written to after it"))


class PartIterator(IteratorVariable):
    """Iterates over lists that belong together: has one element, a part of unknown size.

    over: a list, or a tuple of what is zipped. is_one_by_one: whether the body is to run part by part.
    """

    def __init__(self, sequences: Sequences, over: Any, is_one_by_one: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sequences, self.over, self.is_one_by_one = sequences, over, is_one_by_one
        self.lists = tree_leaves(over)
        self.places = [value.lengths.place for value in self.lists]
        self.loop: Loop | None = None

    _nonvar_fields = {
        "sequences", "over", "is_one_by_one", "lists", "places", "loop", *IteratorVariable._nonvar_fields
    }  # fmt: skip

    def python_type(self) -> type:
        return type(iter(()))

    def next_variable(self, tx: Any) -> Any:
        try:
            return self._next(tx)
        except Exception as error:  # which passes through a method of Dynamo's, as if it were Dynamo's own
            if not isinstance(error, StopIteration):
                self.sequences.trace.note_error(Feature.SEQUENCES, error)
            raise

    def _next(self, tx: Any) -> Any:
        place = tx.instruction_pointer - 1
        if tx.instructions[place].opname != "FOR_ITER":
            self.sequences.refuse(*self.places, why="something else than a loop takes its parts")
        if any(type(value) not in lists.KINDS for value in self.lists):
            self.sequences.refuse(*self.places, why="its list is read before it")
        if self.loop is None:
            self.loop = Loop(self.sequences, tx, place, self.lists, self.is_one_by_one)
            return self.loop.begin(self.over)
        self.loop.end(tx, place)
        raise StopIteration

    tp_iternext_impl = next_variable

    def reconstruct(self, codegen: Any) -> None:
        self.sequences.refuse(*self.places, why="the graph breaks in it")


class Loop:
    """A loop that is being traced. over: what it takes its parts from, of one length, or of as many parts."""

    def __init__(self, sequences: Sequences, tx: Any, start: int, over: list[Any], is_one_by_one: bool) -> None:
        self.sequences, self.tx, self.start, self.over, self.is_one_by_one = sequences, tx, start, over, is_one_by_one
        self.places: frozenset[Any] = frozenset(value.lengths.place for value in over)
        self.elements: dict[int, Any] = {}  # by id, other lists that the body reads at the number of the part
        self.lengths: Lengths = over[0].lengths
        self.carried = Carried(sequences.trace, tx, self.refuse)
        self.stack = list(tx.stack)
        self.blocks = len(tx.block_stack)
        self.graph = tx.output.current_tracer.graph
        self.effects = self._effects()
        self.born = now()
        self.watched: list[Any] = []  # empty lists
        self.appended: dict[int, tuple[Any, list[Any]]] = {}  # by id: the list, and what the body has appended
        self.spoiled = False  # whether the body has changed Python's state

    def refuse(self, why: str, has_rules: bool = True) -> Any:
        return self.sequences.refuse(*self.places, why=why, has_rules=has_rules or self.is_one_by_one)

    def _effects(self) -> tuple[Any, ...]:
        output = self.tx.output
        return len(output.random_calls), tuple(output.side_effects.tensor_hooks)

    # The beginning

    def begin(self, over: Any) -> Any:
        """The variable of one part. over: as above, with tuples of what is zipped."""
        if self.sequences.open is not None:
            self.refuse("it is inside another one")
        if any(type(value) is Parts and value.gradients != torch.is_grad_enabled() for value in self.over):
            self.refuse("its parts were cut with gradients, and it runs without, or the other way round")
        self.writer = Writer(self.sequences.trace, self.tx, self.lengths, self._rows())
        self._check_lengths()
        self.part = OnePart(
            self.sequences.trace, self.tx, self.writer, self.lengths, self.places, self.is_one_by_one, self.refuse
        )
        self.first = self.graph._root.prev
        self.questions = Questions(self.part, self.carried, self.body_so_far)
        element = self.part.of(over)
        if self.is_one_by_one:
            self.carried.begin(self.start, self.part, self.writer)
        else:
            (size,) = self.part.sizes.values()
            self.batching = Batching(self.writer, expression(size.sym_num), size.as_proxy().node)
            self.batching.known = self.part.known
        self.sequences.open = self
        self.watched = [found for found in _lists(self.tx) if born(found) >= 0 and not found.items]
        for found in self.watched:
            lists.watch(found)
        return element

    def _check_lengths(self) -> None:
        """Refuse the loop unless the lengths are those of the program's lists, and sum to what they cut."""
        checked = set[Any]()
        for value in self.over:
            self.sequences.check(self.tx, value, checked)

    def _rows(self) -> Any:
        """The variable of T; None if nothing has as many rows."""
        for value in self.over:
            if type(value) is Parts:
                return value.tensor.call_method(self.tx, "size", [ConstantVariable.create(value.dim)], {})
            if type(value) is Results and type(value.item) is Tensors and value.item.value.dims:
                at = ConstantVariable.create(value.item.value.dims[0])
                return value.item.value.variable.call_method(self.tx, "size", [at], {})
        return None if self.is_one_by_one else self.refuse("it has no tensor of all parts")

    def at_index(self, value: Any, index: Any) -> Any:
        """What a part has of another list; None unless it is read at the part's own number."""
        if not self.is_one_by_one or value.lengths.count != self.lengths.count:
            return None
        if not self.carried.is_index(index, self.part):
            return None
        if id(value) not in self.elements:
            self.elements[id(value)] = value, self.part.of(value)
        return self.elements[id(value)][1]

    def append(self, made: Any, value: Any) -> None:
        """Note that the body appends to a list."""
        if id(made) not in self.appended:
            if type(made) is not lists.Watched or made.is_read:
                self.refuse("it reads a list that it appends to, or appends to one that is not empty")
            lists.expect_results(made, self.lengths, self._refuse_later)
            self.appended[id(made)] = made, []
        self.appended[id(made)][1].append(value.realize())

    def _refuse_later(self, why: str) -> Any:
        return self.sequences.refuse(*self.places, why=why)

    # The end

    def end(self, tx: Any, place: int) -> None:
        """Called when the body is complete: compute it for all parts."""
        self.sequences.open = None
        for found in self.watched:
            lists.unwatch(found)
        output = tx.output
        if tx is not self.tx or place != self.start or output.current_tracer.graph is not self.graph:
            self.refuse("it is left and entered again")
        if self.spoiled or self._effects() != self.effects:
            self.refuse("it changes Python's state, draws random numbers, or adds hooks")
        stack = [id(value) for value in tx.stack]
        if len(tx.block_stack) != self.blocks or stack != [id(value) for value in self.stack]:
            self.refuse("its state differs after a part")
        self.carried.find(self.start, lambda name: self.sequences.carry(name, *self.places))
        try:
            self._finish(output)
        except Unbatched as refusal:
            self.refuse(str(refusal), has_rules=False)
        except (DynamoNames.find().runtime_error, DynamoNames.find().unsupported) as error:
            self.refuse(f"an operator does not take all parts: {error_text(error)}", has_rules=False)
        self._erase()
        where = in_short(*self.lengths.place[:2])
        self.sequences.trace.loops.append(f"the loop over parts of the batch at {where} {self._what_it_is()}")

    def _finish(self, output: Any) -> None:
        """Compute what the body makes, for all parts."""
        part, carried = self.part, self.carried
        self.body = self.body_so_far()
        for node in self.body.others:
            self._check_outside(node, output.fake_mode)
        parts = AllParts(part, carried, self.body)
        columns = Columns(parts)
        steps = {name: columns.step(carried.counters[name], after) for name, after in carried.counted.items()}
        if any(columns.constant_steps.get(carried.counters[name]) != 1 for name in carried.indexing):
            raise Unbatched("a list is read at a number that it carries")
        items = [columns.plan(self._only(items)) for _, items in self.appended.values()]
        conditions = [columns.condition(*condition) for condition in self.questions.conditions.items()]
        of_functions = columns.of_functions()
        self.body = parts.body = self.body_so_far()
        added = carried.added(self.body.own)
        if self.is_one_by_one:
            parts.run_one_by_one([*columns.wanted, *added], steps, of_functions, output.fake_mode)
            self.sequences.kept |= dict.fromkeys(self.body.memory(), self.places)
        else:
            self._compute_for_all(output)
            if self.body.may_return_views():  # of all parts where eager mode copies each, or the other way round
                self.sequences.kept |= dict.fromkeys(self.body.memory(), self.places)
        for hold in conditions:
            hold()
        for (made, _), item in zip(self.appended.values(), items, strict=True):
            made.item = item()
            made.lengths = made.item.lengths if type(made.item) is Tensors else self.lengths
        carried.finish_sums(self.body.own, part.known, self.writer)

    def body_so_far(self) -> PartBody:
        return PartBody(self._nodes(), [value.as_proxy().node for value in self.part.stand_ins])

    def _what_it_is(self) -> str:
        if not self.is_one_by_one:
            return "is one computation" + " (attention)" * self.batching.mixes_rows
        known = dict(self.sequences.trace.attempt.one_by_one)
        reasons = [known[place] for place in self.places if place in known]
        return f"runs part by part: {reasons[0] if reasons else 'there is no rule for its lists'}"

    def _compute_for_all(self, output: Any) -> None:
        """Compute the body for all parts at once."""
        self._check_size(output.shape_env)
        for node in self.body.own:
            if node not in self.part.known and node not in self.batching.numbers:
                self.batching.visit(node)

    def _check_size(self, shape_env: Any) -> None:
        """Nothing may have been assumed of the size of a part."""
        symbol = self.batching.size
        shape_env.deferred_runtime_asserts.pop(symbol, None)  # what the batch has answered is guarded
        asserted = [found for every in shape_env.deferred_runtime_asserts.values() for found in every]
        if any(symbol in found.expr.free_symbols for found in asserted):
            raise Unbatched("its parts must have a certain size")
        if shape_env.replace(symbol) != symbol or self.sequences.trace.sizes.concerns(symbol):
            raise Unbatched("its parts must have a certain size")

    def _nodes(self) -> list[Node]:
        """What has been written to the graph since the beginning."""
        found, node = [], self.first.next
        while node is not self.graph._root:
            found.append(node)
            node = node.next
        return found

    def _check_outside(self, node: Node, fake_mode: Any) -> None:
        if node.op != "get_attr" and (reason := impurity(node, fake_mode)) is not None:
            raise Unbatched(reason)  # it runs once, and not for each part

    def _only(self, items: list[Any]) -> Any:
        """What the body has appended to a list."""
        if len(items) != 1:
            raise Unbatched("a list gets something else than one value for each part")
        return items[0]

    def _erase(self) -> None:
        """Take out the nodes of one part, which nothing reads any more."""
        trace = self.sequences.trace
        assert trace.graph is not None
        trace.graph.erase([*self.body.own])
        counters = [expression(value.sym_num) for value in self.carried.counters.values()]
        for number in [*self.part.numbers, *counters]:
            del trace.sizes_of_parts[number]


def _lists(tx: Any) -> list[Any]:
    """Dynamo's own lists in the variables and on the stack of a frame, each once."""
    values = [*tx.symbolic_locals.values(), *tx.stack]
    found = {id(value): value for value in (value.realize() for value in values if _is_made(value))}
    return [value for value in found.values() if type(value) is ListVariable]


def _is_made(value: Any) -> bool:
    """Whether a variable is known to Dynamo, and not an input that the program has not touched."""
    return not isinstance(value, LazyVariableTracker) or value.is_realized()
