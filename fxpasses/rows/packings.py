"""The sets of rows of a graph, as nodes before its first row: only the batch determines all of this.

live = target != -100                                        bool [B * T], what an exit reads
rows = fxpasses.live_rows(live)                              int64 [N], by the prologue
seen = fxpasses.live_rows(attended_rows(live, [mask], ...))  and what those see, any number of layers deep
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings

from fxpasses.attention.match import Mask
from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.calls import argument
from fxpasses.rows.attentions import HIDES, RowAttention
from fxpasses.rows.demand import RowSet, closed
from fxpasses.rows.exits import Exit
from fxpasses.rows.layout import Layout
from fxpasses.rows.nodes import refused
from fxpasses.rows.operators import MULTIPLES
from fxpasses.rows.spaces import BATCH, ROWS, TOKENS, Space

ops = torch.ops.fxpasses


@dataclass(frozen=True)
class Packing:
    """A set of rows, as nodes of the main graph.

    slots: int64 [N], rows in order, -1 for padding. rows: the same, 0 for padding. padding: bool [N]. count: N.
    sequences, tokens: int64 [N], b and t of each. place: int64 [B * T], the place of each row among them; for a part,
    which may be empty, with one more element.
    """

    slots: Node
    rows: Node
    padding: Node
    count: Any
    sequences: Node
    tokens: Node
    place: Node


@dataclass(frozen=True)
class Sizes:
    """B, T and B * T of a space, as integers or nodes."""

    batch: Any
    tokens: Any
    rows: Any


class Packings:
    """Makes the needed sets. outside: returns the main graph's node with the value of a body's node."""

    def __init__(
        self, layout: Layout, needed: dict[Node, RowSet], emit: NodeBuilder, outside: Callable[[Node], Node]
    ) -> None:
        self.layout, self.emit, self._outside = layout, emit, outside
        self.attentions = {
            node: found for node, found in layout.attentions.items() if node in needed and not needed[node].all
        }
        self._made: dict[Any, Any] = {}  # by meaning: each is made once
        self._waiting: list[Space] = []  # the spaces whose closed sets are being made

    def packing(self, rows: RowSet, share: float, fake_mode: Any) -> Packing:
        """The packing of a set of a whole space. share: the share of the step's products that is computed for it."""
        emit, live = self.emit, self._live(rows)
        slots = emit(ops.live_rows.default, (live, share, MULTIPLES[device_of(live).type]))
        found = slots.meta["example_value"]
        slots.meta["unbacked_bindings"] = compute_unbacked_bindings(fake_mode.shape_env, found)
        place = emit("clamp", (emit("sub", (emit("cumsum", (live, 0)), 1)),), {"min": 0})
        return self._packing(slots, emit.size(slots, 0), place, self.sizes(rows.space).tokens)

    def part(self, space: Space, packing: Packing) -> Packing:
        """The packing of a part of a space, with the rows of `packing`, a set of the whole around it."""
        emit = self.emit
        assert space.whole is not None
        own, whole = self.sizes(space), self.sizes(space.whole)
        starts = [int(start) for start in space.starts]
        sequences, tokens = emit("sub", (packing.sequences, starts[0])), emit("sub", (packing.tokens, starts[1]))
        slots = emit("add", (emit("mul", (sequences, own.tokens)), tokens))
        slots = emit("masked_fill", (slots, packing.padding, -1))
        place = emit("reshape", (emit("narrow", (packing.place, 0, 0, whole.rows)), whole.batch, whole.tokens))
        for dim, (start, size) in enumerate(zip(starts, (own.batch, own.tokens), strict=True)):
            place = emit("narrow", (place, dim, start, size))
        place = emit(torch.nn.functional.pad, (emit("reshape", (place, -1)), (0, 1)))
        return self._packing(slots, packing.count, place, own.tokens)

    def _packing(self, slots: Node, count: Any, place: Node, tokens: Any) -> Packing:
        rows = self.emit("clamp", (slots,), {"min": 0})
        padding = self.emit(torch.lt, (slots, 0))
        sequence = self.emit(torch.floor_divide, (rows, tokens))
        return Packing(slots, rows, padding, count, sequence, self.emit(torch.remainder, (rows, tokens)), place)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def sizes(self, space: Space) -> Sizes:
        found: Sizes = self._once(space, lambda: self._sizes(space))
        return found

    def _sizes(self, space: Space) -> Sizes:
        emit = self.emit
        if space.whole is None:
            assert space.ids is not None
            ids = self._outside(space.ids)
            if ids.meta["example_value"].dim() == 1:
                return Sizes(1, emit.size(ids, 0), emit.size(ids, 0))
            return Sizes(emit.size(ids, 0), emit.size(ids, 1), emit.size(emit("reshape", (ids, -1)), 0))
        whole = self.sizes(space.whole)
        batch, tokens = (
            computed(emit, operator.add, size, int(own - other))
            for size, own, other in zip((whole.batch, whole.tokens), space.sizes, space.whole.sizes, strict=True)
        )
        return Sizes(batch, tokens, computed(emit, operator.mul, batch, tokens))

    def mask(self, found: RowAttention) -> Node:
        """bool [B or 1, H or 1, Tq, Tk], True where a query sees a key."""
        spaces = [self.layout.spaces[part.node] for part in (found.query, found.key)]
        tokens = [self.sizes(space).tokens for space in spaces]
        key = ("mask", *found.masks, found.is_unpacked, found.is_causal, *spaces)
        made: Node = self._once(key, lambda: self._mask(found, tokens))
        return made

    def _mask(self, found: RowAttention, tokens: list[Any]) -> Node:
        emit = self.emit
        if not found.masks:
            ids = self.layout.spaces[found.key.node].root.ids
            assert ids is not None
            if found.is_causal:
                return emit(ops.earlier_pairs.default, (self._outside(ids), tokens[0]))
            ones = emit(torch.ones, (1, 1, 1, 1), {"dtype": torch.bool, "device": device_of(found.node)})
            return emit("expand", (ones, 1, 1, *tokens))
        visible, *others = (self._visible(mask, not found.is_unpacked, tokens) for mask in found.masks)
        for other in others:
            visible = emit(torch.logical_and, (visible, other))
        return visible

    def _visible(self, mask: Mask, exact: bool, tokens: list[Any]) -> Node:
        """bool [B or 1, H or 1, Tq, Tk], True where `mask`, one of the masks, lets a query see a key.

        exact: as for `visible_pairs`. tokens: Tq and Tk.
        """
        node = self._outside(mask.node)

        def make() -> Node:
            emit, visible = self.emit, node
            if visible.meta["example_value"].dtype is not torch.bool:
                visible = emit(ops.visible_pairs.default, (visible, HIDES, exact))
            elif mask.fill is not None and mask.hides:
                visible = emit("logical_not", (visible,))
            while visible.meta["example_value"].dim() < 4:
                visible = emit("unsqueeze", (visible, 0))
            return emit("expand", (visible, -1, -1, *tokens))

        made: Node = self._once(("visible", node, mask.fill is not None, mask.hides, exact, *tokens), make)
        return made

    def _live(self, rows: RowSet) -> Node:
        """bool [B * T], the rows of a set of a whole space."""
        made: Node = self._once(rows, lambda: self._closed(rows.space) if rows.closed else self._read_by(rows.exits))
        return made

    def _read_by(self, exits: frozenset[Node]) -> Node:
        read = [node for node in self.layout.exits if node in exits]
        return self._any_of(self._lifted(self._read(node), self._space_of(node)) for node in read)

    def _space_of(self, node: Node) -> Space:
        return self.layout.spaces[self.layout.exits[node].operand]

    def _any_of(self, sets: Iterable[Node]) -> Node:
        live, *others = dict.fromkeys(sets)
        for other in others:
            live = self.emit(torch.logical_or, (live, other))
        return live

    def _closed(self, space: Space) -> Node:
        """bool [B * T], the rows of a space that any exit needs through any attention."""
        if space in self._waiting:
            raise refused(next(iter(self.attentions)), "goes round between two texts")
        self._waiting.append(space)
        batch, seeds = self.sizes(space).batch, []
        exits = [node for node in self.layout.exits if self._space_of(node).root is space]
        if exits:
            seeds.append(self._live(RowSet(space, frozenset(exits))))
        own: dict[Node, bool] = {}
        for found in self.attentions.values():
            other, keys = (self.layout.spaces[part.node] for part in (found.query, found.key))
            mask = self.mask(found)
            if other is space and keys is space:
                own[mask] = own.get(mask, True) and found.is_exact
            elif keys is space:
                arguments = (self._live(closed(other)), mask, self.sizes(other).batch, found.is_exact)
                seeds.append(self.emit(ops.rows_attended_from.default, arguments))
        self._waiting.pop()
        live = self._any_of(seeds)
        return self.emit(ops.attended_rows.default, (live, list(own), batch, list(own.values()))) if own else live

    def _lifted(self, live: Node, space: Space) -> Node:
        """The live rows of a part, as rows of the whole."""
        while space.whole is not None:
            own, whole, emit = self.sizes(space), self.sizes(space.whole), self.emit
            live = emit("reshape", (live, own.batch, own.tokens))
            padding: list[Any] = []
            for start, all_of_it, size in zip(space.starts, space.whole.sizes, space.sizes, strict=True):
                padding = [int(start), int(all_of_it - size - start), *padding]  # the last dimension comes first
            live = emit("reshape", (emit(torch.nn.functional.pad, (live, tuple(padding))), whole.rows))
            space = space.whole
        return live

    def _read(self, node: Node) -> Node:
        """bool [B * T], the rows that an exit reads."""
        emit, found = self.emit, self.layout.exits[node]
        space, sizes = self._space_of(node), self.sizes(self._space_of(node))
        if found.kind == "loss":
            return emit(torch.ne, (self._outside(found.by), argument(node, "ignore_index", -100)))
        none = {"dtype": torch.bool, "device": device_of(node)}
        if found.kind == "picked":
            zeros = emit(torch.zeros, (sizes.rows,), none)
            return emit(torch.index_fill, (zeros, 0, self.picked(found.by, space, emit), True))
        if found.by is None:
            return emit(torch.ones, (sizes.rows,), none)
        return self._kept(found, sizes)

    def _kept(self, found: Exit, sizes: Sizes) -> Node:
        """bool [B * T], where the factor of a sum, or of a masked value, is not 0."""
        emit = self.emit
        factor = emit(torch.eq if found.hides else torch.ne, (self._outside(found.by), 0))
        tags = self.layout.tags[found.operand]
        own = factor.meta["example_value"].dim()
        expanded = [{BATCH: sizes.batch, TOKENS: sizes.tokens, ROWS: sizes.rows}.get(tag or "", -1) for tag in tags]
        for place in range(1, len(tags) + 1):  # dimensions of features that the factor lacks
            if expanded[-place] == -1 and place > own:
                expanded[-place] = 1
        whole = emit("expand", (factor, *expanded))
        places = [at for at, tag in enumerate(tags) if tag]
        if places != [*range(len(places))]:
            whole = emit("movedim", (whole, places, [*range(len(places))]))
        return emit("any", (emit("reshape", (whole, sizes.rows, -1)), 1))

    def picked(self, index: Any, space: Space, emit: NodeBuilder) -> Node:
        """The rows of `x[:, 0]`, `x[b, t]` or `x[rows]`, int64."""
        sizes, device = self.sizes(space), {"device": device_of_space(space)}

        def chosen(size: Any, part: Node) -> Node:
            """Indices that may count from the end; one out of range raises an error."""
            return emit(operator.getitem, (emit(torch.arange, (size,), device), self._outside(part)))

        if len(index) == 1 or not isinstance(index[1], (int, Node)):
            return chosen(sizes.rows, index[0])
        first, second, *_ = index
        if isinstance(second, int):
            sequence: Any = emit(torch.arange, (sizes.batch,), device)
            token: Any = second if second >= 0 else computed(emit, operator.add, sizes.tokens, second)
        else:
            sequence, token = chosen(sizes.batch, first), chosen(sizes.tokens, second)
        return emit("add", (emit("mul", (sequence, sizes.tokens)), token))


def device_of(node: Node) -> torch.device:
    example = node.meta["example_value"]
    device: torch.device = (example[0] if isinstance(example, (tuple, list)) else example).device
    return device


def device_of_space(space: Space) -> torch.device:
    ids = space.root.ids
    assert ids is not None
    return device_of(ids)


def computed(emit: NodeBuilder, function: Any, one: Any, other: Any) -> Any:
    """A number computed from two numbers, which may be nodes."""
    if isinstance(one, Node) or isinstance(other, Node):
        return emit(function, (one, other))
    return function(one, other)
