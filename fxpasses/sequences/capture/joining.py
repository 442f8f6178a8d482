"""What a program makes of a list with one value for each part: a concatenation, a stack, a padded batch, a sum."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable

from fxpasses.sequences.capture.items import Numbers, Tensors
from fxpasses.sequences.capture.lists import Parts, Results, Sizes
from fxpasses.sequences.capture.loops import Sequences
from fxpasses.sequences.capture.writer import Value, Writer, key_of


def cat(sequences: Sequences, tx: Any, tensors: Any, dim: Any = None) -> Any:
    """The values of all rows, which already lie one after another, or those of all parts."""
    found, writer, value = _whole(sequences, tx, tensors)
    node = writer.local(value.variable)
    at = _dimension(sequences, found, dim, node.meta["example_value"].ndim - (not value.dims))
    if value.dims not in ((), (at,)):
        sequences.refuse(found.lengths.place, why="its values are concatenated in another dimension")
    if not value.dims:
        node = writer.emit(torch.flatten, writer.emit(torch.movedim, node, 0, at), at, at + 1)
    return writer.variables[writer.emit(torch.clone, node, memory_format=torch.contiguous_format)]


def stack(sequences: Sequences, tx: Any, tensors: Any, dim: Any = None) -> Any:
    found, writer, value = _whole(sequences, tx, tensors)
    if value.dims:
        sequences.refuse(found.lengths.place, why="parts of several sizes are stacked")
    node = writer.local(value.variable)
    at = _dimension(sequences, found, dim, node.meta["example_value"].ndim)
    node = writer.emit(torch.movedim, node, 0, at)
    return writer.variables[writer.emit(torch.clone, node, memory_format=torch.contiguous_format)]


def total(sequences: Sequences, tx: Any, results: Any) -> Any:
    """`sum(results)`."""
    column = numbers_of(sequences, results)
    if column is not None:
        return column.call_method(tx, "sum", [], {}).call_method(tx, "item", [], {})
    found, writer, value = _whole(sequences, tx, results)
    if value.dims:
        sequences.refuse(found.lengths.place, why="parts of several sizes are summed")
    return writer.variables[writer.sum_of_parts(writer.local(value.variable))]


def numbers_of(sequences: Sequences, results: Any) -> Any:
    """The variable of the numbers of a list, [n]; None if they are something else."""
    found = results.realize()
    if type(found) is Sizes:
        if key_of(sequences.trace, found.lengths.tensor) != found.lengths.key:
            sequences.refuse(found.lengths.place, why="its lengths have been written to")
        return found.lengths.tensor
    return found.item.variable if type(found) is Results and type(found.item) is Numbers else None


def tensor(sequences: Sequences, tx: Any, data: Any, dtype: Any = None, device: Any = None) -> Any:
    """`torch.tensor(numbers)`."""
    column = numbers_of(sequences, data)
    if column is None:
        sequences.refuse(data.realize().lengths.place, why="it is made a tensor")
    given = {name: value for name, value in (("dtype", dtype), ("device", device)) if value is not None}
    made = column.call_method(tx, "to", [], {"dtype": ConstantVariable.create(torch.int64)} | given)
    return made.call_method(tx, "clone", [], {})


def pad_sequence(
    sequences: Sequences, tx: Any, tensors: Any, batch_first: Any = None, padding_value: Any = None, side: Any = None
) -> Any:
    found, writer, value = _whole(sequences, tx, tensors)
    if value.dims != (0,) or (side is not None and side.as_python_constant() != "right"):
        sequences.refuse(found.lengths.place, why="something else than rows is padded")
    rows, ids, lengths = writer.local(value.variable), writer.ids(), writer.lengths()
    longest = writer.number(writer.emit(torch.amax, lengths))
    ends = writer.emit(torch.cumsum, lengths, 0)
    starts = writer.emit(torch.index_select, writer.emit(torch.sub, ends, lengths), 0, ids)
    device = rows.meta["example_value"].device
    places = writer.emit(torch.sub, writer.emit(torch.arange, writer.rows, device=device), starts)
    sizes = [writer.size(rows, at) for at in range(1, rows.meta["example_value"].ndim)]
    if padding_value is not None and not padding_value.is_python_constant():
        sequences.refuse(found.lengths.place, why="its results are padded with a number that is no constant")
    fill = 0.0 if padding_value is None else padding_value.as_python_constant()
    whole = writer.emit("new_full", rows, [writer.count, longest, *sizes], fill)
    result = writer.emit(torch.index_put, whole, [ids, places], rows)
    if batch_first is None or not batch_first.as_python_constant():
        result = writer.emit(torch.transpose, result, 0, 1)
        result = writer.emit(torch.clone, result, memory_format=torch.contiguous_format)
    return writer.variables[result]


def _dimension(sequences: Sequences, found: Any, given: Any, ndim: int) -> int:
    at = 0 if given is None else given.as_python_constant()
    if type(at) is not int or not -ndim <= at < ndim:
        sequences.refuse(found.lengths.place, why="it is joined in a dimension that it does not have")
    return int(at % ndim)


def _whole(sequences: Sequences, tx: Any, given: Any) -> tuple[Any, Writer, Value]:
    found = given.realize()
    if type(found) is Parts:
        value = Value(found.tensor, (found.dim,))
        if found.gradients != torch.is_grad_enabled():
            sequences.refuse(found.lengths.place, why="its parts were cut with other gradients")
    elif found.item is None:
        sequences.refuse(found.lengths.place, why="what it makes is read before its end")
    elif type(found.item) is not Tensors:
        sequences.refuse(found.lengths.place, why="something else than tensors is joined")
    else:
        value = found.item.value
    at = value.dims[0] if value.dims else 0
    rows = value.variable.call_method(tx, "size", [ConstantVariable.create(at)], {})
    writer = Writer(sequences.trace, tx, found.lengths, rows)
    if not writer.is_current():
        sequences.refuse(found.lengths.place, why="its lengths have been written to")
    if type(found) is Parts and not writer.fits():
        sequences.refuse(found.lengths.place, why="its parts do not sum to their tensor")
    return found, writer, value
