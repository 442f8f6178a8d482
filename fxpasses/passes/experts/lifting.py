"""Run the branches' common program once, on the rows of all experts.

The rows of all branches lie one after the other in the order of the loop: those of the first expert, then the second's.
A *lifted* value is what all branches' values are together. The result of a query is known from the `Selection`; a
row-wise operator is applied to lifted operands (`rowwise.py`); rows are gathered (`gathering.py`); a product with a
weight of each expert becomes a grouped product (`products.py`).
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

import fxpasses.runtime.grouped_linear  # noqa: F401  registers the operators
from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.families import Constants, Family
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.routing import Routing
from fxpasses.graph.routing_facts import is_integer
from fxpasses.graph.symbols import constant, expression
from fxpasses.passes.experts.cuts import Cut, cut_of
from fxpasses.passes.experts.gathering import gather, lift_getitem, lift_index_select
from fxpasses.passes.experts.lifted import (
    Flat,
    Order,
    Places,
    Rows,
    Weights,
    example_of,
    parts_of,
    row_of,
    same_size,
)
from fxpasses.passes.experts.products import lift_product, of_each_expert
from fxpasses.passes.experts.rows import (
    ALONG,
    NORMS,
    POINTWISE,
    along_last_dimensions,
    draws_nothing,
    normalises_last_dimensions,
)
from fxpasses.passes.experts.rowwise import call, lift_einsum, lift_joined, lift_pointwise, lift_reshaped
from fxpasses.passes.experts.selection import Selection, asked_by, is_query, progression, selection_of
from fxpasses.passes.experts.sorting import cut_rows, first_rows, read_total, sorted_pairs


class Lifting:
    """Lifts families into nodes made by `emit(target, args, kwargs)` (a string target is a method)."""

    def __init__(self, emit: NodeBuilder, routing: Routing) -> None:
        self.emit = emit
        self.routing = routing
        self.order: Order | None = None
        self.selection: Selection | None = None
        self.cut: Cut | None = None
        self.axes_of: dict[Node, tuple[int, ...]] = {}  # of the ids, that a coordinate of the rows tells
        self._lifted: dict[int, Any] = {}
        self._read: Node | None = None  # what the counts add up to, where the host reads it
        self._first_rows: dict[Node, Node] = {}
        self._stacks: dict[Weights, Node] = {}

    # Queries

    def begin(self, selection: Selection) -> None:
        """Sort the pairs; before anything is lifted."""
        self.selection, self.order = selection, sorted_pairs(self.emit, selection)

    def begin_cut(self, cut: Cut) -> None:
        """The rows lie sorted already; before anything is lifted."""
        self.cut = self._whole(cut)
        self.order = cut_rows(self.emit, self.cut)

    def _whole(self, cut: Cut) -> Cut:
        """The cut of the first rows alone, where only so many are cut as the counts add up to."""
        if not cut.totals:
            return cut
        total = self.total(cut)
        if isinstance(total, int):
            rows = self._once((cut.rows, total), operator.getitem, (cut.rows, slice(None, total)))
        elif cut.rows in self._first_rows:
            rows = self._first_rows[cut.rows]
        else:
            rows = self._first_rows[cut.rows] = first_rows(self.emit, cut.rows, total)
        return replace(cut, rows=rows, checks=False, totals=())

    def total(self, cut: Cut) -> int | Node:
        """What the counts add up to: a number that is no more than there are rows, or else one that the host reads."""
        total = self.routing.total(cut.counts, cut.running)
        size = cut.rows.meta["example_value"].shape[0]
        if isinstance(total, int) and isinstance(size, int) and total <= size:
            return total
        if self._read is None:
            self._read = read_total(self.emit, cut)
        return self._read

    def parts(self, cut: Cut) -> Rows:
        """Lift the parts of a tensor: they are the tensor. Several may be cut, all at the same places."""
        assert self.cut is not None
        cut = self._whole(cut)
        if (cut.counts, cut.running) != (self.cut.counts, self.cut.running):
            raise NotProved("parts that were cut by different counts", cut.rows)
        self.check_covered(cut.rows, cut.checks)
        if not cut.index:
            return Rows(cut.rows)
        return Rows(self.emit(operator.getitem, (cut.rows, (slice(None), *cut.index))))

    def check_covered(self, rows: Node, checks: bool) -> None:
        """That all parts together are the whole tensor; checks: the program raises an error if they are not."""
        assert self.cut is not None
        size, first = (expression(node.meta["example_value"].shape[0]) for node in (rows, self.cut.rows))
        if checks and self.cut.checks and size == first:
            return
        if self._read is not None and size == expression(self._read.meta["example_value"]):
            return
        if size != self.routing.total(self.cut.counts, self.cut.running):
            raise NotProved("the slices are not known to cover the rows", rows)

    def query(self, family: Family) -> Any:
        """Lift `torch.where(mask)`, `mask.nonzero()`, `x[mask]` and `masked_select`; all must select the same pairs."""
        mask, spread = asked_by(family)
        coordinates = self.coordinates_of(mask, spread)
        if family.name == "where":
            return coordinates
        if family.name == "nonzero":
            as_tuple = family.kwargs.get("as_tuple", family.args[1] if len(family.args) > 1 else False)
            return coordinates if as_tuple else Places(coordinates)
        if family.name == "masked_select":
            source = family.args[0]
            if not spread and not same_size(mask, source):
                raise NotProved("`masked_select` with a mask of another size", family.nodes[0])
            rows = gather(self, family, source, coordinates)
            return Flat(rows) if spread else rows
        return gather(self, family, family.args[0], coordinates)

    def coordinates_of(self, mask: Family, spread: bool = False) -> tuple[Rows, ...]:
        """The coordinates of the rows in a mask that is used as an index; spread: see `selection.read`."""
        selection = selection_of(self.routing, mask, spread)
        if self.selection is None:
            raise NotProved("a query in a loop over parts", mask.nodes[0])
        asked, sorted_by = ((one.ids, one.axes, one.scores) for one in (selection, self.selection))
        if asked != sorted_by:
            raise NotProved("the loop asks for tokens in several orders", mask.nodes[0])
        if (selection.first, selection.step) != (self.selection.first, self.selection.step):
            raise NotProved("a branch asks for the tokens of two experts", mask.nodes[0])
        return self._coordinates(selection)

    def _coordinates(self, selection: Selection) -> tuple[Rows, ...]:
        """Where the pairs lie along each dimension of the mask."""
        assert self.order is not None and self.order.places is not None
        rest, found = self.order.places, []
        shape = selection.ids.meta["example_value"].shape
        for position in reversed(range(len(selection.axes))):
            axes = selection.axes[: position + 1]
            if position == 0 or (selection.flat and position < selection.dims):
                self.axes_of[rest] = axes
                found.append(rest)
                break
            size = shape[axes[-1]]
            if not isinstance(size, int):
                size = self._once(("size", axes[-1]), torch.ops.aten.sym_size.int, (selection.ids, axes[-1]))
            if position < selection.dims:
                within = self._once(("mod", rest, size), operator.mod, (rest, size))
                self.axes_of[within] = axes[-1:]
                found.append(within)
            rest = self._once(("floordiv", rest, size), operator.floordiv, (rest, size))
        return tuple(Rows(node) for node in reversed(found))

    def _once(self, key: Any, target: Any, args: tuple[Any, ...]) -> Node:
        if key not in self._lifted:
            self._lifted[key] = self.emit(target, args)
        return self._lifted[key]

    def index(self, part: Any) -> Any:
        """A part of an index; the number of the expert becomes the expert of each row."""
        if isinstance(part, Constants):
            if self.selection is None or self.order is None or self.order.ids is None:
                raise NotProved("an index by the expert")
            if progression(part) != (self.selection.first, self.selection.step):
                raise NotProved("an index by another number than the expert's")
            return Rows(self.order.ids)
        lifted = self.lift(part)
        if isinstance(lifted, Rows) and (lifted.ndim != 1 or not is_integer(lifted.node)):
            raise NotProved("an index of several dimensions")
        return lifted

    # Everything else

    def lift(self, value: Any) -> Any:
        """The lifted value of a family; what is shared is itself. Raises `NotProved`."""
        if not isinstance(value, Family):
            return value
        if id(value) not in self._lifted:
            self._lifted[id(value)] = self._lift(value)
        return self._lifted[id(value)]

    def _lift(self, family: Family) -> Any:
        if not family.args and not family.kwargs:
            return Weights(None, family.nodes)
        if is_query(family):
            return self.query(family)
        if (cut := cut_of(family)) is not None:
            return self.parts(cut)
        if not self._has_rows(family):
            return of_each_expert(self, family)
        if not family.args:
            raise NotProved(f"`{family.name}` with keyword arguments alone", family.nodes[0])
        name = family.name
        first = self.lift(family.args[0]) if isinstance(family.args[0], Family) else family.args[0]
        if isinstance(first, (Places, tuple)):
            return self._part(family, first)
        if isinstance(first, Flat):
            return _unflattened(family, first)
        if name == "getitem":
            return lift_getitem(self, family, first)
        if name in ("matmul", "mm", "__matmul__", "linear"):
            return lift_product(self, family, first)
        if name in ("index_select",) and not isinstance(first, Rows):
            return lift_index_select(self, family, first)
        if name in POINTWISE:
            return lift_pointwise(self, family)
        if name == "einsum":
            return lift_einsum(self, family)
        if name in ("cat", "concat", "stack"):
            return lift_joined(self, family)
        if not isinstance(first, Rows):
            raise NotProved(f"`{name}` of what is no row", family.nodes[0])
        if name in ALONG and along_last_dimensions(family, first.ndim, first.row):
            return call(self, family, first.row)
        if name in NORMS and normalises_last_dimensions(family, first.ndim, first.row):
            return call(self, family, first.row)
        if draws_nothing(family):
            return call(self, family, first.row)
        if name in ("unsqueeze", "reshape", "view", "flatten", "expand", "repeat"):
            return lift_reshaped(self, family, first)
        raise NotProved(f"`{name}` is not known to work row by row", family.nodes[0])

    def _has_rows(self, family: Family) -> bool:
        """Whether a family's tensors are made of rows: their size is known by the batch alone."""
        return any(row_of(part) is not None for part in parts_of(family.example)) or any(
            isinstance(part, torch.SymInt) for part in parts_of(family.example)
        )

    def _part(self, family: Family, source: Any) -> Any:
        name, node = family.name, family.nodes[0]
        if isinstance(source, tuple):
            if name == "getitem" and isinstance(family.args[1], int):
                return source[family.args[1]]
            raise NotProved(f"`{name}` of a tuple", node)
        if name == "getitem":
            index = family.args[1]
            if isinstance(index, tuple) and len(index) == 2 and index[0] == slice(None) and isinstance(index[1], int):
                return source.coordinates[index[1]]
        if (name == "unbind" and family.args[1:] in ((1,), (-1,))) or (
            name == "unbind" and family.kwargs in ({"dim": 1},)
        ):
            return source.coordinates
        if name in ("squeeze", "flatten", "view", "reshape") and len(source.coordinates) == 1:
            if parts_of(family.example)[0].ndim == 1:
                return source.coordinates[0]
        raise NotProved(f"`{name}` of the places that a query found", node)

    def stacked(self, weights: Weights) -> Node:
        if weights.transposed:
            raise NotProved("a transposed bias")
        if weights.stacked is not None:
            return weights.stacked
        if weights not in self._stacks:
            self._stacks[weights] = self.emit(torch.stack, (list(weights.listed),))
        return self._stacks[weights]

    def emit_like(self, family: Family, args: Any, kwargs: Any) -> Node:
        """The branches' operator with other operands."""
        return self.emit(family.nodes[0].target, tuple(args), dict(kwargs), like=family.nodes[0])


def _unflattened(family: Family, flat: Flat) -> Rows:
    """`masked_select(x, mask).view(-1, width)`: the rows that were laid end to end."""
    sizes, width = family.example.shape, constant(example_of(flat.rows.node).shape[-1])
    if family.name not in ("view", "reshape") or len(sizes) != 2 or width is None or constant(sizes[1]) != width:
        raise NotProved(f"`{family.name}` of rows laid end to end", family.nodes[0])
    return flat.rows
