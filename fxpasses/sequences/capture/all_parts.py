"""The values of all parts, once the body of a loop is known: by operators that run it part by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch._dynamo.variables import ConstantVariable, TupleVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.fx import Node

from fxpasses.dynamo.trace import Definition
from fxpasses.graph.symbols import constant, expression, symbol
from fxpasses.sequences.batched import Batched, Unbatched
from fxpasses.sequences.capture.bodies import Operand, PartBody
from fxpasses.sequences.capture.carried import Carried
from fxpasses.sequences.capture.lists import Lengths
from fxpasses.sequences.capture.parts import OnePart
from fxpasses.sequences.capture.writer import Value, key_of


class AllParts:
    """The values of all parts of one loop. body: what has been written of it so far."""

    def __init__(self, part: OnePart, carried: Carried, body: PartBody) -> None:
        self.part, self.carried, self.body = part, carried, body
        self.trace, self.tx, self.writer, self.lengths = part.trace, part.tx, part.writer, part.lengths

    def is_metadata(self, node: Node) -> bool:
        return self.trace.graph is not None and self.trace.graph.is_metadata(node)

    def is_of_numbers(self, node: Node) -> bool:
        """Whether a node depends on nothing but the batch's numbers."""
        return bool(self._nodes_of(node))

    def _nodes_of(self, node: Node) -> set[Node]:
        return self.body.nodes_of(node, self.part.numbers, self.carried.nodes(), self.is_metadata)

    def run_one_by_one(self, wanted: list[Node], steps: Any, columns: Mapping[Node, Node], fake_mode: Any) -> None:
        """Make the body operators that run it part by part: one for the batch's numbers alone, which is metadata.

        wanted: the nodes of the body whose values for all parts are wanted. steps: as in `Carried.starts`. columns: by
        numbers that functions make of the batch's, nodes of their tensors.
        """
        shape_env, part = fake_mode.shape_env, self.part
        self.body.check(self.trace, fake_mode)
        for compared in self.body.compared(shape_env):
            self._check_not_one(compared)
        self.body.forget_assertions(shape_env, part.numbers)
        self.trace.sizes.forget(self.body.symbols)
        count = self.writer.local(self.lengths.tensor)
        rest: list[Node] = []
        numbers: list[Node] = []
        computing: set[Node] = set()
        is_metadata = self.is_metadata(count)
        columns = columns if is_metadata else {}
        for node in dict.fromkeys([*wanted, *columns.values()]):
            found = self._nodes_of(node) if is_metadata else set()
            (numbers if found else rest).append(node)
            computing |= found
        if numbers:
            of_numbers = Operand(self.body, self.writer, count, part.numbers, {}, is_of_numbers=True)
            self._note(numbers, of_numbers.write(numbers, [node for node in self.body.own if node in computing]))
        starts = self.carried.starts(steps, self.writer)
        starts |= {number: part.known[column].node for number, column in columns.items()}
        if rest or self.body.written or not numbers:
            of_rest = Operand(self.body, self.writer, count, {}, starts)
            self._note(rest, of_rest.write(rest, [*self.body.own]))

    def _note(self, nodes: list[Node], values: list[Value]) -> None:
        for node, value in zip(nodes, values, strict=True):
            self.part.known[node] = Batched(self.writer.local(value.variable), value.dims)

    def _check_not_one(self, number: Any) -> None:
        """Guard that a number is larger than 1 for all parts: operators have taken it for granted."""
        found = self.trace.sizes_of_parts.get(number)
        if found is not None:
            least = found.extremes()[0]
            with self.trace.insisting():
                if self.trace.number(least) is None or self.trace.number(least) <= 1:
                    raise Unbatched("operators take a part of one row in another way")
                self.trace.note(least > 1, sympy.true)

    def value_of(self, node: Node) -> Value:
        """A value of the body, for all parts."""
        found = self.part.known[node]
        return Value(self.writer.variables[found.node], found.dims)

    def cut(self, value: Value, numbers: Any) -> tuple[Value, Lengths]:
        """A value of this loop's, and the lengths of its parts. numbers: a variable of those, which sum to the rows."""
        key = key_of(self.trace, numbers)
        if key is not None:
            total = numbers.call_method(self.tx, "sum", [], {}).call_method(self.tx, "item", [], {})
            rows = symbol(value.variable.as_proxy().node.meta["example_value"].shape[value.dims[0]])
            if rows is not None:
                self.trace.definitions[rows] = Definition(expression(total.sym_num), ())
        return value, Lengths(numbers, object() if key is None else key, self.lengths.place, is_own=True)

    def are_equal(self, one: Any, other: Any) -> bool:
        """Whether two numbers of the batch, variables, are equal, which is guarded; False if one is not known."""
        numbers = [v.as_python_constant() if v.is_python_constant() else v.sym_num for v in (one, other)]
        with self.trace.insisting():
            return all(map(self.trace.can_answer, numbers)) and bool(numbers[0] == numbers[1])

    def same_for_all(self, number: int) -> Any:
        """The variable of a tensor, [n], of a number."""
        count = self.lengths.tensor.call_method(self.tx, "size", [ConstantVariable.create(0)], {})
        given = [TupleVariable([count]), ConstantVariable.create(number)]
        dtype = {"dtype": ConstantVariable.create(torch.int64)}
        return TorchInGraphFunctionVariable(torch.full).call_function(self.tx, given, dtype)

    def size(self, number: Any) -> Any:
        """The variable of a size, an expression, that something outside of the body has."""
        known = constant(number)
        if known is not None:
            return ConstantVariable.create(int(known))
        for node, variable in self.writer.variables.items():
            example = node.meta["example_value"]
            if node not in self.body.own and isinstance(example, torch.Tensor):
                for dim, size in enumerate(example.shape):
                    if expression(size) == number:
                        return variable.call_method(self.tx, "size", [ConstantVariable.create(dim)], {})
        raise Unbatched("it has a size that nothing outside of it has")
