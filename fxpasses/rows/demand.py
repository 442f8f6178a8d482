"""Which rows of each value are needed, backwards from the exits.

    loss = cross_entropy(logits, target)      logits: the labelled rows
    logits = linear(norm(h3), head)           h3, the last layer's MLP and queries: the labelled rows
    attention(q3, k3, v3)                     k3, v3, and all before: what labelled rows see, and what those see, ...

The lattice is small: the rows that some exits read, and at its top all that these see under all masks, any number of
layers deep. Where a decoder attends to an encoder, the encoder's rows that the decoder's see are at its top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from fxpasses.graph.calls import is_in_place, operator_of
from fxpasses.rows.layout import Layout
from fxpasses.rows.nodes import first_of
from fxpasses.rows.spaces import Space


@dataclass(frozen=True)
class RowSet:
    """The rows of a space that `exits` read; closed: those that any exit needs through any attention."""

    space: Space
    exits: frozenset[Node]
    closed: bool = False

    @property
    def whole(self) -> RowSet:
        """The same rows, of the whole of which the space is a part."""
        return self if self.space.whole is None else replace(self, space=self.space.whole).whole


def closed(space: Space) -> RowSet:
    return RowSet(space, frozenset(), closed=True)


def demands(layout: Layout) -> dict[Node, RowSet]:
    """The set of rows for which each value is needed; values that no exit needs are absent."""
    needed: dict[Node, RowSet] = {}

    def need(value: Node, rows: RowSet) -> None:
        known = needed.get(value)
        if known is None or rows.closed:
            needed[value] = rows
        elif not known.closed:
            needed[value] = replace(known, exits=known.exits | rows.exits)
        if value in layout.origins:  # across the border of a checkpoint
            need(layout.origins[value], needed[value])

    for step in reversed(layout.steps):
        node = step.node
        if node in layout.exits:
            operand = layout.exits[node].operand
            need(operand, RowSet(layout.spaces[operand], frozenset({node})))
            continue
        memory = layout.fills.get(node)
        if node in layout.scores and is_in_place(operator_of(node)):
            memory = first_of(node)
        if memory in needed:  # what writes is needed where the memory is
            need(node, needed[memory])
        if node not in needed:
            continue
        if (written := layout.written.get(node)) is not None:  # the same memory, before and after
            need(written, needed[node])
        if (attention := layout.attentions.get(node)) is not None:
            keys = (attention.key.node, attention.value.node)
            for operand in attention.reads:
                if operand in layout.tags:
                    need(operand, closed(layout.spaces[operand]) if operand in keys else needed[node])
        elif (scores := layout.scores.get(node)) is not None:
            for operand in node.all_input_nodes:
                if operand in layout.tags:
                    need(operand, closed(layout.spaces[operand]) if operand is scores.key else needed[node])
        elif node in layout.parts:
            need(first_of(node), replace(needed[node], space=layout.spaces[first_of(node)]))
        else:
            for operand in node.all_input_nodes:
                if operand in layout.tags:
                    need(operand, needed[node])
    for node in needed.keys() & layout.results:  # what a checkpoint returns may be needed inside for more
        made = node
        while made in layout.results:
            made = layout.origins[made]
        needed[node] = needed[made]
    for node, written in layout.written.items():
        if written in needed:
            needed[node] = needed[written]
    for node, memory in layout.fills.items():
        if memory in needed:
            needed[node] = needed[first_of(node)] = needed[memory]
    for step in layout.steps:  # the parts of a tuple are made together
        source: Any = step.node.args[0] if operator_of(step.node) == "getitem" else None
        if step.node in needed and source in needed and isinstance(source.meta["example_value"], (tuple, list)):
            needed[step.node] = needed[source]
    return needed
