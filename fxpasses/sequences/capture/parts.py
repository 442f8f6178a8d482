"""What one part has of the lists that a loop takes: stand-ins for it in Dynamo's graph, of unknown sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, TupleVariable
from torch.fx import Node

from fxpasses.dynamo.attempt import Place
from fxpasses.dynamo.trace import PartSize, Trace
from fxpasses.graph.symbols import expression
from fxpasses.sequences import operators  # noqa: F401 (registers the operators)
from fxpasses.sequences.batched import Batched
from fxpasses.sequences.capture.lists import Elements, Indices, Lengths, Parts, Rows, Sizes, new_list
from fxpasses.sequences.capture.writer import Writer


class OnePart:
    """The stand-ins of one part.

    refuse: has the frame traced again with the loop unrolled. sizes: by the lengths' keys, variables of the part's
    sizes. cuts: the lengths, by their nodes. known: values for all parts, by those for one. numbers: nodes of the
    part's numbers, by their symbols; columns: variables of those of all parts, [n]. indices: symbols of numbers that
    count the parts from 0.
    """

    def __init__(
        self,
        trace: Trace,
        tx: Any,
        writer: Writer,
        lengths: Lengths,
        places: frozenset[Place],
        is_one_by_one: bool,
        refuse: Callable[[str], Any],
    ) -> None:
        self.trace, self.tx, self.writer, self.lengths = trace, tx, writer, lengths
        self.places, self.is_one_by_one, self.refuse = places, is_one_by_one, refuse
        self.sizes: dict[Any, Any] = {}
        self.cuts: dict[Node, Lengths] = {}
        self.known: dict[Node, Batched] = {}
        self.numbers: dict[Any, Node] = {}
        self.columns: dict[Any, Any] = {}
        self.indices: list[Any] = []
        self.stand_ins: list[Any] = []

    def of(self, value: Any) -> Any:
        """What a part has of a list."""
        if isinstance(value, tuple):
            return TupleVariable([self.of(each) for each in value])
        if type(value) is Sizes:
            return self.size(value.lengths)
        if type(value) is Rows:
            row = self.part(value.lengths.tensor, (), value.lengths)
            return new_list([self._number_of_row(value.lengths.tensor, row, at) for at in range(value.columns)])
        if type(value) is Indices:
            number = self.number(value.tensor)
            if value.start == 0:
                self.indices.append(expression(number.sym_num))
            return number
        if type(value) is Elements:
            return self.part(value.tensor, (), value.lengths)
        if type(value) is Parts:
            return self.part(value.tensor, (value.dim,), value.lengths)
        return self.refuse("its list is not complete") if value.item is None else value.item.of_part(self)

    def part(self, whole: Any, dims: tuple[int, ...], lengths: Lengths) -> Any:
        """What a part has of a tensor that lies stacked, or in rows."""
        if not dims:
            element = self.writer.call(torch.ops.fxpasses.element.default, whole)
        elif len(dims) == 1:
            of_dim = ConstantVariable.create(dims[0])
            element = self.writer.call(torch.ops.fxpasses.part.default, whole, of_dim, self.size(lengths))
        else:
            return self.refuse("it takes pairs of rows")
        self.stand_ins.append(element)
        self.known[element.as_proxy().node] = Batched(self.writer.local(whole), dims)
        if self.is_one_by_one and not dims and _is_of_integers(whole):
            self._note_number(element.call_method(self.tx, "item", [], {}), whole)  # operators may take it as a number
        return element

    def ragged(self, whole: Any, lengths: Lengths, sizes: list[Any]) -> Any:
        """What a part has of a tensor that lies flat. sizes: those of the part, numbers and variables of numbers."""
        variables = [ConstantVariable.create(size) if isinstance(size, int) else size for size in sizes]
        element = self.writer.call(torch.ops.fxpasses.ragged.default, whole, lengths.tensor, new_list(variables))
        self.stand_ins.append(element)
        return element

    def number(self, column: Any, is_size: bool = False) -> Any:
        """What a part has of integers, [n]. is_size: whether none is negative."""
        if is_size:
            return self._size(column)
        return self.part(column, (), self.lengths).call_method(self.tx, "item", [], {})

    def _number_of_row(self, rows: Any, row: Any, column: int) -> Any:
        at = [ConstantVariable.create(column)]
        number = row.call_method(self.tx, "select", [ConstantVariable.create(0), *at], {})
        number = number.call_method(self.tx, "item", [], {})
        self._note_number(number, rows.call_method(self.tx, "select", [ConstantVariable.create(1), *at], {}))
        return number

    def size(self, lengths: Lengths) -> Any:
        """The variable of the size of a part."""
        if lengths.key not in self.sizes:
            self.sizes[lengths.key] = size = self._size(lengths.tensor)
            self.cuts[size.as_proxy().node.args[0]] = lengths
        return self.sizes[lengths.key]

    def _size(self, column: Any) -> Any:
        size = self.writer.call(torch.ops.fxpasses.part_size.default, column)
        self.stand_ins.append(size)
        self._note_number(size, column)
        return size

    def _note_number(self, number: Any, of_all: Any) -> None:
        """Have questions about a number of a part answered by the smallest and the largest one."""
        found: list[Any] = []

        def extremes() -> Any:
            if not found:
                smallest, largest = (of_all.call_method(self.tx, name, [], {}) for name in ("amin", "amax"))
                for value in (smallest, largest):
                    found.append(expression(value.call_method(self.tx, "item", [], {}).sym_num))
            return tuple(found)

        of_part = expression(number.sym_num)
        self.numbers[of_part], self.columns[of_part] = number.as_proxy().node, of_all
        part = PartSize(self.places, extremes, by_itself=self.is_one_by_one)
        self.trace.sizes_of_parts[of_part] = part


def _is_of_integers(variable: Any) -> bool:
    example = variable.as_proxy().node.meta["example_value"]
    return example.ndim == 1 and example.dtype in (torch.int32, torch.int64)
