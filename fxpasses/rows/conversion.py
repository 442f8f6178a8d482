"""Conversion between a value with all rows and its packed value.

    x                    [B, H, T, D]      all rows
    select(x)            [1, H, N, D]      the rows `rows`, which are places in B * T
    unpack(packed)       [B, H, T, D]      a row that was not computed is a copy of another

A dimension that holds the heads of all texts, [B * H, T, D], is split before and joined after.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fxpasses.graph.building import NodeBuilder
from fxpasses.rows.layout import Layout
from fxpasses.rows.nodes import shape_of
from fxpasses.rows.spaces import BATCH, CHOICES, GROUPS, ROWS, SORTED, TOKENS, Tags


class Conversion:
    """Converts the values of a layout. x: a value with the dimensions of `node`, unpacked or packed."""

    def __init__(self, layout: Layout) -> None:
        self.tags, self.spaces = layout.tags, layout.spaces

    def select(self, x: Node, node: Node, rows: Node, emit: NodeBuilder) -> Node:
        if ROWS in self.tags[node]:
            return emit("index_select", (x, self.tags[node].index(ROWS), rows))
        x, tags = self._apart(x, node, -1, emit)
        batch, tokens = tags.index(BATCH), tags.index(TOKENS)
        at = tokens - (batch < tokens)
        x = emit("flatten", (emit("movedim", (x, batch, at)), at, at + 1))
        return self._together(emit("unsqueeze", (emit("index_select", (x, at, rows)), batch)), node, emit)

    def unpack(self, x: Node, node: Node, place: Node, sizes: tuple[Any, Any], emit: NodeBuilder) -> Node:
        """A packed value with all rows again. place: each row's place among the packed ones. sizes: B and T."""
        if ROWS in self.tags[node]:
            return emit("index_select", (x, self.tags[node].index(ROWS), place))
        x, tags = self._apart(x, node, 1, emit)
        batch, tokens = tags.index(BATCH), tags.index(TOKENS)
        found = emit("unflatten", (emit("index_select", (x, tokens, place)), tokens, sizes))
        found = emit("squeeze", (found, batch + (batch > tokens)))
        return self._together(emit("movedim", (found, tokens - (batch < tokens), batch)), node, emit)

    def _apart(self, x: Node, node: Node, texts: int, emit: NodeBuilder) -> tuple[Node, Tags]:
        """A value whose dimension of groups, if it has one, is split, and its tags. texts: how many, -1 for all."""
        tags = self.tags[node]
        if GROUPS not in tags:
            return x, tags
        at = tags.index(GROUPS)
        return emit("unflatten", (x, at, (texts, self.groups(node)))), (*tags[:at], BATCH, None, *tags[at + 1 :])

    def _together(self, x: Node, node: Node, emit: NodeBuilder) -> Node:
        tags = self.tags[node]
        return emit("flatten", (x, tags.index(GROUPS), tags.index(GROUPS) + 1)) if GROUPS in tags else x

    def choices(self, node: Node) -> int:
        """How many experts each row has chosen, for a value with all choices."""
        batch, tokens = self.spaces[node].sizes
        at = next(at for at, tag in enumerate(self.tags[node]) if tag in (CHOICES, SORTED))
        return int(shape_of(node)[at] / (batch * tokens))

    def groups(self, node: Node) -> int:
        """How many groups a text has."""
        return int(shape_of(node)[self.tags[node].index(GROUPS)] / self.spaces[node].sizes[0])
