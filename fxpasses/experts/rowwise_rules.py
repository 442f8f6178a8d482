"""Batching rules of row-wise operators, for which one call on all rows equals E calls, each on a part of the rows.

A rule checks the arguments: an operator that reduces or reorders the dimension of the rows is not row-wise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fxpasses.experts.anti_unification import Constants, Template
from fxpasses.experts.batched_values import Places, Rows, Weights, is_tensor, parts_of, row_of
from fxpasses.experts.lifting import Lifting
from fxpasses.graph.aliases import written_operands
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.traits import CASTS, is_pointwise

ops = torch.ops.fxpasses
# Operators along `dim`, with its default; a tuple stands for several dimensions.
ALONG: dict[str, Any] = {
    "all": None, "amax": None, "amin": None, "any": None, "chunk": 0, "cumsum": None, "glu": -1, "log_softmax": None,
    "logsumexp": None, "mean": None, "norm": None, "softmax": None, "split": 0, "squeeze": None, "std": None,
    "sum": None, "tensor_split": 0, "unbind": 0, "unflatten": None, "var": None,
}  # fmt: skip


def is_elementwise(name: str) -> bool:
    return name in CASTS or is_pointwise(name)


def is_along_others(template: Template, ndim: int, row: int) -> bool:
    """Whether an operator of `ALONG` leaves dimension `row` of its first operand, of `ndim` dimensions, unchanged."""
    dims = template.call.argument("dim", ALONG[template.name])
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    return all(isinstance(dim, int) and dim % ndim != row for dim in dims)


def along(lifting: Lifting, template: Template, source: Rows) -> Any:
    if not is_along_others(template, source.ndim, source.row):
        raise _not_row_by_row(template)
    return lifting.apply(template)


def norm(lifting: Lifting, template: Template, source: Rows) -> Any:
    """`layer_norm` and the like, over the last dimensions."""
    shape = template.call.argument("normalized_shape")
    if not isinstance(shape, (tuple, list)) or source.row >= source.ndim - len(shape):
        raise _not_row_by_row(template)
    return lifting.apply(template)


def dropout(lifting: Lifting, template: Template, source: Rows) -> Any:
    """A dropout that returns its operand, as in evaluation: with p = 0, eager mode draws no numbers either."""
    p = template.call.argument("p", 0.5)
    if template.call.argument("training", True) is not False and not (type(p) in (int, float) and p == 0):
        raise _not_row_by_row(template)
    return lifting.apply(template)


def type_as(lifting: Lifting, template: Template, source: Rows) -> Rows:
    """A cast: only the type of the other operand, which may be any tensor, matters."""
    if parts_of(template.args[0].example)[0].device != template.example.device:
        raise _not_row_by_row(template)
    return Rows(lifting.emit("to", (source.node, template.example.dtype)), source.row)


def _not_row_by_row(template: Template) -> NotProved:
    return NotProved(f"`{template.name}` is not known to work row by row", template.nodes[0])


def elementwise(lifting: Lifting, template: Template, source: Any) -> Rows:
    """Operands may be broadcast against each other, but not their rows."""
    node, out = template.nodes[0], template.example
    row = row_of(out)
    if row is None:
        raise NotProved(f"`{template.name}` does not give rows", node)
    place = out.ndim - row  # counted from the end

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Constants):
            if template.name in ("eq", "ne") and row == 0:  # a comparison with the expert: with each row's
                shape = (-1, *([1] * (out.ndim - 1)))
                return lifting.emit("reshape", (lifting.index(leaf).node, shape))
            raise NotProved(f"`{template.name}` by a number that differs between the experts", node)
        lifted = lifting.lift(leaf)
        if isinstance(lifted, Rows):
            if lifted.ndim - lifted.row != place:
                raise NotProved(f"`{template.name}` of rows against other rows", node)
            return lifted.node
        if isinstance(lifted, Weights):
            if len(parts_of(leaf.example)) != 1 or leaf.example.ndim != 1 or (out.ndim, row) != (2, 0):
                raise NotProved(f"`{template.name}` of rows and a tensor of each expert", node)
            assert lifting.order is not None
            stacked = lifting.stacked(lifted)
            offsets = lifting.offsets(stacked.meta["example_value"], leaf.example.shape[0])
            skips = lifting.skips if lifted.stacked is None else ()
            values = lifting.emit(ops.grouped_expand.default, (stacked, offsets, lifting.order.rows, *skips))
            return lifting.filled(values)
        if isinstance(lifted, Node) and is_tensor(lifted):
            example = lifted.meta["example_value"]
            size = example.shape[example.ndim - place] if example.ndim >= place else 1
            if not isinstance(size, int) or size != 1:
                raise NotProved(f"`{template.name}` of rows and as many other rows", node)
        elif isinstance(lifted, (Node, tuple, Places)):
            raise NotProved(f"`{template.name}` of what is not known", node)
        return lifted

    if lifting.cut is not None and written_operands(node):
        raise NotProved(f"`{template.name}` writes to rows that were cut", node)
    return Rows(lifting.emit_like(template, convert), row)


def einsum(lifting: Lifting, template: Template, source: Any) -> Rows:
    """Row-wise if the rows' letter is in the result, and in no operand without rows."""
    node, row = template.nodes[0], row_of(template.example)
    equation, *operands = template.args
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
    return lifting.apply(template)


def joined(lifting: Lifting, template: Template, source: Any) -> Rows:
    """`torch.cat([gate, up], -1)`: a concatenation of features."""
    node, dim = template.nodes[0], template.call.argument("dim", 0)
    lifted = [lifting.lift(part) for part in template.args[0]]
    row, ndim = row_of(template.example), template.example.ndim
    if row is None or any(not isinstance(part, Rows) or part.row != row for part in lifted):
        raise NotProved(f"`{template.name}` of what is no row", node)
    if not isinstance(dim, int) or dim % ndim <= row:
        raise NotProved(f"`{template.name}` along the rows", node)
    return lifting.apply(template)


def unsqueeze(lifting: Lifting, template: Template, source: Rows) -> Any:
    _row_kept(template)
    return lifting.apply(template)


def _row_kept(template: Template) -> int:
    row = row_of(template.example)
    if row is None:
        raise NotProved(f"`{template.name}` mixes the rows", template.nodes[0])
    return row


def reshape(lifting: Lifting, template: Template, source: Rows) -> Rows:
    """The rows stay in one dimension, in their order: the sizes before it keep their product, and those after it."""
    row = _row_kept(template)
    source_example = parts_of(template.args[0].example)[0]
    if source_example.dtype != template.example.dtype:  # `view(dtype)` takes the bits for another number
        raise _not_row_by_row(template)
    before, after = source_example.shape, template.example.shape
    sizes = (*before[: source.row], *before[source.row + 1 :], *after[:row], *after[row + 1 :])
    if any(not isinstance(size, int) for size in sizes):
        raise NotProved(f"`{template.name}` of rows of unknown width", template.nodes[0])
    kept = math.prod(before[: source.row]) == math.prod(after[:row])
    if not kept or math.prod(before[source.row + 1 :]) != math.prod(after[row + 1 :]):
        raise NotProved(f"`{template.name}` mixes the rows", template.nodes[0])
    shape = [-1 if i == row else int(size) for i, size in enumerate(after)]
    return Rows(lifting.emit("reshape", (source.node, shape)), row)


def expand(lifting: Lifting, template: Template, source: Rows) -> Rows:
    _row_kept(template)
    return _repeated(lifting, template, source, template.call.sequence("size"), -1, (-1, None))


def repeat(lifting: Lifting, template: Template, source: Rows) -> Rows:
    _row_kept(template)
    return _repeated(lifting, template, source, template.call.sequence("repeats"), 1, (1,))


def _repeated(
    lifting: Lifting, template: Template, source: Rows, sizes: Sequence[Any], keep: int, allowed: tuple[Any, ...]
) -> Rows:
    """keep: the size that leaves a dimension unchanged. allowed: sizes for the rows; None stands for a computed one."""
    wanted = [size if isinstance(size, int) else None for size in sizes]
    if len(wanted) != source.ndim or wanted[source.row] not in allowed:
        raise NotProved(f"`{template.name}` of rows", template.nodes[0])
    shape = [keep if i == source.row else size for i, size in enumerate(sizes)]
    if any(not isinstance(size, (int, Node)) for size in shape):
        raise NotProved(f"`{template.name}` to sizes that are not known", template.nodes[0])
    return Rows(lifting.emit(template.name, (source.node, *shape)), source.row)


def keeps_rows(index: Any, row: int, ndim: int) -> bool:
    """Whether a basic index (`[..., ::2]`, `[:, None]`) leaves dimension `row` of `ndim` unchanged."""
    index = index if isinstance(index, tuple) else (index,)
    if any(not (part is None or part is Ellipsis or _is_basic(part)) for part in index):
        return False
    parts = [part for part in index if part is not None]
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (ndim - len(parts) + 1)
    return row >= len(parts) or parts[row] == slice(None)


def _is_basic(part: Any) -> bool:
    parts = (part.start, part.stop, part.step) if isinstance(part, slice) else (part,)
    return all(isinstance(p, (int, type(None))) and not isinstance(p, bool) for p in parts)
