"""Lift operators that work row by row (`rows.py` knows which): the same operator, once, on the rows of all experts."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from fxpasses.graph.effects import WRITERS
from fxpasses.graph.families import Constants, Family, mapped
from fxpasses.graph.refusals import NotProved
from fxpasses.passes.experts.lifted import Places, Rows, Weights, elements, is_tensor, parts_of, row_of
from fxpasses.passes.experts.rows import POINTWISE

if TYPE_CHECKING:
    from fxpasses.passes.experts.lifting import Lifting

ops = torch.ops.fxpasses
_IN_PLACE = frozenset(name for name in POINTWISE if name.endswith("_") or name in WRITERS)


def lift_pointwise(lifting: Lifting, family: Family) -> Rows:
    node = family.nodes[0]
    out = family.example
    row = row_of(out)
    if row is None:
        raise NotProved(f"`{family.name}` does not give rows", node)
    place = out.ndim - row  # counted from the end

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Constants):
            if family.name in ("eq", "ne") and row == 0:  # asked for the expert: that of each row
                shape = (-1, *([1] * (out.ndim - 1)))
                return lifting.emit("reshape", (lifting.index(leaf).node, shape))
            raise NotProved(f"`{family.name}` by a number that differs between the experts", node)
        lifted = lifting.lift(leaf)
        if isinstance(lifted, Rows):
            if lifted.ndim - lifted.row != place:
                raise NotProved(f"`{family.name}` of rows against other rows", node)
            return lifted.node
        if isinstance(lifted, Weights):
            if len(parts_of(leaf.example)) != 1 or leaf.example.ndim != 1 or (out.ndim, row) != (2, 0):
                raise NotProved(f"`{family.name}` of rows and a tensor of each expert", node)
            assert lifting.order is not None
            return lifting.emit(
                ops.grouped_expand.default, (lifting.stacked(lifted), lifting.order.offsets, lifting.order.rows)
            )
        if isinstance(lifted, Node) and is_tensor(lifted):
            example = lifted.meta["example_value"]
            size = example.shape[example.ndim - place] if example.ndim >= place else 1
            if not isinstance(size, int) or size != 1:
                raise NotProved(f"`{family.name}` of rows and as many other rows", node)
        elif isinstance(lifted, (Node, tuple, Places)):
            raise NotProved(f"`{family.name}` of what is not known", node)
        return lifted

    in_place = family.kwargs.get("inplace") or family.name in _IN_PLACE
    if in_place and lifting.cut is not None:
        raise NotProved(f"`{family.name}` writes to rows that were cut", node)
    return Rows(lifting.emit_like(family, mapped(family.args, convert), mapped(family.kwargs, convert)), row)


def lift_einsum(lifting: Lifting, family: Family) -> Rows:
    """Row-wise where the rows' letter is in the result and in no operand that has no rows."""
    node, row = family.nodes[0], row_of(family.example)
    equation, *operands = family.args
    if row is None or not isinstance(equation, str) or "->" not in equation or "." in equation:
        raise NotProved("an `einsum` that is not known", node)
    inputs, output = equation.replace(" ", "").split("->")
    for letters, operand in zip(inputs.split(","), operands, strict=True):
        lifted = lifting.lift(operand)
        at = letters[lifted.row] if isinstance(lifted, Rows) else None
        if isinstance(lifted, Rows) and (at != output[row] or letters.count(at) != 1):
            raise NotProved("an `einsum` over the rows", node)
        if not isinstance(lifted, Rows) and output[row] in letters:
            raise NotProved("an `einsum` of rows and as many other rows", node)
    return call(lifting, family, row)


def lift_joined(lifting: Lifting, family: Family) -> Rows:
    """`torch.cat([gate, up], -1)`: rows side by side."""
    node, dim = family.nodes[0], family.kwargs.get("dim", family.args[1] if len(family.args) > 1 else 0)
    lifted = [lifting.lift(part) for part in family.args[0]]
    row, ndim = row_of(family.example), family.example.ndim
    if row is None or any(not isinstance(part, Rows) or part.row != row for part in lifted):
        raise NotProved(f"`{family.name}` of what is no row", node)
    if not isinstance(dim, int) or dim % ndim <= row:
        raise NotProved(f"`{family.name}` of rows one after the other", node)
    return Rows(lifting.emit_like(family, [[part.node for part in lifted], dim], {}), row)


def lift_reshaped(lifting: Lifting, family: Family, source: Rows) -> Rows:
    """Reshapes that keep the rows in one dimension, in their order."""
    node, out = family.nodes[0], family.example
    row = row_of(out)
    if row is None:
        raise NotProved(f"`{family.name}` mixes the rows", node)
    before, after = parts_of(family.args[0].example)[0].shape, out.shape
    # What lies before the rows, and what lies after them, must have as many elements as before.
    if family.name in ("reshape", "view", "flatten"):
        if any(not isinstance(s, int) for s in (*before[: source.row], *before[source.row + 1 :])):
            raise NotProved(f"`{family.name}` of rows of unknown width", node)
        if any(not isinstance(s, int) for s in (*after[:row], *after[row + 1 :])):
            raise NotProved(f"`{family.name}` of rows of unknown width", node)
        if elements(before[: source.row]) != elements(after[:row]):
            raise NotProved(f"`{family.name}` mixes the rows", node)
        shape = [-1 if i == row else int(size) for i, size in enumerate(after)]
        return Rows(lifting.emit("reshape", (source.node, shape)), row)
    if family.name == "unsqueeze":
        return call(lifting, family, row)
    sizes = family.args[1] if isinstance(family.args[1], (tuple, list)) else family.args[1:]
    wanted = [size if isinstance(size, int) else None for size in sizes]
    if len(wanted) != source.ndim or wanted[source.row] not in ((-1, None) if family.name == "expand" else (1,)):
        raise NotProved(f"`{family.name}` of rows", node)
    shared = [leaf if isinstance(leaf, (int, Node)) else None for leaf in sizes]
    keep = -1 if family.name == "expand" else 1
    shape = [keep if i == source.row else size for i, size in enumerate(shared)]  # type: ignore[misc]
    if None in shape:
        raise NotProved(f"`{family.name}` to sizes that are not known", node)
    return Rows(lifting.emit(family.name, (source.node, *shape)), source.row)


def call(lifting: Lifting, family: Family, row: int | None) -> Any:
    """The same operator on lifted operands; the rows are where the branches' results have them."""

    def convert(leaf: Any) -> Any:
        lifted = lifting.lift(leaf)
        if isinstance(lifted, Constants):
            raise NotProved(f"`{family.name}` by a number that differs between the experts", family.nodes[0])
        if isinstance(lifted, (Weights, Places, tuple)):
            raise NotProved(f"`{family.name}` of a tensor of each expert", family.nodes[0])
        return lifted.node if isinstance(lifted, Rows) else lifted

    node = lifting.emit_like(family, mapped(family.args, convert), mapped(family.kwargs, convert))
    if isinstance(family.example, (tuple, list)):
        return tuple(
            Rows(lifting.emit(operator.getitem, (node, i)), _checked_row(part)) for i, part in enumerate(family.example)
        )
    return Rows(node, _checked_row(family.example))


def _checked_row(example: Any) -> int:
    row = row_of(example)
    if row is None:
        raise NotProved("a result without rows")
    return row
