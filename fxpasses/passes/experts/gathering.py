"""Batching rules of queries, of what they found, and of rows that are gathered by it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from fxpasses.graph.anti_unification import Constants, Template
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.symbols import constant
from fxpasses.passes.experts.batched_values import (
    Flat,
    Places,
    Rows,
    Weights,
    dimensions_of,
    example_of,
    is_tensor,
    parts_of,
    same_size,
)
from fxpasses.passes.experts.lifting import Lifting
from fxpasses.passes.experts.rowwise_rules import ALONG, is_along_others, is_elementwise, keeps_rows
from fxpasses.passes.experts.selection import asked_by

ops = torch.ops.fxpasses


def query(lifting: Lifting, family: Template) -> Any:
    """`torch.where(mask)`, `mask.nonzero()`, `x[mask]` and `masked_select`; all must select the same pairs."""
    mask, spread = asked_by(family)
    coordinates = lifting.coordinates_of(mask, spread)
    if family.name == "where":
        return coordinates
    if family.name == "nonzero":
        return coordinates if family.call.argument("as_tuple") else Places(coordinates)
    if family.name == "masked_select" and not spread and not same_size(mask, family.args[0]):
        raise NotProved("`masked_select` with a mask of another size", family.nodes[0])
    rows = gather(lifting, family, family.args[0], coordinates)
    return Flat(rows) if spread else rows


def item(lifting: Lifting, family: Template, source: tuple[Any, ...]) -> Any:
    if family.name == "getitem" and isinstance(family.args[1], int):
        return source[family.args[1]]
    raise NotProved(f"`{family.name}` of a tuple", family.nodes[0])


def coordinates(lifting: Lifting, family: Template, source: Places) -> Any:
    """The columns of what `nonzero` gave."""
    name = family.name
    if name == "getitem":
        index = family.args[1]
        if isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and isinstance(index[1], int):
            return source.coordinates[index[1]]
    if name == "unbind" and family.call.argument("dim", 0) in (1, -1):
        return source.coordinates
    if name in ("squeeze", "flatten", "view", "reshape") and len(source.coordinates) == 1:
        if parts_of(family.example)[0].ndim == 1:
            return source.coordinates[0]
    raise NotProved(f"`{name}` of the places that a query found", family.nodes[0])


def unflattened(lifting: Lifting, family: Template, flat: Flat) -> Rows:
    """`masked_select(x, mask).view(-1, width)`: the rows that were laid end to end."""
    sizes, width = family.example.shape, constant(example_of(flat.rows.node).shape[-1])
    if family.name not in ("view", "reshape") or len(sizes) != 2 or width is None or constant(sizes[1]) != width:
        raise NotProved(f"`{family.name}` of rows laid end to end", family.nodes[0])
    return flat.rows


def getitem(lifting: Lifting, family: Template, source: Any) -> Any:
    index = family.args[1]
    if isinstance(source, Rows):
        lifted = map_aggregate(index, lifting.lift)
        if not keeps_rows(lifted, source.row, source.ndim):
            raise NotProved("an index among an expert's rows", family.nodes[0])
        return lifting.apply(family)
    parts = index if isinstance(index, tuple) else (index,)
    places: list[Any] = []
    for part in parts:
        is_mask = isinstance(part, Template) and getattr(part.example, "dtype", None) is torch.bool
        places += lifting.coordinates_of(part) if is_mask else [lifting.index(part)]
    if not any(isinstance(place, Rows) for place in places):
        raise NotProved("an index that is not known", family.nodes[0])
    return gather(lifting, family, source, places)


def gather(lifting: Lifting, family: Template, source: Any, index: Sequence[Any]) -> Rows:
    """`x[tok]`, `weights[tok, slot, None]`: rows of what all branches share, or of what each makes of it."""
    nodes = tuple(part.node if isinstance(part, Rows) else part for part in index)
    if any(isinstance(node, (Template, Constants, Weights)) for node in nodes):
        raise NotProved("an index that is not known", family.nodes[0])
    if isinstance(source, (Template, Weights)) or isinstance(family.args[0], Template):
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


def index_select(lifting: Lifting, family: Template, source: Any) -> Rows:
    index = lifting.lift(family.call.argument("index"))
    if family.call.argument("dim") != 0 or not isinstance(index, Rows) or not isinstance(source, Node):
        raise NotProved("an `index_select` that is not known", family.nodes[0])
    return gather(lifting, family, source, (index,))


def at_rows(lifting: Lifting, value: Any, tokens: Rows) -> Rows:
    """What a branch made for every token, for the tokens of the rows alone: row-wise over its first dimension."""
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
