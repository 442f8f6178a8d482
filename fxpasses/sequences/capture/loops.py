"""A loop over the parts of a batch is traced once, for a part of unknown size.

    outputs = [attend(q, k, v) for q, k, v in zip(*splits)]

Dynamo traces the loop's body with parts of size u, a symbol that no question about the batch determines. At the end of
the body, `batching.py` computes it for all parts at once, in the same graph, and the nodes of the one part go; so does
the symbol. The list that the loop has appended to is `Results` from then on, which `torch.cat` and the like take.

The body has to do the same for each part. So a question about u, a change of Python's state other than an append, a
variable that is carried from part to part, a write, a random number, a graph break, and whatever no rule of
`batching.py` covers have the frame traced again with this loop unrolled, as under stock PyTorch.

Private names, checked on torch 2.11, 2.13 and 2.15, besides the handlers' sites: `OutputGraph.current_tracer`,
`random_calls` and `side_effects.tensor_hooks`; `symbolic_locals`, `stack`, `block_stack` and
`instructions` of a translator; of the shape environment, `deferred_runtime_asserts` and `replace`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, TupleVariable
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
from fxpasses.graph.effects import impurity
from fxpasses.graph.symbols import expression
from fxpasses.sequences import operators  # noqa: F401 (registers the operators)
from fxpasses.sequences.batched import Batched, Unbatched
from fxpasses.sequences.batching import Batching
from fxpasses.sequences.capture import lists
from fxpasses.sequences.capture.lists import Lengths, Parts, Results, Sizes
from fxpasses.sequences.capture.writer import Value, Writer


class Sequences:
    """The loops over parts of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.open: Loop | None = None

    def refuse(self, *places: Any, why: str) -> Any:
        """Have the frame traced again with the loops over some lists unrolled."""
        self.open = None
        self.trace.unrolled.update(dict.fromkeys(places, why))
        raise Unrolled(f"a loop over parts of the batch is unrolled: {why}")

    def changed(self, when: int = -1) -> None:
        """Called for a change of a Python object that was created at the time `when`."""
        if self.open is not None and when < self.open.born:
            self.open.spoiled = True


class PartIterator(IteratorVariable):
    """Iterates over `Sizes`, `Parts` and `Results` that belong together: has one element, a part of unknown size."""

    def __init__(self, sequences: Sequences, over: list[Any], is_zip: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sequences, self.over, self.is_zip = sequences, over, is_zip
        self.places = [value.lengths.place for value in over]
        self.loop: Loop | None = None

    _nonvar_fields = {"sequences", "over", "is_zip", "places", "loop", *IteratorVariable._nonvar_fields}

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
        if any(type(value) not in (Sizes, Parts, Results) for value in self.over):
            self.sequences.refuse(*self.places, why="its list is read before it")
        if self.loop is None:
            self.loop = Loop(self.sequences, tx, place, self.over)
            elements = self.loop.begin()
            return TupleVariable(elements) if self.is_zip else elements[0]
        self.loop.end(tx, place)
        raise StopIteration

    tp_iternext_impl = next_variable

    def reconstruct(self, codegen: Any) -> None:
        self.sequences.refuse(*self.places, why="the graph breaks in it")


class Loop:
    """A loop that is being traced. over: what it takes its parts from, all of the same lengths."""

    def __init__(self, sequences: Sequences, tx: Any, start: int, over: list[Any]) -> None:
        self.sequences, self.tx, self.start, self.over = sequences, tx, start, over
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

    def refuse(self, why: str) -> Any:
        return self.sequences.refuse(*self.places, why=why)

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
        writer = self.writer = Writer(self.sequences.trace, self.tx, self.lengths, self._rows())
        if not writer.is_current():
            self.refuse("its lengths have been written to")
        if not writer.fits():
            self.refuse("its parts do not sum to their tensor")
        size = writer.call(torch.ops.fxpasses.part_size.default, self.lengths.tensor)
        self.symbol, self.size = expression(size.sym_num), size.as_proxy().node
        self.batching = Batching(writer, self.symbol, self.size)
        self.sequences.trace.sizes_of_parts[self.symbol] = PartSize(frozenset(self.places), lambda: self._extremes)
        elements = [self._element(value, size) for value in self.over]
        self.sequences.open = self
        self.watched = [found for found in _lists(self.tx) if born(found) >= 0 and not found.items]
        for found in self.watched:
            lists.watch(found)
        self.stand_ins = [size, *(element for element in elements if element is not size)]
        self.first = self.graph._root.prev
        return elements

    @functools.cached_property
    def _extremes(self) -> tuple[Any, Any]:
        """The symbols of the smallest and the largest size of a part."""
        tensor = self.lengths.tensor
        least, most = (tensor.call_method(self.tx, name, [], {}) for name in ("amin", "amax"))
        least, most = (number.call_method(self.tx, "item", [], {}) for number in (least, most))
        return expression(least.sym_num), expression(most.sym_num)

    def _rows(self) -> Any:
        """The variable of T."""
        for value in self.over:
            if type(value) is Parts:
                return value.tensor.call_method(self.tx, "size", [ConstantVariable.create(value.dim)], {})
            if type(value) is Results and value.whole.dims:
                at = ConstantVariable.create(value.whole.dims[0])
                return value.whole.variable.call_method(self.tx, "size", [at], {})
        return self.refuse("it has no tensor of all parts")

    def _element(self, value: Any, size: Any) -> Any:
        if type(value) is Sizes:
            return size
        if type(value) is Parts:
            whole, dims = value.tensor, (value.dim,)
        else:
            whole, dims = value.whole.variable, value.whole.dims
        if not dims:
            element = self.writer.call(torch.ops.fxpasses.element.default, whole)
        elif len(dims) == 1:
            element = self.writer.call(torch.ops.fxpasses.part.default, whole, ConstantVariable.create(dims[0]), size)
        else:
            return self.refuse("it takes pairs of rows")
        self.batching.known[element.as_proxy().node] = Batched(self.writer.local(whole), dims)
        return element

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
        self._check_symbol(output.shape_env)
        body = self._body()
        try:
            for node in body:
                self._visit(node, output.fake_mode)
            for made, items in self.appended.values():
                made.whole = self._value(items)
            for name, (before, after) in sums.items():
                tx.symbolic_locals[name] = self._sum(before, after)
        except Unbatched as refusal:
            self.refuse(str(refusal))
        except (DynamoNames.find().runtime_error, DynamoNames.find().unsupported) as error:
            self.refuse(f"an operator does not take all parts: {error_text(error)}")
        self._erase(body)
        where = in_short(*self.lengths.place[:2])
        what = " (attention)" if self.batching.mixes_rows else ""
        self.sequences.trace.loops.append(f"the loop over parts of the batch at {where} is one computation{what}")

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

    def _sum(self, before: Any, after: Any) -> Any:
        """`before`, and what each part adds to it."""
        node = after.as_proxy().node
        own = before.as_python_constant() if before.is_python_constant() else before.as_proxy().node
        added = [operand for operand in node.args if operand in self.batching.known]
        if operator_of(node).rstrip("_") != "add" or len(node.args) != 2 or node.kwargs or len(added) != 1:
            raise Unbatched("a variable is carried from part to part")
        (other,) = [operand for operand in node.args if operand is not added[0]]
        if type(other) is not type(own) or other != own or node.users or self.batching.known[added[0]].dims:
            raise Unbatched("a variable is carried from part to part")
        total = self.writer.emit(torch.add, self.writer.emit(torch.sum, self.batching.known[added[0]].node, 0), own)
        found, expected = total.meta["example_value"], node.meta["example_value"]
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise Unbatched("a sum has other sizes for all parts")
        return self.writer.variables[total]

    def _check_symbol(self, shape_env: Any) -> None:
        """Nothing may have been assumed of the size of a part."""
        shape_env.deferred_runtime_asserts.pop(self.symbol, None)  # what the batch has answered is guarded
        asserted = [found for every in shape_env.deferred_runtime_asserts.values() for found in every]
        if any(self.symbol in found.expr.free_symbols for found in asserted):
            self.refuse("its parts must have a certain size")
        if shape_env.replace(self.symbol) != self.symbol or self.sequences.trace.sizes.concerns(self.symbol):
            self.refuse("its parts must have a certain size")

    def _body(self) -> list[Node]:
        found, node = [], self.first.next
        while node is not self.graph._root:
            found.append(node)
            node = node.next
        return found

    def _visit(self, node: Node, fake_mode: Any) -> None:
        if any(map(self.batching.depends, node.all_input_nodes)):
            self.batching.visit(node)
        elif node.op != "get_attr" and (reason := impurity(node, fake_mode)) is not None:
            raise Unbatched(reason)  # it runs once, and not for each part

    def _value(self, items: list[Any]) -> Value:
        """What the body has appended to a list, for all parts."""
        if len(items) != 1 or not isinstance(items[0], TensorVariable):
            raise Unbatched("a list gets something else than one tensor for each part")
        node = items[0].as_proxy().node
        found = self.batching.known.get(node)
        if found is None:
            raise Unbatched("a list gets a tensor that is no part's")
        return Value(self.writer.variables[found.node], found.dims)

    def _erase(self, body: list[Node]) -> None:
        """Take out the nodes of one part, which nothing reads any more."""
        trace = self.sequences.trace
        assert trace.graph is not None
        stand_ins = [value.as_proxy().node for value in self.stand_ins]
        trace.graph.erase([*stand_ins, *(node for node in body if self.batching.depends(node))])
        del trace.sizes_of_parts[self.symbol]


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
