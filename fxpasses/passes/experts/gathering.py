"""Lift what takes rows out of tensors: `x[tok]`, `weights[tok, slot, None]`, `x.index_select(0, tok)`, `x[mask]`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from fxpasses.graph.families import Constants, Family, mapped
from fxpasses.graph.refusals import NotProved
from fxpasses.passes.experts.lifted import Rows, Weights, dimensions_of, is_tensor
from fxpasses.passes.experts.rows import ALONG, POINTWISE, along_last_dimensions, keeps_rows
from fxpasses.passes.experts.rowwise import call

if TYPE_CHECKING:
    from fxpasses.passes.experts.lifting import Lifting

ops = torch.ops.fxpasses


def lift_getitem(lifting: Lifting, family: Family, source: Any) -> Any:
    index = family.args[1]
    if isinstance(source, Rows):
        lifted = mapped(index, lifting.lift)
        if not keeps_rows(lifted, source.row, source.ndim):
            raise NotProved("an index among an expert's rows", family.nodes[0])
        return call(lifting, family, None)
    parts = index if isinstance(index, tuple) else (index,)
    places: list[Any] = []
    for part in parts:
        is_mask = isinstance(part, Family) and getattr(part.example, "dtype", None) is torch.bool
        places += lifting.coordinates_of(part) if is_mask else [lifting.index(part)]
    if not any(isinstance(place, Rows) for place in places):
        raise NotProved("an index that is not known", family.nodes[0])
    return gather(lifting, family, source, places)


def gather(lifting: Lifting, family: Family, source: Any, index: Sequence[Any]) -> Rows:
    """`x[tok]`, `weights[tok, slot, None]`: rows of what all branches share, or of what each makes of it."""
    nodes = tuple(part.node if isinstance(part, Rows) else part for part in index)
    if any(isinstance(node, (Family, Constants, Weights)) for node in nodes):
        raise NotProved("an index that is not known", family.nodes[0])
    if isinstance(source, (Family, Weights)) or isinstance(family.args[0], Family):
        if len(nodes) != 1:
            raise NotProved("an index of what the branch made", family.nodes[0])
        return at_rows(lifting, family.args[0], index[0])
    places = [place for place, part in enumerate(index) if isinstance(part, (Rows, int))]
    if places != list(range(places[0], places[-1] + 1)):
        raise NotProved("index tensors apart from each other", family.nodes[0])
    example = source.meta["example_value"]
    if len(nodes) == 1 and example.ndim == 2 and example.dtype.is_floating_point:
        return Rows(lifting.emit(ops.gather_rows.default, (source, nodes[0])))
    node = lifting.emit(operator.getitem, (source, nodes))
    row = next(place for place, part in enumerate(p for p in dimensions_of(index)) if isinstance(part, Rows))
    return Rows(node, row)


def lift_index_select(lifting: Lifting, family: Family, source: Any) -> Rows:
    dim = family.kwargs.get("dim", family.args[1] if len(family.args) > 1 else None)
    index = lifting.lift(family.kwargs.get("index", family.args[-1]))
    if dim != 0 or not isinstance(index, Rows) or not isinstance(source, Node):
        raise NotProved("an `index_select` that is not known", family.nodes[0])
    return gather(lifting, family, source, (index,))


def at_rows(lifting: Lifting, value: Any, tokens: Rows) -> Rows:
    """What a branch made for every token, for the tokens of the rows alone: row-wise over its first dimension."""
    if isinstance(value, Node):
        return Rows(lifting.emit(operator.getitem, (value, (tokens.node,))))
    if not isinstance(value, Family):
        raise NotProved("a value that is not known for each token")
    name, node = value.name, value.nodes[0]
    if name in ("eq", "__eq__") and any(isinstance(arg, Constants) for arg in value.args):
        source, constants = value.args if isinstance(value.args[1], Constants) else value.args[::-1]
        ids = lifting.index(constants)
        rows = at_rows(lifting, source, tokens)
        shape = (-1, *([1] * (rows.ndim - 1)))
        return Rows(lifting.emit(operator.eq, (rows.node, lifting.emit("reshape", (ids.node, shape)))))
    known = name in POINTWISE or name == "unsqueeze"
    if name in ALONG and isinstance(value.args[0], Family):
        known = along_last_dimensions(value, value.args[0].example.ndim, 0)
    if not known:
        raise NotProved(f"`{name}` is not known to work token by token", node)
    tokens_of = value.example.shape[0]

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Constants):
            raise NotProved("a number that differs between the experts", node)
        if isinstance(leaf, Family) or (isinstance(leaf, Node) and is_tensor(leaf)):
            example = leaf.example if isinstance(leaf, Family) else leaf.meta["example_value"]
            if (example.ndim != value.example.ndim and name in POINTWISE) or example.shape[0] != tokens_of:
                raise NotProved("a broadcast over tokens", node)
            return at_rows(lifting, leaf, tokens).node
        return leaf

    return Rows(lifting.emit_like(value, mapped(value.args, convert), mapped(value.kwargs, convert)))
