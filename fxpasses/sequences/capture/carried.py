"""Variables that a loop over parts carries from one part to the next, if each part only adds to them.

    total += loss(part)           a sum of tensors, which is added up after the loop
    x[start : start + n]          a number: each part finds the sum of what the parts before it have added
    start += n

Which numbers a body counts with is known when it has been traced. So the frame is traced again, with a stand-in for
what a part finds in them (`Attempt.carried`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._dynamo.variables import BuiltinVariable, ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpasses.dynamo.trace import PartSize, Trace
from fxpasses.experts.capture.liveness import live_at
from fxpasses.graph.calls import operator_of
from fxpasses.graph.symbols import expression
from fxpasses.sequences.batched import Batched, Unbatched
from fxpasses.sequences.capture.parts import OnePart
from fxpasses.sequences.capture.writer import Writer


class Carried:
    """The variables that one loop carries.

    before: the frame's variables before the loop. counters: of numbers, by their names, variables of what a part finds.
    sums: of tensors, their variables before and after one part. counted: of numbers, those after one part. indexing:
    the names of numbers that the body has taken for the number of the part.
    """

    def __init__(self, trace: Trace, tx: Any, refuse: Callable[[str], Any]) -> None:
        self.trace, self.tx, self.refuse = trace, tx, refuse
        self.before = dict(tx.symbolic_locals)
        self.counters: dict[str, Any] = {}
        self.sums: dict[str, tuple[Any, Any]] = {}
        self.counted: dict[str, Any] = {}
        self.indexing: set[str] = set()

    def begin(self, start: int, part: OnePart, writer: Writer) -> None:
        """Put stand-ins in place of the numbers that an earlier attempt has found to be carried.

        start: the loop's place. Another loop over the same list may carry a number that this one does not read.
        """
        live = live_at(self.tx.instructions, start, self.tx.f_globals)
        for place, name in sorted(self.trace.attempt.carried):
            before = self.before.get(name)
            if place in part.places and name in live and before is not None and _is_count(before):
                self.counters[name] = found = writer.call(torch.ops.fxpasses.part_size.default, part.lengths.tensor)
                part.stand_ins.append(found)
                self.tx.symbolic_locals[name] = found
                self.trace.sizes_of_parts[expression(found.sym_num)] = PartSize(part.places, self._extremes, True)

    def _extremes(self) -> Any:
        return self.refuse("its parts may answer a question differently")

    def is_index(self, index: Any, part: OnePart) -> bool:
        """Whether a number is that of the part, from 0, as far as is known before the end of the body."""
        number = expression(index.sym_num)
        counts = {name for name, counter in self.counters.items() if expression(counter.sym_num) == number}
        if number not in part.indices and not any(_is_zero(self.before[name]) for name in counts):
            return False
        self.indexing |= counts
        return True

    def find(self, start: int, carry: Callable[[str], Any]) -> None:
        """Find what the body has carried. start: the loop's place. carry: called for a number without a stand-in.

        No other variable that the next part reads, or the program after the loop, may come from this part.
        """
        tx = self.tx
        live = live_at(tx.instructions, start, tx.f_globals)
        for name in live:
            before, after = self.before.get(name), tx.symbolic_locals.get(name)
            if name in self.counters:
                if not isinstance(after, SymNodeVariable):
                    self.refuse(f"`{name}` is carried from part to part")
                self.counted[name] = after
            elif before is not after and not _same(before, after):
                if before is not None and _is_count(before) and after is not None and _is_integer(after):
                    carry(name)
                if before is None or not isinstance(after, TensorVariable) or not self._only_adds(start, name):
                    self.refuse(f"`{name}` is carried from part to part")
                self.sums[name] = before, after
        for name in [name for name in tx.symbolic_locals if name not in live and name not in self.before]:
            del tx.symbolic_locals[name]  # it may hold a node that goes

    def _only_adds(self, start: int, name: str) -> bool:
        """Whether the body's only use of a variable is one like `total += x`."""
        code = self.tx.instructions
        end = code.index(code[start].target)
        uses = [i.opname for i in code[start:end] if i.argval == name]
        return uses == ["LOAD_FAST", "STORE_FAST"]

    def added(self, own: Mapping[Node, None]) -> list[Node]:
        """The nodes that the body adds to tensors. own: its nodes."""
        return [_added(before, after, own)[0] for before, after in self.sums.values()]

    def finish_sums(self, own: Mapping[Node, None], known: Mapping[Node, Batched], writer: Writer) -> None:
        """Set the sums of tensors to their values after all parts. known: values for all parts."""
        for name, (before, after) in self.sums.items():
            node, start = _added(before, after, own)
            if node not in known or known[node].dims:
                raise Unbatched("a variable is carried from part to part")
            total = writer.emit(torch.add, writer.sum_of_parts(known[node].node), start)
            found, expected = total.meta["example_value"], after.as_proxy().node.meta["example_value"]
            if (found.shape, found.dtype) != (expected.shape, expected.dtype):
                raise Unbatched("a sum has other sizes for all parts")
            self.tx.symbolic_locals[name] = writer.variables[total]

    def nodes(self) -> set[Node]:
        """The stand-ins of numbers."""
        return {value.as_proxy().node for value in self.counters.values()}

    def starts(self, steps: Mapping[str, Callable[[], Any]], writer: Writer) -> dict[Node, Node]:
        """By the stand-ins, what each part finds in a number, [n]; sets the numbers to what the last part leaves.

        steps: by their names, what makes a variable of what each part adds, [n].
        """
        found, add = {}, BuiltinVariable(operator.add)
        for name, counter in self.counters.items():
            step, before = steps[name](), self.before[name]
            ends = step.call_method(self.tx, "cumsum", [ConstantVariable.create(0)], {})
            starts = add.call_function(self.tx, [ends.call_method(self.tx, "sub", [step], {}), before], {})
            total = step.call_method(self.tx, "sum", [], {}).call_method(self.tx, "item", [], {})
            self.tx.symbolic_locals[name] = add.call_function(self.tx, [total, before], {})
            found[counter.as_proxy().node] = writer.local(starts)
        return found


def _added(before: Any, after: Any, own: Mapping[Node, None]) -> tuple[Node, Any]:
    """The node that the body adds to a variable, and the variable's value before."""
    node = after.as_proxy().node
    start = before.as_python_constant() if before.is_python_constant() else before.as_proxy().node
    added = [operand for operand in node.args if operand in own]
    if operator_of(node).rstrip("_") != "add" or len(node.args) != 2 or node.kwargs or len(added) != 1:
        raise Unbatched("a variable is carried from part to part")
    (other,) = [operand for operand in node.args if operand is not added[0]]
    if type(other) is not type(start) or other != start or node.users:
        raise Unbatched("a variable is carried from part to part")
    return added[0], start


def _is_zero(variable: Any) -> bool:
    return isinstance(variable, ConstantVariable) and variable.as_python_constant() == 0


def _is_count(variable: Any) -> bool:
    """Whether a variable is an integer that is not negative."""
    if not _is_integer(variable):
        return False
    number = variable.sym_num if isinstance(variable, SymNodeVariable) else variable.as_python_constant()
    return statically_known_true(number >= 0)


def _is_integer(variable: Any) -> bool:
    if isinstance(variable, SymNodeVariable):
        return isinstance(variable.sym_num, torch.SymInt)
    return isinstance(variable, ConstantVariable) and type(variable.as_python_constant()) is int


def _same(before: Any, after: Any) -> bool:
    if before is None or after is None:
        return False
    if isinstance(before, (TensorVariable, SymNodeVariable)) and type(before) is type(after):
        return before.as_proxy().node is after.as_proxy().node
    if before.is_python_constant() and after.is_python_constant():
        return repr(before.as_python_constant()) == repr(after.as_python_constant())
    return False
