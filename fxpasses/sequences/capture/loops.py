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

import sympy
import torch
from torch._dynamo.variables import ConstantVariable, TupleVariable
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.iter import IteratorVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.fx import Node

from fxpasses.base.containment import error_text
from fxpasses.dynamo.dynamo_names import DynamoNames, in_short
from fxpasses.dynamo.failures import Unrolled
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.trace import PartSize, Trace
from fxpasses.experts.capture.liveness import live_at
from fxpasses.experts.capture.speculation import born, now
from fxpasses.graph.calls import operator_of
from fxpasses.graph.effects import impurity, storage_key
from fxpasses.graph.symbols import expression
from fxpasses.sequences import operators  # noqa: F401 (registers the operators)
from fxpasses.sequences.batched import Batched, Unbatched
from fxpasses.sequences.batching import Batching
from fxpasses.sequences.capture import lists
from fxpasses.sequences.capture.bodies import Operand, PartBody
from fxpasses.sequences.capture.lists import Elements, Lengths, Parts, Results, Rows, Sizes
from fxpasses.sequences.capture.writer import Value, Writer


class Sequences:
    """The loops over parts of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.open: Loop | None = None
        self.is_reading = False  # a list, which calls the same function again inside a mode, such as a default device
        self.kept: dict[int, set[Any]] = {}  # by memory that backward reads, the places of the loops' lists

    def refuse(self, *places: Any, why: str, has_rules: bool = True) -> Any:
        """Have the frame traced again with the loops over some lists unrolled.

        has_rules: False if only a rule is missing, so that they can run part by part.
        """
        self.open = None
        can_run = not has_rules and self.trace.varying.issuperset(places) and not self.are_one_by_one(places)
        found = self.trace.one_by_one if can_run else self.trace.unrolled
        found.update(dict.fromkeys(places, why))
        raise Unrolled(f"a loop over parts of the batch is unrolled: {why}")

    def are_one_by_one(self, places: Iterable[Any]) -> bool:
        """Whether this attempt runs the loops over some lists part by part."""
        known = {place for place, _ in self.trace.attempt.one_by_one}
        return not known.isdisjoint(places)

    def changed(self, when: int = -1) -> None:
        """Called for a change of a Python object that was created at the time `when`."""
        if self.open is not None and when < self.open.born:
            self.open.spoiled = True

    def written(self, tensor: Any) -> None:
        """Called before the program writes to a tensor: no loop may read it again in backward."""
        places = self.kept.get(storage_key(tensor))
        if places:
            self.trace.unrolled.update(dict.fromkeys(places, "what it reads is written to after it"))


class PartIterator(IteratorVariable):
    """Iterates over lists that belong together: has one element, a part of unknown size.

    is_one_by_one: whether the body is to run part by part.
    """

    def __init__(
        self, sequences: Sequences, over: list[Any], is_zip: bool, is_one_by_one: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.sequences, self.over, self.is_zip, self.is_one_by_one = sequences, over, is_zip, is_one_by_one
        self.places = [value.lengths.place for value in over]
        self.loop: Loop | None = None

    _nonvar_fields = {
        "sequences", "over", "is_zip", "is_one_by_one", "places", "loop", *IteratorVariable._nonvar_fields
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
        if any(type(value) not in lists.KINDS for value in self.over):
            self.sequences.refuse(*self.places, why="its list is read before it")
        if self.loop is None:
            self.loop = Loop(self.sequences, tx, place, self.over, self.is_one_by_one)
            elements = self.loop.begin()
            return TupleVariable(elements) if self.is_zip else elements[0]
        self.loop.end(tx, place)
        raise StopIteration

    tp_iternext_impl = next_variable

    def reconstruct(self, codegen: Any) -> None:
        self.sequences.refuse(*self.places, why="the graph breaks in it")


class Loop:
    """A loop that is being traced. over: what it takes its parts from, of one length, or of as many parts."""

    def __init__(self, sequences: Sequences, tx: Any, start: int, over: list[Any], is_one_by_one: bool) -> None:
        self.sequences, self.tx, self.start, self.over, self.is_one_by_one = sequences, tx, start, over, is_one_by_one
        self.places = {value.lengths.place for value in over}
        self.lengths: Lengths = over[0].lengths
        self.variables = dict(tx.symbolic_locals)
        self.stack = list(tx.stack)
        self.blocks = len(tx.block_stack)
        self.graph = tx.output.current_tracer.graph
        self.effects = self._effects()
        self.born = now()
        self.watched: list[Any] = []  # empty lists
        self.appended: dict[int, tuple[Any, list[Any]]] = {}  # by id: the list, and what the body has appended
        self.spoiled = False  # whether the body has changed Python's state
        self.lengths_of: dict[Node, Lengths] = {}  # by what is appended, if not those of the loop

    def refuse(self, why: str, has_rules: bool = True) -> Any:
        return self.sequences.refuse(*self.places, why=why, has_rules=has_rules or self.is_one_by_one)

    def _effects(self) -> tuple[Any, ...]:
        output = self.tx.output
        return len(output.random_calls), tuple(output.side_effects.tensor_hooks)

    # The beginning

    def begin(self) -> list[Any]:
        """The variables of one part."""
        if self.sequences.open is not None:
            self.refuse("it is inside another one")
        if any(type(value) is Parts and value.gradients != torch.is_grad_enabled() for value in self.over):
            self.refuse("its parts were cut with gradients, and it runs without, or the other way round")
        self.writer = Writer(self.sequences.trace, self.tx, self.lengths, self._rows())
        self._check_lengths()
        self.sizes: dict[Any, Any] = {}  # by the lengths' keys, the variables of parts' sizes
        self.cuts: dict[Node, Lengths] = {}  # by the lengths' nodes
        self.known: dict[Node, Batched] = {}  # values for all parts, by those for one
        self.numbers: list[Any] = []  # the symbols of a part's numbers
        self.stand_ins: list[Any] = []
        self.first = self.graph._root.prev
        elements = [self._element(value) for value in self.over]
        if not self.is_one_by_one:
            (size,) = self.sizes.values()
            self.batching = Batching(self.writer, expression(size.sym_num), size.as_proxy().node)
            self.batching.known = self.known
        self.sequences.open = self
        self.watched = [found for found in _lists(self.tx) if born(found) >= 0 and not found.items]
        for found in self.watched:
            lists.watch(found)
        return elements

    def _check_lengths(self) -> None:
        """Refuse the loop unless the lengths are those of the program's lists, and sum to what they cut."""
        checked = set()
        for value in self.over:
            rows = None
            if type(value) is Parts:
                rows = value.tensor.call_method(self.tx, "size", [ConstantVariable.create(value.dim)], {})
            writer = Writer(self.sequences.trace, self.tx, value.lengths, rows)
            if not writer.is_current():
                self.refuse("its lengths have been written to")
            if rows is not None and writer.key not in checked and not writer.fits():
                self.refuse("its parts do not sum to their tensor")
            checked.add(writer.key)

    def _rows(self) -> Any:
        """The variable of T; None if nothing has as many rows."""
        for value in self.over:
            if type(value) is Parts:
                return value.tensor.call_method(self.tx, "size", [ConstantVariable.create(value.dim)], {})
            if type(value) is Results and value.whole.dims:
                at = ConstantVariable.create(value.whole.dims[0])
                return value.whole.variable.call_method(self.tx, "size", [at], {})
        return None if self.is_one_by_one else self.refuse("it has no tensor of all parts")

    def _size(self, lengths: Lengths) -> Any:
        """The variable of the size of a part."""
        if lengths.key not in self.sizes:
            size = self.writer.call(torch.ops.fxpasses.part_size.default, lengths.tensor)
            self.stand_ins.append(size)
            self._note_number(size, lengths.tensor)
            self.sizes[lengths.key] = size
            self.cuts[size.as_proxy().node.args[0]] = lengths
        return self.sizes[lengths.key]

    def _note_number(self, number: Any, of_all: Any) -> None:
        """Have questions about a number of a part answered by the smallest and the largest one."""
        found: list[Any] = []

        def extremes() -> Any:
            if not found:
                smallest, largest = (of_all.call_method(self.tx, name, [], {}) for name in ("amin", "amax"))
                for value in (smallest, largest):
                    found.append(expression(value.call_method(self.tx, "item", [], {}).sym_num))
            return tuple(found)

        symbol = expression(number.sym_num)
        self.numbers.append(symbol)
        part = PartSize(frozenset(self.places), extremes, by_itself=self.is_one_by_one)
        self.sequences.trace.sizes_of_parts[symbol] = part

    def _element(self, value: Any) -> Any:
        if type(value) is Sizes:
            return self._size(value.lengths)
        if type(value) is Rows:
            return ListVariable(self._numbers(value), mutation_type=ValueMutationNew())
        dims: tuple[int, ...]
        if type(value) is Elements:
            whole, dims = value.tensor, ()
        elif type(value) is Parts:
            whole, dims = value.tensor, (value.dim,)
        elif value.whole is None:
            return self.refuse("it takes a list without tensors")
        else:
            whole, dims = value.whole.variable, value.whole.dims
        if not dims:
            element = self.writer.call(torch.ops.fxpasses.element.default, whole)
        elif len(dims) == 1:
            of_dim = ConstantVariable.create(dims[0])
            element = self.writer.call(torch.ops.fxpasses.part.default, whole, of_dim, self._size(value.lengths))
        else:
            return self.refuse("it takes pairs of rows")
        self.stand_ins.append(element)
        self.known[element.as_proxy().node] = Batched(self.writer.local(whole), dims)
        return element

    def _numbers(self, rows: Rows) -> list[Any]:
        """The variables of the numbers that a list has for a part."""
        row = self.writer.call(torch.ops.fxpasses.element.default, rows.lengths.tensor)
        self.stand_ins.append(row)
        found = []
        for column in range(rows.columns):
            at = [ConstantVariable.create(column)]
            element = row.call_method(self.tx, "select", [ConstantVariable.create(0), *at], {})
            number = element.call_method(self.tx, "item", [], {})
            of_all = rows.lengths.tensor.call_method(self.tx, "select", [ConstantVariable.create(1), *at], {})
            self._note_number(number, of_all)
            found.append(number)
        return found

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
        sums = self._carried(tx)
        self.body = PartBody(self._nodes(), [value.as_proxy().node for value in self.stand_ins])
        try:
            for node in self.body.others:
                self._check_outside(node, output.fake_mode)
            found = {key: self._item(items) for key, (_, items) in self.appended.items()}
            items = {key: node for key, node in found.items() if node is not None}
            added = [self._added(before, after) for before, after in sums.values()]
            if self.is_one_by_one:
                self._run_one_by_one([*items.values(), *(node for node, _ in added)], output)
            else:
                self._compute_for_all(output)
            for key, item in items.items():
                made, _ = self.appended[key]
                made.whole = self._value(item)
                made.lengths = self.lengths_of.get(item, self.lengths)
            for (name, (_, after)), (node, own) in zip(sums.items(), added, strict=True):
                tx.symbolic_locals[name] = self._sum(node, own, after)
        except Unbatched as refusal:
            self.refuse(str(refusal), has_rules=False)
        except (DynamoNames.find().runtime_error, DynamoNames.find().unsupported) as error:
            self.refuse(f"an operator does not take all parts: {error_text(error)}", has_rules=False)
        self._erase()
        where = in_short(*self.lengths.place[:2])
        self.sequences.trace.loops.append(f"the loop over parts of the batch at {where} {self._what_it_is()}")

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
            if node not in self.known and node not in self.batching.numbers:
                self.batching.visit(node)

    def _run_one_by_one(self, wanted: list[Node], output: Any) -> None:
        """Make the body an operator that runs it part by part."""
        self.body.check(self.sequences.trace, output.fake_mode)
        for symbol in self.body.compared(output.shape_env):
            self._check_not_one(symbol)
        self.body.forget_assertions(output.shape_env, self.numbers)
        self.sequences.trace.sizes.forget(self.body.symbols)
        nodes = [*dict.fromkeys(wanted)]
        for node, (value, cut) in zip(nodes, Operand(self.body, self.writer).write(nodes), strict=True):
            self.known[node] = Batched(self.writer.local(value.variable), value.dims)
            self.sequences.kept.update(dict.fromkeys(self.body.memory(), self.places))
            own = Lengths(self.lengths.tensor, object(), self.lengths.place, is_known=False)
            self.lengths_of[node] = self.lengths if not value.dims else self.cuts[cut] if cut is not None else own

    def _check_not_one(self, symbol: Any) -> None:
        """Guard that a number is larger than 1 for all parts: operators have taken it for granted."""
        trace = self.sequences.trace
        part = trace.sizes_of_parts.get(symbol)
        if part is not None:
            least = part.extremes()[0]
            with trace.insisting():
                if trace.number(least) is None or trace.number(least) <= 1:
                    raise Unbatched("operators take a part of one row in another way")
                trace.note(least > 1, sympy.true)

    def _carried(self, tx: Any) -> dict[str, tuple[Any, Any]]:
        """The variables that each part adds to, with their values before and after one part.

        No other variable that the next part reads, or the program after the loop, may come from this part.
        """
        live, sums = live_at(tx.instructions, self.start, tx.f_globals), {}
        for name in live:
            before, after = self.variables.get(name), tx.symbolic_locals.get(name)
            if before is after or _same(before, after):
                continue
            if before is None or not isinstance(after, TensorVariable) or not self._only_adds(tx, name):
                self.refuse(f"`{name}` is carried from part to part")
            sums[name] = before, after
        for name in [name for name in tx.symbolic_locals if name not in live and name not in self.variables]:
            del tx.symbolic_locals[name]  # it may hold a node that goes
        return sums

    def _only_adds(self, tx: Any, name: str) -> bool:
        """Whether the body's only use of a variable is one like `total += x`."""
        code = tx.instructions
        end = code.index(code[self.start].target)
        uses = [i.opname for i in code[self.start : end] if i.argval == name]
        return uses == ["LOAD_FAST", "STORE_FAST"]

    def _added(self, before: Any, after: Any) -> tuple[Node, Any]:
        """The node that the body adds to a variable, and the variable's value before."""
        node = after.as_proxy().node
        own = before.as_python_constant() if before.is_python_constant() else before.as_proxy().node
        added = [operand for operand in node.args if operand in self.body.own]
        if operator_of(node).rstrip("_") != "add" or len(node.args) != 2 or node.kwargs or len(added) != 1:
            raise Unbatched("a variable is carried from part to part")
        (other,) = [operand for operand in node.args if operand is not added[0]]
        if type(other) is not type(own) or other != own or node.users:
            raise Unbatched("a variable is carried from part to part")
        return added[0], own

    def _sum(self, added: Node, own: Any, after: Any) -> Any:
        """The value of a variable to which the body adds, after all parts."""
        if added not in self.known or self.known[added].dims:
            raise Unbatched("a variable is carried from part to part")
        total = self.writer.emit(torch.add, self.writer.sum_of_parts(self.known[added].node), own)
        found, expected = total.meta["example_value"], after.as_proxy().node.meta["example_value"]
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise Unbatched("a sum has other sizes for all parts")
        return self.writer.variables[total]

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

    def _item(self, items: list[Any]) -> Node | None:
        """What the body has appended to a list; None if that is `None`, like weights that attention does not return."""
        if len(items) == 1 and items[0].is_python_constant() and items[0].as_python_constant() is None:
            return None
        if len(items) != 1 or not isinstance(items[0], TensorVariable):
            raise Unbatched("a list gets something else than one tensor for each part")
        node: Node = items[0].as_proxy().node
        if node not in self.body.own:
            raise Unbatched("a list gets a tensor that is no part's")
        return node

    def _value(self, item: Node) -> Value:
        """What the body has appended to a list, for all parts."""
        found = self.known[item]
        return Value(self.writer.variables[found.node], found.dims)

    def _erase(self) -> None:
        """Take out the nodes of one part, which nothing reads any more."""
        trace = self.sequences.trace
        assert trace.graph is not None
        trace.graph.erase([*self.body.own])
        for symbol in self.numbers:
            del trace.sizes_of_parts[symbol]


def _same(before: Any, after: Any) -> bool:
    if before is None or after is None:
        return False
    if isinstance(before, (TensorVariable, SymNodeVariable)) and type(before) is type(after):
        return before.as_proxy().node is after.as_proxy().node
    if before.is_python_constant() and after.is_python_constant():
        return repr(before.as_python_constant()) == repr(after.as_python_constant())
    return False


def _lists(tx: Any) -> list[Any]:
    """Dynamo's own lists in the variables and on the stack of a frame, each once."""
    values = [*tx.symbolic_locals.values(), *tx.stack]
    found = {id(value): value for value in (value.realize() for value in values if _is_made(value))}
    return [value for value in found.values() if type(value) is ListVariable]


def _is_made(value: Any) -> bool:
    """Whether a variable is known to Dynamo, and not an input that the program has not touched."""
    return not isinstance(value, LazyVariableTracker) or value.is_realized()
