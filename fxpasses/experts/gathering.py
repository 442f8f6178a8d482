"""Batching rules of queries, of their results, and of gathered rows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from fxpasses.experts.anti_unification import Constants, Template
from fxpasses.experts.batched_values import (
    Flat,
    Places,
    Rows,
    Weights,
    dimensions_of,
    example_of,
    is_tensor,
    parts_of,
    row_of,
    same_size,
)
from fxpasses.experts.lifting import Lifting
from fxpasses.experts.rowwise_rules import ALONG, is_along_others, is_elementwise, keeps_rows
from fxpasses.experts.selection import is_mask, mask_of
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.symbols import constant

ops = torch.ops.fxpasses


def query(lifting: Lifting, template: Template) -> Any:
    """`torch.where(mask)`, `mask.nonzero()`, `x[mask]` and `masked_select`, which must all select the same pairs."""
    mask, spread = mask_of(template)
    coordinates = lifting.coordinates_of(mask, spread)
    if template.name == "where":
        return coordinates
    if template.name == "nonzero":
        return coordinates if template.call.argument("as_tuple") else Places(coordinates)
    if template.name == "masked_select" and not spread and not same_size(mask, template.args[0]):
        raise NotProved("`masked_select` with a mask of another size", template.nodes[0])
    rows = gather(lifting, template, template.args[0], coordinates)
    return Flat(rows) if spread else rows


def item(lifting: Lifting, template: Template, source: tuple[Any, ...]) -> Any:
    if template.name == "getitem" and isinstance(template.args[1], int):
        return source[template.args[1]]
    raise NotProved(f"`{template.name}` of a tuple", template.nodes[0])


def coordinates(lifting: Lifting, template: Template, source: Places) -> Any:
    """The columns of the result of `nonzero`."""
    name = template.name
    if name == "getitem":
        index = template.args[1]
        if isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and isinstance(index[1], int):
            return source.coordinates[index[1]]
    if name == "unbind" and template.call.argument("dim", 0) in (1, -1):
        return source.coordinates
    if name in ("squeeze", "flatten", "view", "reshape") and len(source.coordinates) == 1:
        if parts_of(template.example)[0].ndim == 1:
            return source.coordinates[0]
    raise NotProved(f"`{name}` of the result of a query", template.nodes[0])


def unflattened(lifting: Lifting, template: Template, flat: Flat) -> Rows:
    """`masked_select(x, mask).view(-1, width)`: rows from their concatenation."""
    sizes, width = template.example.shape, constant(example_of(flat.rows.node).shape[-1])
    if template.name not in ("view", "reshape") or len(sizes) != 2 or width is None or constant(sizes[1]) != width:
        raise NotProved(f"`{template.name}` of rows laid end to end", template.nodes[0])
    return flat.rows


def getitem(lifting: Lifting, template: Template, source: Any) -> Any:
    index = template.args[1]
    if isinstance(source, Rows):
        lifted = map_aggregate(index, lifting.lift)
        if not keeps_rows(lifted, source.row, source.ndim):
            raise NotProved("an index among an expert's rows", template.nodes[0])
        return lifting.apply(template)
    parts = index if isinstance(index, tuple) else (index,)
    places: list[Any] = []
    for part in parts:
        places += lifting.coordinates_of(part) if is_mask(part) else [lifting.index(part)]
    if not any(isinstance(place, Rows) for place in places):
        raise NotProved("an index that is not known", template.nodes[0])
    return gather(lifting, template, source, places)


def gather(lifting: Lifting, template: Template, source: Any, index: Sequence[Any]) -> Rows:
    """`x[tok]`, `weights[tok, slot, None]`: rows of a shared tensor, or of a tensor that each branch computes."""
    nodes = tuple(part.node if isinstance(part, Rows) else part for part in index)
    if any(isinstance(node, (Template, Constants, Weights)) for node in nodes):
        raise NotProved("an index that is not known", template.nodes[0])
    if isinstance(source, (Template, Weights)) or isinstance(template.args[0], Template):
        if len(nodes) != 1:
            raise NotProved("an index of a tensor that the branch computes", template.nodes[0])
        return at_rows(lifting, template.args[0], index[0])
    places = [place for place, part in enumerate(index) if isinstance(part, (Rows, int))]
    if places != list(range(places[0], places[-1] + 1)):
        raise NotProved("index tensors that are not adjacent", template.nodes[0])
    example = source.meta["example_value"]
    if len(nodes) == 1 and example.ndim == 2 and example.dtype.is_floating_point:
        rows = lifting.emit(ops.gather_rows.default, (source, lifting.from_the_first(nodes[0], source)))
        return Rows(lifting.or_ones(rows))
    node = lifting.emit(operator.getitem, (source, nodes))
    row = next(place for place, part in enumerate(p for p in dimensions_of(index)) if isinstance(part, Rows))
    if row != row_of(parts_of(template.example)[0]):
        raise NotProved("an index that is not known", template.nodes[0])
    return Rows(node, row)


def index_select(lifting: Lifting, template: Template, source: Any) -> Rows:
    index = lifting.lift(template.call.argument("index"))
    if template.call.argument("dim") != 0 or not isinstance(index, Rows) or not isinstance(source, Node):
        raise NotProved("an `index_select` that is not known", template.nodes[0])
    return gather(lifting, template, source, (index,))


def at_rows(lifting: Lifting, value: Any, tokens: Rows) -> Rows:
    """A branch's value for every token (row-wise in its first dimension), restricted to the tokens of the rows."""
    if isinstance(value, Node):
        return Rows(lifting.emit(operator.getitem, (value, (tokens.node,))))
    if not isinstance(value, Template):
        raise NotProved("a value that is not known for each token")
    name, node = value.name, value.nodes[0]
    if name == "eq" and any(isinstance(arg, Constants) for arg in value.args):
        source, constants = value.args if isinstance(value.args[1], Constants) else value.args[::-1]
        ids = lifting.index(constants)
        rows = at_rows(lifting, source, tokens)
        shape = (-1, *([1] * (rows.ndim - 1)))
        return Rows(lifting.emit(operator.eq, (rows.node, lifting.emit("reshape", (ids.node, shape)))))
    if (column := _column(lifting, value)) is not None:
        return Rows(lifting.emit(operator.getitem, (column[0], (tokens.node, column[1].node))))
    known = is_elementwise(name) or name == "unsqueeze"
    if name in ALONG and isinstance(value.args[0], Template):
        known = is_along_others(value, value.args[0].example.ndim, 0)
    if not known:
        raise NotProved(f"`{name}` is not known to work token by token", node)
    tokens_of = value.example.shape[0]

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Constants):
            raise NotProved("a number that differs between the experts", node)
        if isinstance(leaf, Template) or (isinstance(leaf, Node) and is_tensor(leaf)):
            example = leaf.example if isinstance(leaf, Template) else leaf.meta["example_value"]
            if (example.ndim != value.example.ndim and is_elementwise(name)) or example.shape[0] != tokens_of:
                raise NotProved("a broadcast over tokens", node)
            return at_rows(lifting, leaf, tokens).node
        return leaf

    return Rows(lifting.emit_like(value, convert))


def _column(lifting: Lifting, value: Template) -> tuple[Node, Rows] | None:
    """(scores, experts) of `scores[:, e]`, a column of a shared matrix [tokens, experts]; `experts`: each row's."""
    source = value.args[0] if value.args else None
    if not isinstance(source, Node) or not is_tensor(source) or source.meta["example_value"].ndim != 2:
        return None
    if value.name == "select":
        dim, column = value.call.argument("dim"), value.call.argument("index")
    elif value.name == "getitem" and isinstance(value.args[1], tuple) and len(value.args[1]) == 2:
        before, column = value.args[1]
        dim = 1 if before in (Ellipsis, slice(None)) else None
    else:
        return None
    return (source, lifting.index(column)) if dim in (1, -1) and isinstance(column, Constants) else None
