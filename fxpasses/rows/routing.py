"""Mixtures of experts whose tokens are sorted by expert: each row's result depends on that row alone.

    experts = topk(probabilities, 2)[1].reshape(-1)       [N * 2]         choices
    order = experts.sort()[1]                             [N * 2]         sorted; it is an order of the choices
    y = x[order // 2]                                     [N * 2, 64]     sorted: the row of each choice
    ends = histc(experts).cumsum(0)                       [8]             experts
    y = grouped_mm(y, weight, offs=ends)                  [N * 2, 96]     sorted
    back[order] = arange(N * 2)                           [N * 2]         choices: where each one is among the sorted
    y = y[back].view(N, 2, 96).sum(1)                     [N, 96]         rows

All values of a mixture are computed for the same rows: an order of choices is one of the choices that there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.fx import Node

from fxpasses.graph.calls import OperatorCall, is_pointwise, operator_of
from fxpasses.rows.nodes import first_of, is_tensor, shape_of
from fxpasses.rows.spaces import CHOICES, EXPERTS, ROWS, SORTED, Space, Tags

_INSIDE = frozenset({CHOICES, SORTED, EXPERTS})
# What an index says: of each sorted choice, which choice it is; of which row it is; of each choice, where it is sorted.
_ORDER, _ROWS, _PLACES = "order", "rows", "places"


def is_inside(tags: Tags) -> bool:
    """Whether a value is one of a mixture, between rows and rows."""
    return bool(_INSIDE & {*tags})


class Routing:
    """The rules of mixtures, for a layout that is being made. tags, spaces: of the values before."""

    def __init__(self, tags: Mapping[Node, Tags], spaces: Mapping[Node, Space]) -> None:
        self.tags, self.spaces = tags, spaces
        self._indices: dict[Node, str] = {}
        self._memory: set[Node] = set()

    def rule(self, node: Node, name: str) -> Tags | None:
        """The tags of a node of a mixture; None for another node."""
        call = OperatorCall.of(node)
        first: Any = call.argument("input", first_of(node))
        tags = self.tags.get(first, ()) if isinstance(first, Node) else ()
        if name in ("sort", "argsort") and tags == (CHOICES,) and call.argument("dim", -1) in (0, -1):
            if name == "argsort":
                self._indices[node] = _ORDER
            return (SORTED,)
        if name == "getitem" and tags == (SORTED,) and operator_of(first) == "sort" and not is_tensor(first):
            if node.args[1] == 1:
                self._indices[node] = _ORDER
            return (SORTED,)
        if name in ("histc", "bincount") and tags in ((CHOICES,), (SORTED,)):
            return (EXPERTS,) if call.argument("weights") is None and self._counts(call, name) else None
        if name == "floor_divide" and self._indices.get(first) == _ORDER:
            return self._rows_of(node, first)
        if name in ("getitem", "index_select"):
            return self._indexed(node, call, name, tags)
        if name == "cumsum" and tags == (EXPERTS,):
            return tags
        if "grouped_mm" in name and not is_pointwise(name):
            return self._grouped(node) if len(node.args) > 1 else None
        if name == "empty_like" and first in self._indices:
            self._memory.add(node)
            return tags
        return None

    def inverts(self, node: Node) -> bool:
        """Whether a node is `back[order] = arange(N * k)`, in new memory."""
        memory, order, numbers = cast("tuple[Any, ...]", node.args)
        is_order = memory in self._memory and isinstance(order, Node) and self._indices.get(order) == _ORDER
        if not is_order or not isinstance(numbers, Node) or operator_of(numbers) != "arange" or len(numbers.args) != 1:
            return False
        self._memory.discard(memory)
        self._indices[memory] = _PLACES
        return True

    def _counts(self, call: OperatorCall, name: str) -> bool:
        """Whether there are as many counts whatever is counted; of `bincount` there may be more."""
        return name == "histc" and type(call.argument("bins")) is int

    def _rows_of(self, node: Node, order: Node) -> Tags | None:
        each: Any = node.args[1]
        if type(each) is not int or shape_of(order) != (self._count_of(order) * each,):
            return None
        self._indices[node] = _ROWS
        return (SORTED,)

    def _count_of(self, node: Node) -> Any:
        batch, tokens = self.spaces[node].sizes
        return batch * tokens

    def _indexed(self, node: Node, call: OperatorCall, name: str, tags: Tags) -> Tags | None:
        first: Any = first_of(node)
        index: Any = node.args[1] if name == "getitem" else call.argument("index")
        if isinstance(index, tuple) and len(index) == 1:
            (index,) = index
        if not isinstance(index, Node) or (name == "index_select" and call.argument("dim") != 0):
            return None
        kind, own = self._indices.get(index), self.tags.get(index, ())
        if first not in self.tags and is_tensor(first) and kind is None:  # of each expert, for those that are chosen
            integers = index.meta["example_value"].dtype in (torch.int64, torch.int32)
            return (*own, *(None for _ in shape_of(first)[1:])) if is_inside(own) and integers else None
        if kind is None:
            return None
        wanted, given = {_ORDER: (CHOICES, SORTED), _ROWS: (ROWS, SORTED), _PLACES: (SORTED, CHOICES)}[kind]
        fits = tags[:1] == (wanted,) and not any(tags[1:])
        return (given, *tags[1:]) if fits and (kind == _ROWS or shape_of(index)[0] == shape_of(first)[0]) else None

    def _grouped(self, node: Node) -> Tags | None:
        x, weight, *more = cast("tuple[Any, ...]", node.args)
        ends: Any = node.kwargs.get("offs", more[0] if more else None)
        others = [part for part in node.all_input_nodes if part not in (x, ends)]
        fits = self.tags.get(x) == (SORTED, None) and self.tags.get(ends) == (EXPERTS,) and is_tensor(weight)
        return (SORTED, None) if fits and len(shape_of(weight)) == 3 and not self.tags.keys() & {*others} else None
