"""Which rows of each value are needed, backwards from the exits.

    loss = cross_entropy(logits, target)      logits: the labelled rows
    logits = linear(norm(h3), head)           h3, the last layer's MLP and queries: the labelled rows
    attention(q3, k3, v3)                     k3, v3, and all before: what labelled rows see, and what those see, ...

The lattice is small: the rows that some exits read, and at its top all that these see under all masks, any number of
layers deep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxpasses.graph.calls import argument, operator_of
from fxpasses.rows.layout import ATTENTION, Layout


@dataclass(frozen=True)
class RowSet:
    """The rows that `exits` read; closed: and all that these see."""

    exits: frozenset[Node]
    closed: bool = False


def demands(layout: Layout) -> dict[Node, RowSet]:
    """The set of rows for which each value is needed; values that no exit needs are absent."""
    everything = RowSet(frozenset(layout.exits), closed=True)
    needed: dict[Node, RowSet] = {}

    def need(value: Node, rows: RowSet) -> None:
        known = needed.get(value)
        if known is None or rows.closed:
            needed[value] = rows
        elif not known.closed:
            needed[value] = RowSet(known.exits | rows.exits)
        if value in layout.origins:  # across the border of a checkpoint
            need(layout.origins[value], needed[value])

    for step in reversed(layout.steps):
        node = step.node
        if node in layout.exits:
            need(layout.exits[node].operand, RowSet(frozenset({node})))
            continue
        if node not in needed:
            continue
        if (written := layout.written.get(node)) is not None:  # the same memory, before and after
            need(written, needed[node])
        for operand in node.all_input_nodes:
            if operand in layout.tags:
                is_key = operator_of(node) == ATTENTION and operand is not argument(node, "query")
                need(operand, everything if is_key else needed[node])
    for node in needed.keys() & layout.results:  # what a checkpoint returns may be needed inside for more
        made = node
        while made in layout.results:
            made = layout.origins[made]
        needed[node] = needed[made]
    for node, written in layout.written.items():
        if written in needed:
            needed[node] = needed[written]
    for step in layout.steps:  # the parts of a tuple are made together
        source: Any = step.node.args[0] if operator_of(step.node) == "getitem" else None
        if step.node in needed and source in needed and isinstance(source.meta["example_value"], (tuple, list)):
            needed[step.node] = needed[source]
    return needed
