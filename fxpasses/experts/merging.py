"""Merge the rows of all experts as the branches merge theirs: one addition in the order of the loop, or one assignment.

`out[tok] += y` and `out[tok] = y` do not sum values at a place that occurs twice: the last value wins. So the places
must be known to differ, for `+=` within each expert, for `=` among all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxpasses.experts.anti_unification import Template
from fxpasses.experts.batched_values import Rows, example_of, same_size
from fxpasses.experts.lifting import Lifting
from fxpasses.experts.loops import Loop
from fxpasses.experts.row_partition import Spans
from fxpasses.experts.selection import Selection, is_mask
from fxpasses.graph.calls import OperatorCall, operator_of
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.symbols import constant, expression


class Merging:
    """The ends of one loop, rebuilt for all rows."""

    def __init__(self, lifting: Lifting, loop: Loop) -> None:
        self._lifting, self._loop, self._emit = lifting, loop, lifting.emit
        self._first = loop.merges[0].node

    def results(self, values: Any) -> list[Node]:
        """One result for each list, or a single one; `values`: what the branches merge. Raises `NotProved`."""
        kind = self._loop.kind
        if kind == "cat":
            return [self._concatenated(value) for value in values]
        if kind in ("setadd", "assign"):
            key, value = values
            spans = _whole_first_dimension(key)
            return [self._by_spans(spans, value) if spans is not None else self._by_key(key, value)]
        return [self._masked(*values) if kind.startswith("masked_add") else self._added(*values)]

    def _concatenated(self, value: Any) -> Node:
        rows, order = self._lifting.lift(value), self._lifting.order
        if not isinstance(rows, Rows) or rows.row != 0 or order is None or order.rest is not None:
            raise NotProved("the experts' rows are not known to cover all rows")
        return rows.node

    def _added(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        loop, call = self._loop, OperatorCall(self._first.target, (self._loop.buffer, *args), kwargs)
        if loop.kind.startswith("index_put"):
            if call.argument("accumulate") is not True:
                raise NotProved("`index_put` without accumulate", self._first)
        elif loop.kind.startswith("scatter_reduce") and not _sums(call):
            raise NotProved("`scatter_reduce` that is no sum", self._first)
        elif call.argument("dim") != 0:
            raise NotProved(f"`{loop.kind}` along another dimension", self._first)
        lifted_args = [self._argument(arg) for arg in args]
        lifted_kwargs = {name: self._argument(arg) for name, arg in kwargs.items()}
        return self._emit(self._first.target, (loop.buffer, *lifted_args), lifted_kwargs, like=self._first)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, (tuple, list)):
            return type(arg)([self._argument(part) for part in arg])
        lifted = self._lifting.lift(arg)
        if isinstance(lifted, Rows):
            if lifted.row != 0:
                raise NotProved("rows in another dimension than the first", self._first)
            floating = lifted.node.meta["example_value"].dtype.is_floating_point
            return self._covered(lifted) if floating else lifted.node
        if lifted is not None and not isinstance(lifted, (int, float, str, Node)):
            raise NotProved("the results are merged in a way that is not known", self._first)
        return lifted

    def _covered(self, rows: Rows) -> Node:
        """The rows, with zeros for rows of no expert."""
        order = self._lifting.order
        assert order is not None
        if order.rest is None:
            return rows.node
        shape = [1] * rows.ndim
        shape[rows.row] = -1
        return self._emit(torch.where, (self._emit("reshape", (order.rest.valid, shape)), rows.node, 0))

    def _masked(self, zeros: Any, mask: Any, value: Any) -> Node:
        """`out + zeros.masked_scatter(mask, value)`, which adds whole rows to the tokens of the mask."""
        buffer, selection = self._loop.buffer, self._lifting.selection
        rows = self._lifting.lift(value)
        if selection is None or not isinstance(mask, Template) or not isinstance(rows, Rows) or buffer is None:
            raise NotProved("`masked_scatter` of what is not known", self._first)
        if isinstance(zeros, Node) and not self._lifting.routing.is_constant(zeros):
            raise NotProved(f"`{zeros.name}`, into which results are scattered, is written to", zeros)
        (places,) = self._lifting.coordinates_of(mask, spread=True)
        examples = [example_of(part) for part in (zeros, value, buffer, rows.node)]
        widths = {constant(example.shape[-1]) if example.ndim == 2 else None for example in examples}
        alike = len({example.dtype for example in examples}) == 1 and same_size(zeros, buffer)
        if not alike or rows.row != 0 or len(widths) != 1 or None in widths:
            raise NotProved("`masked_scatter` of rows into a tensor of another size", self._first)
        if not self._differ_within_expert([places.node], selection):
            raise NotProved("a token may occur twice in one expert", selection.ids)
        target = "index_add" if self._loop.is_functional else "index_add_"
        return self._emit(target, (buffer, 0, places.node, self._covered(rows)))

    def _by_key(self, key: Any, value: Any) -> Node:
        selection, order = self._lifting.selection, self._lifting.order
        if selection is None or order is None:
            raise NotProved("parts are assigned to places that are not known", self._first)
        places: list[Node] = []
        keys = key if isinstance(key, tuple) else (key,)
        while len(keys) > 1 and (keys[-1] is Ellipsis or keys[-1] == slice(None)):
            keys = keys[:-1]
        for part in keys:
            lifted = self._lifting.coordinates_of(part) if is_mask(part) else (self._lifting.lift(part),)
            if not all(isinstance(coordinate, Rows) for coordinate in lifted):
                raise NotProved("a key that is not known", self._first)
            places += [coordinate.node for coordinate in lifted]
        rows = self._lifting.lift(value)
        if not isinstance(rows, Rows) or rows.row != 0:
            raise NotProved("a value that is no row", self._first)
        adds = self._loop.kind == "setadd"
        if adds and not self._differ_within_expert(places, selection):
            raise NotProved("a place may occur twice in one expert", selection.ids)
        if not adds and not self._differ(places, selection):
            raise NotProved("the last expert of a token overwrites the others", self._first)
        buffer = self._loop.buffer.meta["example_value"]  # type: ignore[union-attr]
        node = self._covered(rows) if adds else rows.node
        if node.meta["example_value"].dtype != buffer.dtype:
            if adds:
                raise NotProved("the sum has another dtype than its parts", self._first)
            node = self._emit("to", (node, buffer.dtype))
        if not adds and order.rest is not None:
            raise NotProved("rows of no expert would be overwritten", self._first)
        if adds and len(places) == 1:
            if node.meta["example_value"].shape[1:] != buffer.shape[1:]:
                raise NotProved("a sum with rows of another width, which are broadcast", self._first)
            return self._emit("index_add_", (self._loop.buffer, 0, places[0], node))
        return self._emit("index_put_", (self._loop.buffer, tuple(places), node), {"accumulate": adds})

    def _determined(self, places: list[Node]) -> set[int]:
        """The axes of the ids along which `places` determine a pair's coordinate."""
        return {axis for place in places for axis in self._lifting.axes_of.get(place, ())}

    def _differ(self, places: list[Node], selection: Selection) -> bool:
        """Whether no place occurs twice: each determines all coordinates of a pair, except along axes of size 1."""
        sizes, determined = selection.ids.meta["example_value"].shape, self._determined(places)
        return all(axis in determined or expression(sizes[axis]) == 1 for axis in selection.axes)

    def _differ_within_expert(self, places: list[Node], selection: Selection) -> bool:
        """Whether no place occurs twice in an expert: each determines the pair, or a token whose experts differ."""
        determined, order = self._determined(places), self._lifting.order
        last = len(selection.axes) - 1  # the slots
        if all(axis in determined or (axis == last and selection.distinct) for axis in selection.axes):
            return True
        tokens = (order.places, selection.slots) if order is not None and selection.slots > 1 else None
        return any(operator_of(place) == "floor_divide" and place.args == tokens for place in places)  # pairs // k

    def _by_spans(self, spans: Spans, value: Any) -> Node:
        """`y[start:stop] = value`, which all branches together do to all of y."""
        buffer, cut = self._loop.buffer, self._lifting.cut
        assert buffer is not None
        rows = self._lifting.lift(value)
        if cut is None or (cut.counts, cut.running) != (spans.counts, spans.running) or self._loop.kind != "assign":
            raise NotProved("parts are assigned to places that are not known", self._first)
        self._lifting.check_covered(buffer, checks=False)
        # A value of fewer dimensions would be broadcast, its rows taken for features.
        if not isinstance(rows, Rows) or rows.row != 0 or rows.ndim != buffer.meta["example_value"].ndim:
            raise NotProved("a value that is no row", self._first)
        return self._emit("copy_", (buffer, rows.node))


def _sums(call: OperatorCall) -> bool:
    """Whether `scatter_reduce(buffer, dim, index, src, reduce, include_self)` adds to the buffer."""
    return call.argument("reduce") == "sum" and call.argument("include_self", True) is True


def _whole_first_dimension(key: Any) -> Spans | None:
    """The slices of `y[start:stop] = value`, and of `y[start:stop, :]`."""
    first, *rest = key if isinstance(key, tuple) else (key,)
    return first if isinstance(first, Spans) and all(part == slice(None) for part in rest) else None
