"""Which rows of each value are needed, backwards from the exits.

    loss = cross_entropy(logits, target)      logits: the labelled rows
    logits = linear(norm(h3), head)           h3, the last layer's MLP and queries: the labelled rows
    attention(q3, k3, v3)                     k3, v3, and all before: rows that labelled rows see, that those see, ...

The lattice is small: at the bottom, the rows that some exits read; above them, all rows that these see under all masks,
any number of layers deep; at the top, all rows. If a decoder attends to an encoder, the set of the encoder's rows that
the decoder's rows see is closed in the same way. If a value is needed for all its rows, so are its operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from fxpasses.graph.calls import is_in_place, operator_of
from fxpasses.rows.layout import Layout
from fxpasses.rows.nodes import first_of
from fxpasses.rows.routing import is_inside
from fxpasses.rows.spaces import Space


@dataclass(frozen=True)
class RowSet:
    """The rows of a space that `exits` read. closed: the rows that any exit needs through any attention. all: all."""

    space: Space
    exits: frozenset[Node]
    closed: bool = False
    all: bool = False

    @property
    def whole(self) -> RowSet:
        """The same rows, in the whole space that this space is a part of."""
        return self if self.space.whole is None else replace(self, space=self.space.whole).whole

    def joined(self, other: RowSet) -> RowSet:
        """The least set of the lattice that contains both; they are of one space."""
        if self.all or other.all:
            return every(self.space)
        if self.closed or other.closed:
            return closed(self.space)
        return replace(self, exits=self.exits | other.exits)


def closed(space: Space) -> RowSet:
    return RowSet(space, frozenset(), closed=True)


def every(space: Space) -> RowSet:
    return RowSet(space, frozenset(), all=True)


def demands(layout: Layout) -> dict[Node, RowSet]:
    """The set of rows for which each value is needed; values that no exit needs are absent."""
    found = _Demands(layout)
    while found.changed:
        found.sweep()
    return found.needed


class _Demands:
    def __init__(self, layout: Layout) -> None:
        self.layout, self.changed = layout, True
        self.needed: dict[Node, RowSet] = {}

    def sweep(self) -> None:
        """Go once backwards over all steps. Written memory makes further sweeps necessary."""
        self.changed = False
        for step in reversed(self.layout.steps):
            node = step.node
            if node in self.layout.takes_all:
                for operand in self.layout.takes_all[node].operands:
                    self.need(operand, every(self.layout.spaces[operand]))
            elif node in self.layout.exits:
                operand = self.layout.exits[node].operand
                self.need(operand, RowSet(self.layout.spaces[operand], frozenset({node})))
            elif node in self.layout.given:
                self.need(node, every(self.layout.spaces[node]))
            else:
                self._step(node)
        for node in self.needed.keys() & self.layout.results:  # a checkpoint may need its result for more rows inside
            made = node
            while made in self.layout.results:
                made = self.layout.origins[made]
            self.need(node, self.needed[made])

    def need(self, value: Node, rows: RowSet) -> None:
        known = self.needed.get(value)
        wanted = rows if known is None else known.joined(rows)
        if wanted != known:
            self.needed[value], self.changed = wanted, True
        if value in self.layout.origins:  # across the border of a checkpoint
            self.need(self.layout.origins[value], wanted)

    def _alike(self, *nodes: Node) -> None:
        """Need the nodes for the same rows: they are made together, or are one memory before and after a write."""
        for node in nodes:
            for other in nodes:
                if other in self.needed:
                    self.need(node, self.needed[other])

    def _step(self, node: Node) -> None:
        layout, needed = self.layout, self.needed
        first: Any = first_of(node)
        if node in layout.fills:
            self._alike(node, first, layout.fills[node])
        elif node in layout.scores and is_in_place(operator_of(node)):
            self._alike(node, first)
        elif node in layout.written:
            self._alike(node, layout.written[node])
        elif operator_of(node) == "getitem" and first in layout.tags and _is_tuple(first) and node in needed:
            self._alike(node, first)
        inside = [operand for operand in layout.operands(node) if is_inside(layout.tags[operand])]
        if inside and node in needed:
            self._alike(node, *inside)
        if node not in needed:
            return
        rows = needed[node]
        if rows.all:
            for operand in layout.operands(node):
                self.need(operand, every(layout.spaces[operand]))
            return
        attention, scores = layout.attentions.get(node), layout.scores.get(node)
        keys: tuple[Any, ...] = () if scores is None else (scores.key,)
        if attention is not None:
            keys = (attention.key.node, attention.value.node)
        for operand in layout.operands(node):
            if operand in keys:
                self.need(operand, closed(layout.spaces[operand]))
            elif node in layout.parts:
                self.need(operand, replace(rows, space=layout.spaces[operand]))
            else:
                self.need(operand, rows)


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta["example_value"], (tuple, list))
