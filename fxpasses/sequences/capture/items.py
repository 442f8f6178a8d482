"""What a loop that runs part by part puts into a list, for all parts: a column for each tensor and number of an item.

    crops = [(image[:, :h, :w], h * w) for image, (h, w) in zip(images, sizes.tolist())]

    Several:  Ragged [sum of 3 * h * w], beside h and w, [n] each
              Numbers [n]

A tensor lies in its column stacked, or concatenated in the dimension whose size differs from part to part; one with
several such dimensions lies flat, beside its sizes. The next loop takes a part of each column, and makes an item of it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch._dynamo.variables import BuiltinVariable, ConstantVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fxpasses.graph.calls import operator_of
from fxpasses.graph.symbols import constant, expression
from fxpasses.sequences.batched import Unbatched
from fxpasses.sequences.capture.all_parts import AllParts
from fxpasses.sequences.capture.lists import Lengths, new_list
from fxpasses.sequences.capture.parts import OnePart
from fxpasses.sequences.capture.writer import Value


@dataclass(frozen=True, eq=False)
class Tensors:
    """A tensor of each part. lengths: those of its rows; of the loop, where it has none."""

    value: Value
    lengths: Lengths

    def of_part(self, part: OnePart) -> Any:
        return part.part(self.value.variable, self.value.dims, self.lengths)


@dataclass(frozen=True, eq=False)
class Numbers:
    """A number of each part. variable: int64 [n]. is_size: whether all are known not to be negative."""

    variable: Any
    is_size: bool = False

    def of_part(self, part: OnePart) -> Any:
        return part.number(self.variable, self.is_size)


@dataclass(frozen=True, eq=False)
class Ragged:
    """A tensor of each part, flat. lengths: of their elements. sizes: each a number, or `Numbers`."""

    value: Value
    lengths: Lengths
    sizes: tuple[Any, ...]

    def of_part(self, part: OnePart) -> Any:
        sizes = [size.of_part(part) if isinstance(size, Numbers) else size for size in self.sizes]
        return part.ragged(self.value.variable, self.lengths, sizes)


@dataclass(frozen=True, eq=False)
class Same:
    """What is the same for each part. variable: Dynamo's."""

    variable: Any

    def of_part(self, part: OnePart) -> Any:
        return self.variable


@dataclass(frozen=True, eq=False)
class Several:
    """A tuple or a list."""

    kind: type
    items: tuple[Any, ...]

    def of_part(self, part: OnePart) -> Any:
        items = [item.of_part(part) for item in self.items]
        return TupleVariable(items) if self.kind is TupleVariable else new_list(items)


_COMPARISONS: dict[Any, Callable[..., Any]] = {
    sympy.Eq: operator.eq, sympy.Ne: operator.ne, sympy.Gt: operator.gt, sympy.Ge: operator.ge,
    sympy.Lt: operator.lt, sympy.Le: operator.le,
}  # fmt: skip


class Columns:
    """The columns of the items of one loop. wanted: the nodes of its body whose values for all parts they are.

    A column is planned while the body can still be written to, and exists once the loop's operator does.
    """

    def __init__(self, parts: AllParts) -> None:
        self.parts, self.body, self.writer = parts, parts.body, parts.writer
        self.cuts, self.columns = parts.part.cuts, parts.part.columns
        self.wanted: dict[Node, None] = {}
        self.constant_steps: dict[Any, int] = {}  # by what is carried

    def plan(self, value: Any) -> Callable[[], Any]:
        """Returns what makes the item of a list, once the operator is written. value: that of one part."""
        value = value.realize()
        if isinstance(value, ConstantVariable):
            return lambda: Same(value)
        if not self.parts.part.is_one_by_one:
            return self._for_all(value)
        if type(value) in (TupleVariable, ListVariable):
            plans = [self.plan(item) for item in value.items]
            return lambda: Several(type(value), tuple(plan() for plan in plans))
        node: Any = value.as_proxy().node if isinstance(value, (SymNodeVariable, TensorVariable)) else None
        if isinstance(value, SymNodeVariable) and isinstance(node.meta.get("example_value"), torch.SymInt):
            return self._number(node) if node in self.body.own else lambda: Same(value)
        if isinstance(value, TensorVariable) and node in self.body.own:
            return self._tensor(value, node)
        raise Unbatched("a list gets something else than the tensors and numbers of a part")

    def step(self, before: Any, after: Any) -> Callable[[], Any]:
        """What each part adds to a number that is carried, [n]. before, after: variables of the number in one part."""
        start = expression(before.sym_num)
        added = expression(after.sym_num) - start
        if start in added.free_symbols or not is_known_not_negative(before, added):
            raise Unbatched("a number that it carries is more than a sum")
        if added.is_Integer:
            self.constant_steps[before] = int(added)
            return lambda: self.parts.same_for_all(int(added))
        found = self._computed(added)
        if found is None:
            raise Unbatched("a number that it carries depends on more than the batch's numbers")
        return found

    def of_functions(self) -> dict[Node, Node]:
        """By the numbers that functions make of the batch's alone, nodes of their columns."""
        return {
            node: self.writer.emit(torch.scalar_tensor, node, dtype=torch.int64)
            for node in [*self.body.own]
            if operator_of(node) == "item" and _is_of_function(node) and self.parts.is_of_numbers(node)
        }

    def condition(self, question: Any, answer: Any) -> Callable[[], None]:
        """What guards that all parts answer a question alike, as those of the batch at hand do."""
        compare = _COMPARISONS.get(type(question))
        found = None if compare is None or answer not in (True, False) else self._computed(question.lhs - question.rhs)
        if found is None:
            raise Unbatched("its parts may answer a question differently")

        def hold() -> None:
            tx, zero = self.parts.tx, ConstantVariable.create(0)
            answers = BuiltinVariable(compare).call_function(tx, [found(), zero], {})
            others = answers.call_method(tx, "logical_not", [], {}) if answer else answers
            number = others.call_method(tx, "sum", [], {}).call_method(tx, "item", [], {})
            if not self.parts.are_equal(number, zero):
                raise Unbatched("its parts may answer a question differently")

        return hold

    def _for_all(self, value: Any) -> Callable[[], Any]:
        """That of a body which is computed for all parts at once."""
        if not isinstance(value, TensorVariable):
            raise Unbatched("a list gets something else than one tensor for each part")
        node = value.as_proxy().node
        if node not in self.body.own:
            raise Unbatched("a list gets a tensor that is no part's")
        return lambda: Tensors(self.parts.value_of(node), self.parts.lengths)

    def _number(self, node: Node) -> Callable[[], Any]:
        value = node.meta["example_value"]
        is_size = statically_known_true(value >= 0)
        found = self._computed(expression(value))
        if found is None:
            column = self._column(self.writer.emit(torch.scalar_tensor, node, dtype=torch.int64))
            found = lambda: self.parts.value_of(column).variable  # noqa: E731
        return lambda: Numbers(found(), is_size)

    def _computed(self, number: Any) -> Callable[[], Any] | None:
        """A number of all parts, as arithmetic on what it is computed from; None if that is not the batch's numbers."""
        symbols = {found: self._of_symbol(found) for found in getattr(number, "free_symbols", ())}
        if not symbols or None in symbols.values() or not all(map(_is_arithmetic, sympy.preorder_traversal(number))):
            return None

        def compute() -> Any:
            known = {symbol: Column(self.parts.tx, column()) for symbol, column in symbols.items()}  # type: ignore[misc]
            return sympy_interp(PythonReferenceAnalysis, known, number).variable

        return compute

    def _of_symbol(self, symbol: Any) -> Callable[[], Any] | None:
        """A number of all parts, from what the program cuts by it, or computes it from."""
        if symbol in self.columns:
            return lambda: self.columns[symbol]
        for node in self.body.own:
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt) and expression(value) == symbol and operator_of(node) == "item":
                if not self.parts.is_of_numbers(node):
                    return None
                column = self._column(self.writer.emit(torch.scalar_tensor, node, dtype=torch.int64))
                return lambda: self.parts.value_of(column).variable
        return self._of_slice(symbol)

    def _of_slice(self, symbol: Any) -> Callable[[], Any] | None:
        """The size of a slice from the beginning: a symbol of its own, as its end may be beyond the tensor's."""
        for node in self.body.own:
            example = node.meta.get("example_value")
            if operator_of(node) != "getitem" or not isinstance(example, torch.Tensor):
                continue
            for dim, (size, end) in enumerate(_slices(node)):
                if end is not None and expression(example.shape[dim]) == symbol:
                    number = self._computed(expression(end.meta["example_value"])) if isinstance(end, Node) else None
                    return None if number is None else functools.partial(self._clipped, number, size)
        return None

    def _clipped(self, number: Callable[[], Any], size: Any) -> Any:
        """The size of `x[:end]` for the ends of all parts, where x has a size."""
        tx, ends, whole = self.parts.tx, number(), self.parts.size(size)
        negative = ends.call_method(tx, "lt", [ConstantVariable.create(0)], {})
        ends = ends.call_method(tx, "add", [whole], {}).call_method(tx, "where", [negative, ends], {})
        ends = ends.call_method(tx, "clamp", [], {"min": ConstantVariable.create(0)})
        return ends.call_method(tx, "clamp", [], {"max": whole})

    def _column(self, node: Node) -> Node:
        self.wanted[node] = None
        return node

    def _tensor(self, variable: Any, node: Node) -> Callable[[], Any]:
        example = node.meta["example_value"]
        dims = [at for at, size in enumerate(example.shape) if self.body.differs(size)]
        if not dims:
            self._column(node)
            return lambda: Tensors(self.parts.value_of(node), self.parts.lengths)
        sizes = {at: variable.call_method(self.parts.tx, "size", [ConstantVariable.create(at)], {}) for at in dims}
        if len(dims) == 1:
            self._column(node)
            cut: Any = self.body.cut(expression(example.shape[dims[0]]))
            if cut is not None:
                return lambda: Tensors(self.parts.value_of(node), self.cuts[cut.args[2].args[0]])
            rows = self._number(sizes[dims[0]].as_proxy().node)
            return lambda: Tensors(*self.parts.cut(self.parts.value_of(node), rows().variable))
        flat = self._column(self.writer.emit("reshape", node, -1))
        numbers = {at: self._number(size.as_proxy().node) for at, size in sizes.items()}
        elements = self._number(variable.call_method(self.parts.tx, "numel", [], {}).as_proxy().node)
        whole = [constant(size) for size in example.shape]
        if any(size is None for at, size in enumerate(whole) if at not in dims):
            raise Unbatched(f"`{node.name}` has a size that differs from batch to batch")
        return lambda: Ragged(
            *self.parts.cut(self.parts.value_of(flat), elements().variable),
            tuple(numbers[at]() if at in numbers else size for at, size in enumerate(whole)),
        )


class Column:
    """Integers of all parts, for arithmetic. variable: Dynamo's, of a tensor [n]."""

    def __init__(self, tx: Any, variable: Any) -> None:
        self.tx, self.variable = tx, variable

    def _of(self, function: Any, *operands: Any) -> Column:
        given = [x.variable if isinstance(x, Column) else ConstantVariable.create(x) for x in operands]
        return Column(self.tx, BuiltinVariable(function).call_function(self.tx, given, {}))

    def __add__(self, other: Any) -> Column:
        return self._of(operator.add, self, other)

    def __mul__(self, other: Any) -> Column:
        return self._of(operator.mul, self, other)

    def __floordiv__(self, other: Any) -> Column:
        return self._of(operator.floordiv, self, other)

    def __mod__(self, other: Any) -> Column:
        return self._of(operator.mod, self, other)

    __radd__, __rmul__ = __add__, __mul__


def _is_arithmetic(number: Any) -> bool:
    return isinstance(number, (sympy.Symbol, sympy.Integer, sympy.Add, sympy.Mul, FloorDiv, Mod, PythonMod))


def is_known_not_negative(like: Any, number: Any) -> bool:
    """like: a variable of a number that is as symbolic."""
    return statically_known_true(like.sym_num.node.shape_env.create_symintnode(number, hint=None) >= 0)


def _is_of_function(node: Node) -> bool:
    source: Any = node.args[0]
    return operator_of(source) == "getitem" and source.args[0].target is torch.ops.fxpasses.part_function.default


def _slices(node: Node) -> list[tuple[Any, Any]]:
    """Of each dimension of `x[..., :end]`: its size in x, and the end; none for an index of another kind."""
    operand, index = cast(Any, node.args)
    example = operand.meta.get("example_value")
    if not isinstance(example, torch.Tensor):
        return []
    sizes = [*example.shape]
    index = list(index) if isinstance(index, (tuple, list)) else [index]
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (len(sizes) - len(index) + 1)
    plain = all(isinstance(one, slice) and one.start in (None, 0) and one.step in (None, 1) for one in index)
    if not plain or len(index) > len(sizes):
        return []
    ends = [one.stop for one in index] + [None] * (len(sizes) - len(index))
    return [*zip(map(expression, sizes), ends, strict=True)]
