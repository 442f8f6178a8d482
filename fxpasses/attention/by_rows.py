"""A large tensor's program, restricted to some of its rows.

    same = document[:, None] == document                same = document[:, None].narrow(-2, start, length) == document
    mask = same & (position[:, None] >= position)       mask = same & (position[:, None].narrow(...) >= position)

The program is traversed from its result to its operands. A small operand, an input, or a view of either is computed as
a whole and cut, which needs no proof. A large one must be elementwise along the rows: pointwise operators, out of place
and in place, views that preserve the axis, factories, triangles, and lookups in a table at indices that are elementwise
themselves. Values are numbered with the version of their memory (`graph/values.py`), so an in-place write is an
operator like any other, and the order of reads and writes is preserved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from fxpasses.graph.calls import OperatorCall, operator_of
from fxpasses.graph.refusals import Refused
from fxpasses.graph.symbols import elements_of, expression
from fxpasses.graph.traits import CASTS, is_pointwise
from fxpasses.graph.values import Entry, Ref, ValueTable
from fxpasses.metadata.emission import slice_of
from fxpasses.report import Reason


@dataclass(frozen=True)
class ByRows:
    """module: takes start, stop and the values of `operands`, and returns the tensor's rows [start, stop)."""

    module: GraphModule
    operands: tuple[Ref, ...]


def by_rows(table: ValueTable, wanted: Ref, axis: int, small: int) -> ByRows:
    """The program of `wanted`, restricted along `axis` (negative); raises `Refused`.

    Operands of at most `small` elements are computed as a whole.
    """
    restriction = _Restriction(table, small)
    restriction.graph.output(restriction.rows(wanted, axis))
    return ByRows(GraphModule({}, restriction.graph, class_name="Rows"), tuple(restriction.operands))


_IN_PLACE = {
    "bitwise_and_": torch.bitwise_and, "bitwise_or_": torch.bitwise_or, "bitwise_xor_": torch.bitwise_xor,
    "logical_and_": torch.logical_and, "logical_not_": torch.logical_not, "logical_or_": torch.logical_or,
    "logical_xor_": torch.logical_xor, "masked_fill_": torch.masked_fill, "tril_": torch.tril, "triu_": torch.triu,
}  # fmt: skip
_OF_ONE = CASTS | {"full_like", "ones_like", "zeros_like"}
_SIZES = {"full": 0, "new_full": 1, "new_ones": 1, "new_zeros": 1, "ones": 0, "zeros": 0}  # the position of the sizes
_ANEW = {"new_full": torch.full, "new_ones": torch.ones, "new_zeros": torch.zeros}
_TRIANGLES = frozenset({"tril", "triu"})


class _Restriction:
    def __init__(self, table: ValueTable, small: int) -> None:
        self.table, self.small = table, small
        self.graph = Graph()
        self.start, self.stop = self.graph.placeholder("start"), self.graph.placeholder("stop")
        self._last_input = self.stop
        with self.graph.inserting_after(self.stop):
            self.length = self.graph.call_function(operator.sub, (self.stop, self.start))
        self.operands: dict[Ref, Node] = {}
        self._made: dict[tuple[Ref, int], Node] = {}

    def rows(self, ref: Ref, axis: int) -> Node:
        """The node for the rows of a value along `axis`."""
        if (ref, axis) not in self._made:
            if self._is_there(ref):
                node = self.graph.call_method("narrow", (self._whole(ref), axis, self.start, self.length))
            else:
                node = self._restricted(ref, axis)
            self._made[ref, axis] = node
        return self._made[ref, axis]

    def _is_there(self, ref: Ref) -> bool:
        """Whether a tensor is small, or a view of a small one or of an input."""
        entry = self.table.entries[ref.number]
        return self._is_small(entry if entry.base is None else self.table.entries[entry.base])

    def _is_small(self, owner: Entry) -> bool:
        if owner.kind in ("root", "look") or not isinstance(owner.fake, torch.Tensor):
            return True
        elements = elements_of(owner.fake)
        return owner.fake.dim() < 2 if elements is None else elements <= self.small

    def _check_whole(self, ref: Ref) -> None:
        """Raise `Refused` for a value that is large or depends on a large one."""
        for number in slice_of(self.table, [ref]):
            entry = self.table.entries[number]
            if entry.base is None and not self._is_small(entry):
                raise Refused(Reason.NOT_BY_ROWS, f"`{entry.node.name}` is needed as a whole", entry.node)

    def _whole(self, ref: Ref) -> Node:
        """A value from outside."""
        if ref not in self.operands:
            self._check_whole(ref)
            with self.graph.inserting_after(self._last_input):
                self._last_input = self.operands[ref] = self.graph.placeholder(f"operand_{len(self.operands)}")
        return self.operands[ref]

    def _restricted(self, ref: Ref, axis: int) -> Node:
        entry = self.table.entries[ref.number]
        if entry.base is not None and entry.kind == "op":
            return self._view(entry, ref.version, axis)
        content = self.table.entries[ref.version] if ref.version is not None else entry
        if content.autocast and any(
            isinstance(self.table.entries[part.number].fake, torch.Tensor)
            and self.table.entries[part.number].fake.dtype.is_floating_point
            for part in content.operands
        ):
            raise _not_by_rows(content)
        name = operator_of(content.node)
        if content.kind == "write":
            return self._written(content, entry, name, axis)
        if content.kind != "op" or content is not entry:
            raise _not_by_rows(content)
        return self._made_by(content, name, content.node.target, axis)

    def _written(self, write: Entry, owner: Entry, name: str, axis: int) -> Node:
        """The contents after a write to a whole tensor. Both must be bools: another dtype would be promoted."""
        fakes = [owner.fake, *(self.table.entries[ref.number].fake for ref in write.operands)]
        dtypes = {fake.dtype for fake in fakes if isinstance(fake, torch.Tensor)}
        if name not in _IN_PLACE or write.target != owner.number or dtypes != {torch.bool}:
            raise _not_by_rows(write)
        return self._made_by(write, name.rstrip("_"), _IN_PLACE[name], axis, owner.fake)

    def _made_by(self, entry: Entry, name: str, target: Any, axis: int, fake: Any = None) -> Node:
        fake = entry.fake if fake is None else fake
        if not isinstance(fake, torch.Tensor) or "out" in entry.kwargs:
            raise _not_by_rows(entry)
        in_place = entry.kind == "write"
        tensors = [ref for ref in entry.operands if isinstance(self.table.entries[ref.number].fake, torch.Tensor)]
        if name in _SIZES and not in_place:
            return self._factory(entry, _SIZES[name], fake, axis)
        if name in _TRIANGLES:
            return self._triangle(entry, target, axis)
        if name == "getitem" and not in_place:
            return self._read(entry, fake, axis)
        pointwise = in_place or is_pointwise(name) or (name in _OF_ONE and len(tensors) == 1)
        if not pointwise or (name == "where" and len(entry.args) != 3):
            raise _not_by_rows(entry)
        return self._call(entry, target, lambda ref: self._aligned(ref, fake, axis, entry))

    def _aligned(self, ref: Ref, fake: torch.Tensor, axis: int, entry: Entry) -> Node:
        """The rows of an operand that is broadcast to `fake`; the whole operand if it has one row for all."""
        operand = self.table.entries[ref.number].fake
        if operand.dim() < -axis or (type(operand.shape[axis]) is int and operand.shape[axis] == 1):
            return self._whole(ref)
        if not _same(operand.shape[axis], fake.shape[axis]):
            raise _not_by_rows(entry)
        return self.rows(ref, axis)

    def _factory(self, entry: Entry, position: int, fake: torch.Tensor, axis: int) -> Node:
        if len(entry.args) <= position:
            raise _not_by_rows(entry)
        sizes, rest = _sizes(entry.args[position:])
        if len(sizes) != fake.dim():
            raise _not_by_rows(entry)
        sizes[axis] = self.length
        target = _ANEW.get(operator_of(entry.node))
        if target is None:
            return self._call(entry, entry.node.target, self._whole, (tuple(sizes), *rest))
        made = self._call(entry, target, self._whole, (tuple(sizes), *rest))  # without `self`, which may be large
        made.kwargs = {**made.kwargs, "dtype": fake.dtype, "device": fake.device}
        return made

    def _triangle(self, entry: Entry, target: Any, axis: int) -> Node:
        """A triangle from row `start` on, whose diagonal is `start` further to the right; for columns, to the left."""
        source = entry.args[0]
        call = OperatorCall(entry.node.target, entry.args, entry.kwargs)
        if axis not in (-1, -2) or not isinstance(source, Ref) or not call.has_only("input", "diagonal"):
            raise _not_by_rows(entry)
        diagonal = call.argument("diagonal", 0)
        diagonal = self._whole(diagonal) if isinstance(diagonal, Ref) else diagonal
        moved = self.graph.call_function(operator.add if axis == -2 else operator.sub, (diagonal, self.start))
        return self._create(target, (self.rows(source, axis), moved), {})

    def _read(self, entry: Entry, fake: torch.Tensor, axis: int) -> Node:
        """The rows of `table[i, j]`, a number for each pair of indices."""
        source, index = entry.args
        indices = index if isinstance(index, tuple) else (index,)
        if not isinstance(source, Ref) or len(indices) != self.table.entries[source.number].fake.dim():
            raise _not_by_rows(entry)
        for part in indices:
            found = self.table.entries[part.number].fake if isinstance(part, Ref) else None
            if not isinstance(found, torch.Tensor) or found.dtype is torch.bool:
                raise _not_by_rows(entry)

        def resolve(ref: Ref) -> Node:
            return self._whole(ref) if ref is source else self._aligned(ref, fake, axis, entry)

        return self._call(entry, entry.node.target, resolve)

    # Views of large tensors

    def _view(self, entry: Entry, version: int | None, axis: int) -> Node:
        name = operator_of(entry.node)
        source = entry.args[0] if entry.args else None
        if not isinstance(source, Ref) or source.version is not None:
            raise _not_by_rows(entry)
        viewed, fake = self.table.entries[source.number].fake, entry.fake
        if not isinstance(viewed, torch.Tensor) or not isinstance(fake, torch.Tensor):
            raise _not_by_rows(entry)
        source = Ref(source.number, version)
        if name == "expand":
            sizes, rest = _sizes(entry.args[1:])
            if rest or entry.kwargs or len(sizes) != fake.dim():
                raise _not_by_rows(entry)
            sizes[axis] = self.length
            operand = self._aligned(source, fake, axis, entry)
            sizes = [self._whole(size) if isinstance(size, Ref) else size for size in sizes]
            return self.graph.call_method("expand", (operand, *sizes))
        args = entry.args[1:]
        if name == "getitem":
            own, index = _picked(args[0], viewed.dim(), fake.dim() + axis)
            args = (index,)
        else:
            call = OperatorCall(entry.node.target, entry.args, entry.kwargs)
            own = _VIEWS[name](call, viewed.dim(), fake.dim() + axis) if name in _VIEWS else None
        if own is None or (name != "getitem" and not _same(viewed.shape[own], fake.shape[axis])):
            raise _not_by_rows(entry)
        rows = self.rows(source, own - viewed.dim())
        args, kwargs = map_aggregate((args, entry.kwargs), self._resolve(self._whole))
        return self._create(entry.node.target, (rows, *args), kwargs)

    def _call(
        self, entry: Entry, target: Any, resolve: Callable[[Ref], Node], args: tuple[Any, ...] | None = None
    ) -> Node:
        def convert(ref: Ref) -> Node:
            is_tensor = isinstance(self.table.entries[ref.number].fake, torch.Tensor)
            return resolve(ref) if is_tensor else self._whole(ref)

        args, kwargs = map_aggregate((entry.args if args is None else args, entry.kwargs), self._resolve(convert))
        return self._create(target, args, kwargs)

    def _create(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        return self.graph.create_node(op, target, args, kwargs)

    def _resolve(self, convert: Callable[[Ref], Node]) -> Callable[[Any], Any]:
        return lambda leaf: convert(leaf) if isinstance(leaf, Ref) else leaf


def _not_by_rows(entry: Entry) -> Refused:
    name = operator_of(entry.node) or entry.node.name
    return Refused(Reason.NOT_BY_ROWS, f"`{name}` is not known to be elementwise in rows", entry.node)


def _same(first: Any, second: Any) -> bool:
    return bool(expression(first) == expression(second))


def _sizes(args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
    """Sizes given as one sequence or one by one, and the arguments after the sequence."""
    if args and isinstance(args[0], (tuple, list)):
        return list(args[0]), tuple(args[1:])
    return list(args), ()


# For each view, the operand's axis that becomes `axis` of the result, both counted from the left.


def _unsqueezed(call: OperatorCall, dimensions: int, axis: int) -> int | None:
    dim = call.argument("dim")
    if type(dim) is not int:
        return None
    dim += (dimensions + 1) * (dim < 0)
    return None if axis == dim else axis - (axis > dim)


def _transposed(call: OperatorCall, dimensions: int, axis: int) -> int | None:
    swapped = call.argument("dim0"), call.argument("dim1")
    if not all(type(dim) is int for dim in swapped):
        return None
    first, second = (dim % dimensions for dim in swapped)
    return {first: second, second: first}.get(axis, axis)


_VIEWS: dict[str, Callable[[OperatorCall, int, int], int | None]] = {
    "transpose": _transposed, "unsqueeze": _unsqueezed,
}  # fmt: skip


def _picked(index: Any, dimensions: int, axis: int) -> tuple[int | None, Any]:
    """The axis (as in the table above) for `x[index]`, and the index that selects all remaining rows."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(not (part is None or part is Ellipsis or type(part) in (int, slice)) for part in parts):
        return None, index
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    place = parts.index(Ellipsis)
    parts[place : place + 1] = [slice(None)] * (dimensions - taken)
    own = result = 0
    for position, part in enumerate(parts):
        if part is None:
            result += 1
            if result > axis:
                return None, index
            continue
        if isinstance(part, slice):
            if result == axis:
                whole = part.start in (None, 0) and part.step in (None, 1)  # otherwise the rows are shifted
                whole = whole and (part.stop is None or (type(part.stop) is int and part.stop > 0))
                parts[position] = slice(None)
                return (own if whole else None), tuple(parts)
            result += 1
        own += 1
    return None, index
