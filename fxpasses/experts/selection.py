"""Which (token, slot) pairs of the router's choice the masks of a loop over experts select, and in which order.

A loop queries the tokens of expert e by a mask: `idx == e`, `one_hot(idx, E).permute(2, 1, 0)[e]`, either of them
`.any(-1)` over the slots, or column e of a matrix. The routing analysis (`experts/routing.py`) finds the fact of one
mask. A `Selection` combines the facts of all experts of a loop: the expert id of every pair, in the order in which
`torch.where(mask)` finds pairs, and how a pair's place maps to the mask's coordinates. Sorted stably by expert, the
places are the concatenated results of the queries.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from fxpasses.experts.anti_unification import Constants, Template
from fxpasses.experts.routing import Routing
from fxpasses.experts.routing_facts import Columns, Mask, Nothing, Presence, Scattered
from fxpasses.graph.calls import operator_of
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.symbols import expression


@dataclass(frozen=True)
class Selection:
    """ids: an integer tensor; permuted by `axes` and flattened, it holds the expert ids of all pairs.

    axes: the axes of `ids`, in the order of the mask's own dimensions; for a mask over tokens alone (`any` over the
    slots) the slots' axis comes last, and `dims` is 1. dims: the number of the mask's dimensions. first, step, count:
    the branches' expert ids are first + step * branch, with step 1 or -1. choices: the number of experts to choose
    from, if all ids are known to be below it. distinct: whether the ids along the last axis differ from each other.
    slots: for one-dimensional ids, the length of the aligned groups within which ids differ from each other. flat:
    whether the mask's `dims` dimensions were flattened into one. scores: a matrix [T, E] of scattered scores; a pair
    counts only if its score passes the tests. top: the number of experts of each token, for a report.
    """

    ids: Node
    axes: tuple[int, ...]
    dims: int
    first: int
    step: int
    count: int
    choices: int | None
    distinct: bool
    slots: int = 1
    flat: bool = False
    scores: Columns | None = None
    top: int | None = None

    @property
    def covers(self) -> bool:
        """Whether each pair is known to belong to one of the experts."""
        lowest = min(self.first, self.first + self.step * (self.count - 1))
        return self.choices == self.count and lowest == 0


def is_query(template: Template) -> bool:
    """Whether the branches query their tokens here."""
    name, args = template.name, template.args
    if name == "masked_select":
        return len(args) == 2 and isinstance(args[1], Template)
    if name == "where":
        return len(args) == 1 and not template.kwargs
    return bool(args) if name == "nonzero" else name == "getitem" and is_mask(args[1])


def is_mask(part: Any) -> bool:
    """Whether a part of an index is a mask of each branch."""
    return isinstance(part, Template) and getattr(part.example, "dtype", None) is torch.bool


def selection_of(routing: Routing, masks: Any, spread: bool = False) -> Selection:
    """The selection that the masks of all branches make; spread: see `mask_fact`. Raises `NotProved`."""
    if not isinstance(masks, Template):
        raise NotProved("the experts share one query")
    found = [mask_fact(routing, mask, spread) for mask in masks.nodes]
    ids, axes, dims, flat = found[0].ids, found[0].axes, found[0].dims, found[0].flat
    if any(replace(mask, expert=found[0].expert) != found[0] for mask in found):
        raise NotProved("the routing differs between the experts", masks.nodes[0])
    first, step = progression(Constants(tuple(mask.expert for mask in found)))
    if isinstance(ids, Columns):
        chosen = _scattered_scores(routing, ids) if axes == (0, 1) else None
        if chosen is None:
            text = "the number of tokens of all experts is neither known nor bounded by a number of slots"
            raise NotProved(text, ids.matrix)
        top = routing.choice(chosen).top
        return Selection(chosen, axes, dims, first, step, len(found), None, distinct=True, scores=ids, top=top)
    of = routing.choice(ids)
    return Selection(ids, axes, dims, first, step, len(found), of.choices, of.distinct, of.slots, flat, top=of.top)


def mask_fact(routing: Routing, mask: Node, spread: bool = False) -> Mask:
    """The fact of a mask, or of numbers that are nonzero where the mask is true; raises `NotProved`.

    spread: the mask's last dimension only broadcasts over a token's features.
    """
    fact = routing.of(mask)
    if isinstance(fact, Mask) and fact.spread == spread:
        return fact
    if isinstance(fact, (Nothing, Presence)):
        raise NotProved(fact.text or "a number of tokens as a mask", mask)
    raise NotProved("a mask over features" if isinstance(fact, Mask) else "a mask that is not known", mask)


def _scattered_scores(routing: Routing, columns: Columns) -> Node | None:
    """The ids [T, k] of `zeros.scatter(1, ids, scores)`, if a score of zero fails the tests; else None."""
    value: Any = 0.0
    for test, number in columns.tests:
        value = getattr(operator, getattr(test, "__name__", test).strip("_"))(value, number)
    fact = routing.of(columns.matrix)
    return fact.ids if isinstance(fact, Scattered) and columns.dim == 1 and not value else None


def mask_of(query: Template) -> tuple[Any, bool]:
    """The mask of a query, and whether it is spread over features: see `mask_fact`."""
    if query.name == "masked_select":
        source = query.args[0].nodes[0] if isinstance(query.args[0], Template) else query.args[0]
        return query.args[1], is_spread(source, query.args[1].nodes[0])
    return query.args[1] if query.name == "getitem" else query.args[0], False


def is_spread(source: Node, mask: Node) -> bool:
    """Whether a mask of the source's rank has the same value for all features of a token, the last dimension."""
    example, wanted = mask.meta["example_value"], source.meta["example_value"]
    if example.ndim != wanted.ndim or example.ndim < 2:
        return False
    sizes, others = ([expression(size) for size in tensor.shape] for tensor in (example, wanted))
    if operator_of(mask) in ("expand", "expand_as") and isinstance(mask.args[0], Node):
        before = mask.args[0].meta["example_value"].shape
        return len(before) == len(sizes) and [*sizes[:-1], 1] == [expression(size) for size in before]
    return sizes != others and sizes == [*others[:-1], 1]


def progression(constants: Constants) -> tuple[int, int]:
    """(first, step) of consecutive ids, ascending or descending, or of one; raises `NotProved`."""
    values = constants.values
    if any(not isinstance(value, int) or isinstance(value, bool) for value in values):
        raise NotProved("integers do not distinguish the experts")
    step = values[1] - values[0] if len(values) > 1 else 1
    if step not in (1, -1) or any(b - a != step for a, b in itertools.pairwise(values)):
        raise NotProved(f"the experts {values} do not follow one another")
    return values[0], step
