"""Run the branches' common program once, on the rows of all experts.

The rows of all branches are concatenated in the order of the loop: those of the first expert, then those of the second.
To *lift* a template is to compute its batched value (`batched_values.py`) by its batching rule (`batching_rules.py`).
This module holds what the rules share: the rows' order, their coordinates, and the lifted values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_aggregate

import fxpasses.experts.runtime.grouped_linear  # noqa: F401  registers the operators
from fxpasses.experts.anti_unification import Constants, Template
from fxpasses.experts.batched_values import Order, Places, Rows, Weights, row_of
from fxpasses.experts.routing import Routing
from fxpasses.experts.row_partition import Cut
from fxpasses.experts.runtime import grouped_ways
from fxpasses.experts.selection import Selection, progression, selection_of
from fxpasses.experts.sorting import cut_rows, filled, first_rows, or_ones, read_total, sorted_pairs
from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.calls import operator_of
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.symbols import expression
from fxpasses.graph.traits import is_integer


class Lifting:
    """Lifts templates by batching rules; `emit` creates the nodes.

    skips: the last argument of grouped operators, given if the program skips experts without tokens.
    """

    def __init__(
        self, emit: NodeBuilder, routing: Routing, rule: Callable[[Lifting, Template], Any], skips: bool
    ) -> None:
        self.emit, self.routing, self._rule = emit, routing, rule
        self.skips = (True,) if skips else ()
        self.order: Order | None = None
        self.selection: Selection | None = None
        self.cut: Cut | None = None
        self.axes_of: dict[Node, tuple[int, ...]] = {}  # by coordinate: the axes of the ids that it determines
        self._lifted: dict[int, Any] = {}
        self._read: Node | None = None  # the sum of the counts, if the host reads it
        self._first_rows: dict[Node, Node] = {}
        self._stacks: dict[Weights, Node] = {}
        self.offsets_on_host: Node | None = None  # their copy, if a product needs it

    # Queries

    def begin(self, selection: Selection) -> None:
        """Sort the pairs, before anything is lifted."""
        self.selection, self.order = selection, sorted_pairs(self.emit, selection)

    def begin_cut(self, cut: Cut) -> None:
        """Use rows that are sorted already, before anything is lifted."""
        self.cut = self._whole(cut)
        self.order = cut_rows(self.emit, self.cut)

    def _whole(self, cut: Cut) -> Cut:
        """The cut of only the first rows, if the program cuts only as many rows as the counts sum to; else the same."""
        if not cut.totals:
            return cut
        total = self.total(cut)
        if isinstance(total, int) or total is not self._read:
            rows = self._once((cut.rows, total), operator.getitem, (cut.rows, slice(None, total)))
        elif cut.rows in self._first_rows:
            rows = self._first_rows[cut.rows]
        else:
            rows = self._first_rows[cut.rows] = first_rows(self.emit, cut.rows, total)
        return replace(cut, rows=rows, checks=False, totals=())

    def total(self, cut: Cut) -> int | Node:
        """The sum of the counts: a known number that does not exceed the rows, or else one that the host reads."""
        ids = self.routing.counted(cut.counts, cut.running)
        size = cut.rows.meta["example_value"].shape[0]
        if ids is not None and statically_known_true(ids.meta["example_value"].numel() <= size):
            with self.emit.after(ids):  # the sum that this number replaces may be used before the loop
                return self._pairs_of(ids)
        if self._read is None:
            self._read = read_total(self.emit, cut)
        return self._read

    def _pairs_of(self, ids: Node) -> int | Node:
        """The number of ids."""
        shape = ids.meta["example_value"].shape
        product: int | Node = math.prod(size for size in shape if isinstance(size, int))
        for axis in (axis for axis, size in enumerate(shape) if not isinstance(size, int)):
            size = self._once(("size of ids", ids, axis), torch.ops.aten.sym_size.int, (ids, axis))
            product = size if product == 1 else self._once(("pairs", size, product), operator.mul, (size, product))
        return product

    def parts(self, cut: Cut) -> Rows:
        """The lifted parts of a tensor, which are the tensor. Several tensors may be cut, all at the same places."""
        assert self.cut is not None
        cut = self._whole(cut)
        if (cut.counts, cut.running) != (self.cut.counts, self.cut.running):
            raise NotProved("parts that are cut by different counts", cut.rows)
        self.check_covered(cut.rows, cut.checks)
        if not cut.index:
            return Rows(cut.rows)
        return Rows(self.emit(operator.getitem, (cut.rows, (slice(None), *cut.index))))

    def check_covered(self, rows: Node, checks: bool) -> None:
        """Raise `NotProved` unless the parts cover the tensor. checks: the program raises an error if they do not."""
        assert self.cut is not None
        size, first = (expression(node.meta["example_value"].shape[0]) for node in (rows, self.cut.rows))
        if checks and self.cut.checks and size == first:
            return
        if self._read is not None and size == expression(self._read.meta["example_value"]):
            return
        if size != self.routing.total(self.cut.counts, self.cut.running):
            raise NotProved("the slices are not known to cover the rows", rows)

    def coordinates_of(self, mask: Template, spread: bool = False) -> tuple[Rows, ...]:
        """The coordinates of the rows in a mask that is used as an index; spread: see `mask_fact`."""
        selection = selection_of(self.routing, mask, spread)
        if self.selection is None:
            raise NotProved("a query in a loop over parts", mask.nodes[0])
        asked, sorted_by = ((one.ids, one.axes, one.scores) for one in (selection, self.selection))
        if asked != sorted_by:
            raise NotProved("the loop queries tokens in several orders", mask.nodes[0])
        if (selection.first, selection.step) != (self.selection.first, self.selection.step):
            raise NotProved("a branch queries the tokens of two experts", mask.nodes[0])
        return self._coordinates(selection)

    def _coordinates(self, selection: Selection) -> tuple[Rows, ...]:
        """The coordinates of the pairs along each dimension of the mask."""
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

    def from_the_first(self, places: Node, source: Node) -> Node:
        """Places in `source`, counted from its first row: negative indices, as eager mode allows, become positive."""
        divided = places.args[0] if operator_of(places) in ("floor_divide", "floordiv") else places
        if places in self.axes_of or divided in self.axes_of:
            return places
        size = source.meta["example_value"].shape[0]
        if not isinstance(size, int):
            size = self._once(("rows of", source), torch.ops.aten.sym_size.int, (source, 0))
        is_negative = self.emit(operator.lt, (places, 0))
        return self.emit(torch.where, (is_negative, self.emit(operator.add, (places, size)), places))

    def or_ones(self, rows: Node) -> Node:
        """The rows of tokens, or ones: see `sorting.or_ones`."""
        rest = self.order.rest if self.order is not None else None
        return rows if rest is None else or_ones(self.emit, rest, rows)

    def filled(self, rows: Node) -> Node:
        """The rows of a grouped operator, whose rest is zeros: see `sorting.filled`."""
        rest = self.order.rest if self.order is not None else None
        return rows if rest is None else filled(self.emit, rest, rows)

    def index(self, part: Any) -> Any:
        """A lifted part of an index; the number of the expert becomes each row's expert."""
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
        """The batched value of a template; a shared value is itself. Raises `NotProved`."""
        if not isinstance(value, Template):
            return value
        if id(value) not in self._lifted:
            self._lifted[id(value)] = self._rule(self, value)
        return self._lifted[id(value)]

    def stacked(self, weights: Weights) -> Node:
        if weights.transposed:
            raise NotProved("a transposed bias")
        if weights.stacked is not None:
            return weights.stacked
        if weights not in self._stacks:
            self._stacks[weights] = self.emit(torch.stack, (list(weights.listed),))
        return self._stacks[weights]

    @property
    def covers(self) -> bool:
        """Whether each row is known to belong to an expert."""
        return self.order is not None and self.order.covers

    def offsets(self, product: torch.Tensor, *widths: int | torch.SymInt) -> Node:
        """Where the rows of each expert end, for a product: on the host if it needs them there, in one copy for all.

        product: an example of a branch's result, with the dtype that autocast gives it.
        """
        assert self.order is not None
        offsets = self.order.offsets
        if not grouped_ways.reads_offsets(offsets.meta["example_value"].device, product.device, product.dtype, *widths):
            return offsets
        if self.offsets_on_host is None:
            self.offsets_on_host = self.emit(torch.ops.fxpasses.offsets_on_host.default, (offsets,))
        return self.offsets_on_host

    def emit_like(self, template: Template, convert: Callable[[Any], Any]) -> Node:
        """The branches' operator with each operand converted."""
        args, kwargs = map_aggregate((template.args, template.kwargs), convert)
        return self.emit(template.nodes[0].target, args, kwargs, like=template.nodes[0])

    def apply(self, template: Template) -> Any:
        """The same operator on lifted operands; the rows lie in the same dimension as in the branches' results."""

        def convert(leaf: Any) -> Any:
            lifted = self.lift(leaf)
            if isinstance(lifted, Constants):
                raise NotProved(f"`{template.name}` by a number that differs between the experts", template.nodes[0])
            if isinstance(lifted, (Weights, Places, tuple)):
                raise NotProved(f"`{template.name}` of a tensor of each expert", template.nodes[0])
            return lifted.node if isinstance(lifted, Rows) else lifted

        def rows(node: Node, example: Any) -> Rows:
            row = row_of(example)
            if row is None:
                raise NotProved("a result without rows")
            return Rows(node, row)

        node = self.emit_like(template, convert)
        if isinstance(template.example, (tuple, list)):
            return tuple(rows(self.emit(operator.getitem, (node, i)), part) for i, part in enumerate(template.example))
        return rows(node, template.example)
