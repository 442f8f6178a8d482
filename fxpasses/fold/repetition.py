"""Repetition: where a graph applies one program again and again.

Two ways to cut a graph into candidates are tried, and the one that leaves least to compile is taken; or the first that
leaves next to nothing:

- *by modules*: a segment is one stay in an element of a list of modules (`layers.3`). Kinds of layers may alternate in
  any order.
- *by period*: the longest runs in which the calls repeat with some period, for programs whose layers are not modules,
  or share one. Among the places where a period may begin, the one that the fewest values cross is taken.

Both are hints: `Segment.form` decides what is equal.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import TypeAlias

import torch
from torch.fx import GraphModule, Node

from fxpasses.fold.segments import Segment, local_signature, segment, with_bodies
from fxpasses.graph.provenance import module_of

Kind: TypeAlias = list[Segment]  # of one form, in program order

_MOST_PERIODS = 12  # how many periods are tried, the most frequent distances first
_NO_BORDER = 1000
_LITTLE = 1 / 8  # of a graph: with as much left to compile, no other cut is looked for
_MOST_LEVELS = 3  # levels of lists of modules inside lists of modules


def calls(gm: GraphModule) -> list[Node]:
    """The nodes of a graph that segments consist of."""
    return [node for node in gm.graph.nodes if node.op.startswith("call")]


def kinds(gm: GraphModule, least: int) -> list[Kind]:
    """The disjoint kinds of at least `least` segments; kinds that save more nodes come first."""
    nodes = calls(gm)
    whole = sum(1 for _ in with_bodies(gm, nodes))
    best: list[Kind] = []
    most = 0
    for cuts in _candidates(gm, nodes):
        found: dict[object, Kind] = defaultdict(list)
        for begin, end in cuts:
            candidate = segment(gm, nodes[begin:end])
            found[candidate.form].append(candidate)
        enough = [kind for kind in found.values() if len(kind) >= least]
        saved = sum(_saved(gm, kind) for kind in enough)
        if saved > most:
            best, most = enough, saved
        if most >= (1 - _LITTLE) * whole:
            break
    return sorted(best, key=lambda kind: _saved(gm, kind), reverse=True)


def _saved(gm: GraphModule, kind: Kind) -> int:
    """The number of nodes that need no compilation, including those of checkpoints' bodies."""
    return (len(kind) - 1) * sum(1 for _ in with_bodies(gm, kind[0].nodes))


Cut: TypeAlias = tuple[int, int]  # the first position of a segment, and the one after its last


def _candidates(gm: GraphModule, nodes: list[Node]) -> Iterable[list[Cut]]:
    paths = [_elements(node) for node in nodes]
    for level in range(_MOST_LEVELS):
        if cuts := _by_modules(paths, level):
            yield cuts
    yield from _by_period([local_signature(gm, node) for node in nodes], _crossings(nodes))


def _elements(node: Node) -> list[str]:
    """The elements of lists of modules that a node is in, outermost first: `layers.3`, `layers.3.experts.1`."""
    path = module_of(node)[0]
    return [path[: found.end()] for found in re.finditer(r"\.\d+(?=\.|$)", path)]


def _by_modules(paths: list[list[str]], level: int) -> list[Cut]:
    """A segment for each stay in an element of a list of modules, at one level of lists in lists."""
    elements = [path[level] if len(path) > level else "" for path in paths]
    cuts = []
    position = 0
    for element, stay in groupby(elements):
        begin, position = position, position + sum(1 for _ in stay)
        if element:
            cuts.append((begin, position))
    return cuts


def _by_period(signatures: Sequence[object], crossings: list[int]) -> Iterable[list[Cut]]:
    places: dict[object, list[int]] = defaultdict(list)
    for position, signature in enumerate(signatures):
        places[signature].append(position)
    distances: Counter[int] = Counter()
    for found in places.values():
        distances.update(later - earlier for earlier, later in pairwise(found))
    for period, _ in distances.most_common(_MOST_PERIODS):
        cuts = []
        begin = 0
        while begin + period < len(signatures):
            end = begin
            while end + period < len(signatures) and signatures[end] == signatures[end + period]:
                end += 1
            count = (end - begin) // period + 1
            if count > 1:
                slack = end + period - begin - count * period
                first = min(range(begin, begin + slack + 1), key=lambda place: (crossings[place], place))
                cuts += [(first + period * number, first + period * (number + 1)) for number in range(count)]
                begin = first + period * count
            else:
                begin = end + 1
        if cuts:
            yield cuts


def _crossings(nodes: list[Node]) -> list[int]:
    """How many values cross each place, from earlier nodes to that one or later ones; non-tensors weigh more."""
    positions = {node: position for position, node in enumerate(nodes)}
    changes = [0] * (len(nodes) + 2)
    for node, position in positions.items():
        last = max((positions.get(user, len(nodes)) for user in node.users), default=position)
        weight = 1 if isinstance(node.meta.get("example_value"), torch.Tensor) else _NO_BORDER
        changes[position + 1] += weight
        changes[last + 1] -= weight
    crossings, crossing = [], 0
    for change in changes[: len(nodes) + 1]:
        crossing += change
        crossings.append(crossing)
    return crossings
