"""Rows that are already sorted, and are cut into one part for each expert: by `split`, or by consecutive slices.

    parts = rows.split(counts.tolist())            rows[start : start + counts[e]], the start running on
                                                   rows[ends[e - 1] : ends[e]]

A split checks that its sizes cover the rows. Slices do not: they may omit rows or be clamped, unless the counts are
known to count as many ids as there are rows (`experts/routing.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxpasses.experts.anti_unification import Constants, Template
from fxpasses.experts.selection import progression
from fxpasses.graph.calls import argument, operator_of
from fxpasses.graph.effects import leaves
from fxpasses.graph.reachability import reached
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.symbols import expression, is_symbolic, symbol


@dataclass(frozen=True)
class Spans(Constants):
    """The branches' slices. The first starts at 0, and each other where the previous one ends.

    values: the slices. counts: an integer tensor [experts]. running: whether it holds the sizes of the parts, rather
    than their ends. nodes: the bounds, and the reads that they depend on.
    """

    counts: Node
    running: bool
    nodes: tuple[Node, ...]

    def reads(self, node: Node) -> bool:
        return _is_bound(node, self.counts)


@dataclass(frozen=True)
class Cut:
    """A tensor cut into parts along its first dimension.

    rows: the tensor. index: the rest of each part's index, such as `(None,)` of `scores[start:stop, None]`. counts,
    running, nodes: see `Spans`. checks: whether the program raises an error where the parts do not cover the rows.
    totals: the sum of the counts if only that many rows are cut, as in `rows[: sum(counts)].split(counts)`.
    """

    rows: Node
    index: tuple[Any, ...]
    counts: Node
    running: bool
    nodes: tuple[Node, ...]
    checks: bool
    totals: tuple[Node, ...] = ()

    def reads(self, node: Node) -> bool:
        """Whether one of the nodes is a bound, or an element of the counts that a bound is read from."""
        return _is_bound(node, self.counts)


def _is_bound(node: Node, counts: Node) -> bool:
    return is_symbolic(node.meta.get("example_value")) or (operator_of(node) == "getitem" and node.args[0] is counts)


def cut_of(template: Any) -> Cut | None:
    """The cut of a template of parts; None if there is none. Raises `NotProved` for parts in another order."""
    if not isinstance(template, Template) or template.name != "getitem" or len(template.args) != 2:
        return None
    source, index = template.args
    index = index if isinstance(index, tuple) else (index,)
    if index and isinstance(index[0], Spans):
        if not isinstance(source, Node):
            raise NotProved("slices of a tensor that each branch computes", template.nodes[0])
        if any(isinstance(leaf, (Node, Template, Constants)) for leaf in leaves(index[1:])):
            raise NotProved("slices with an index that is not known", template.nodes[0])
        spans = index[0]
        return Cut(source, index[1:], spans.counts, spans.running, spans.nodes, checks=False)
    if isinstance(source, Node) and len(index) == 1 and isinstance(index[0], Constants):
        return _split(source, index[0])
    return None


def _split(split: Node, places: Constants) -> Cut | None:
    sizes = argument(split, "split_size")
    if operator_of(split) != "split" or not isinstance(sizes, (list, tuple)):
        return None
    rows = split.args[0]
    if argument(split, "dim", 0) != 0 or not isinstance(rows, Node):
        raise NotProved("a split along another dimension", split)
    if progression(places) != (0, 1) or len(sizes) != len(places.values):
        raise NotProved("not all parts of a split, or in another order", split)
    reads = [_element(size) for size in sizes]
    counts = _all_of([read[:2] for read in reads], split)
    nodes = (split, *(node for read in reads for node in read[2]))
    bound = _bound_of_prefix(rows)
    if bound is None or _value(bound) != sum(_value(size) for size in sizes):
        return Cut(rows, (), counts, True, nodes, checks=True)
    nodes = tuple(dict.fromkeys((*nodes, rows, *_made_of([bound]))))
    return Cut(rows.args[0], (), counts, True, nodes, True, (bound,))  # type: ignore[arg-type]


def _bound_of_prefix(rows: Node) -> Node | None:
    """`n` of `rows[:n]`."""
    key = rows.args[1] if operator_of(rows) == "getitem" else None
    if not isinstance(key, slice) or key.start not in (None, 0) or key.step is not None:
        return None
    return key.stop if isinstance(key.stop, Node) and isinstance(rows.args[0], Node) else None


def spans_of(slices: Sequence[slice]) -> Spans | None:
    """The branches' slices together; None if no bound is read from a tensor. Raises `NotProved`."""
    bounds = [bound for part in slices for bound in (part.start, part.stop) if isinstance(bound, Node)]
    if not bounds:
        return None
    nodes = _made_of(bounds)
    reads = [_element(node) for node in nodes if operator_of(node) == "item"]
    elements = {place: symbol(node.meta["example_value"]) for _, place, (node, *_) in reads}
    by_place = sorted(reads, key=lambda read: read[1])
    if len(reads) != len(slices) or None in elements.values() or len(set(elements.values())) != len(slices):
        raise NotProved("slices whose bounds do not depend on one element for each expert", bounds[0])
    counts = _all_of([read[:2] for read in by_place], bounds[0])
    starts = [_value(part.start) for part in slices]
    stops = [_value(part.stop) for part in slices]
    if any(part.step is not None for part in slices) or starts != [0, *stops[:-1]]:
        raise NotProved("slices that do not follow one another", bounds[0])
    in_order = [elements[place] for place in range(len(slices))]
    running = stops == list(itertools.accumulate(in_order))
    if not running and stops != in_order:
        raise NotProved("slices whose bounds are not the running sums of the counts", bounds[0])
    reading = tuple(node for read in reads for node in read[2])
    return Spans(tuple(slices), counts, running, tuple(dict.fromkeys((*reading, *nodes))))


def _made_of(bounds: Sequence[Node]) -> list[Node]:
    """The bounds, and all their summands, down to the reads."""

    def summands(node: Node) -> list[Node]:
        if operator_of(node) in ("add", "sym_sum") and is_symbolic(node.meta.get("example_value")):
            return node.all_input_nodes
        if operator_of(node) != "item":
            raise NotProved(f"`{node.name}` as the bound of a slice is not known", node)
        return []

    return list(reached(bounds, summands))


def _value(bound: Any) -> Any:
    if bound is None:
        return 0
    return expression(bound.meta["example_value"]) if isinstance(bound, Node) else bound


def _all_of(reads: Sequence[tuple[Node, int]], at: Node) -> Node:
    """The tensor whose elements, all of them and in order, are the reads."""
    counts = reads[0][0]
    if any(read != (counts, place) for place, read in enumerate(reads)):
        raise NotProved("sizes of parts that are not the elements of one tensor, in order", at)
    if expression(counts.meta["example_value"].shape[0]) != len(reads):
        raise NotProved("some of the counts alone", at)
    return counts


def _element(size: Any) -> tuple[Node, int, tuple[Node, ...]]:
    """(counts, e, nodes) of `counts[e].item()`."""
    inner = size.args[0] if isinstance(size, Node) and operator_of(size) == "item" else None
    if isinstance(inner, Node) and operator_of(inner) == "getitem":
        source, place = inner.args
        if isinstance(source, Node) and isinstance(place, int):
            return source, place, (size, inner)
    raise NotProved("a part whose size is no element of a tensor", size if isinstance(size, Node) else None)
