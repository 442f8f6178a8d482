"""Mixtures of experts whose tokens are sorted by expert: each row's result depends on that row alone.

    experts = topk(probabilities, 2)[1].reshape(-1)       [N * 2]         choices
    order = experts.sort()[1]                             [N * 2]         sorted; it is an order of the choices
    y = x[order // 2]                                     [N * 2, 64]     sorted: the row of each choice
    ends = histc(experts).cumsum(0)                       [8]             experts
    y = grouped_mm(y, weight, offs=ends)                  [N * 2, 96]     sorted
    back[order] = arange(N * 2)                           [N * 2]         choices: where each one is among the sorted
    y = y[back].view(N, 2, 96).sum(1)                     [N, 96]         rows

As `group_experts` writes a loop over experts:

    ends = searchsorted(experts.sort()[0], arange(8), right=True)
    y = weights[order // 2, order % 2, None] * y          [N * 2, 96]     sorted
    out.index_add_(0, order // 2, y)                      [N, 96]         rows

All values of a mixture are computed for the same rows, since an order is an order of all existing choices. Sorted
values, and the experts' ends, have to be of one routing, whose choices come from `topk`: if capacity is limited, or
some choices count for no expert, a row's result depends on other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.fx import Node

from fxpasses.graph.calls import OperatorCall, operator_of
from fxpasses.graph.traits import KEEPS_VALUES
from fxpasses.rows.nodes import first_of, is_tensor, refused, shape_of
from fxpasses.rows.spaces import CHOICES, EXPERTS, ROWS, SORTED, Space, Tags

_INSIDE = frozenset({CHOICES, SORTED, EXPERTS})
# The meanings of integers: experts that rows have chosen; for each sorted choice, which choice it is, its row, and its
# slot in the row; for each choice, its place when sorted; for each expert, how many chose it, and where they end.
_CHOSEN, _ORDER, _ROWS, _SLOTS, _PLACES, _COUNTS, _ENDS = (
    "chosen", "order", "rows", "slots", "places", "counts", "ends",
)  # fmt: skip
_WIDE = (torch.int32, torch.int64, torch.float32, torch.float64)
_GATHERS = frozenset({"getitem", "index_select", "fxpasses::gather_rows"})


def is_inside(tags: Tags) -> bool:
    """Whether a value is inside a mixture, between rows going in and rows coming out."""
    return bool(_INSIDE & {*tags})


class Routing:
    """The rules of mixtures, for a layout that is being made. tags, spaces: those of earlier values."""

    def __init__(self, tags: Mapping[Node, Tags], spaces: Mapping[Node, Space]) -> None:
        self.tags, self.spaces = tags, spaces
        self._kinds: dict[Node, str] = {}
        self._roots: dict[Node, Node] = {}  # the routing by which a value is sorted: the result of `topk`
        self._memory: dict[Node, Node] = {}  # memory that may become places, with the order that it resembles

    def rule(self, node: Node, name: str) -> Tags | None:
        """The tags of a node of a mixture; None for another node."""
        call = OperatorCall.of(node)
        first: Any = first_of(node) if name == "searchsorted" else call.argument("input", first_of(node))
        if not isinstance(first, Node):
            return None
        tags, kind = self.tags.get(first, ()), self._kinds.get(first)
        if name in ("sort", "argsort"):
            is_known = kind == _CHOSEN and tags == (CHOICES,) and not call.argument("descending", False)
            return self._known(node, _ORDER if name == "argsort" else None, first, SORTED) if is_known else None
        if name == "getitem" and operator_of(first) == "sort" and first in self._roots:
            return self._known(node, _ORDER if node.args[1] == 1 else _CHOSEN, first, SORTED)
        if name == "histc" and kind == _CHOSEN and is_inside(tags):
            bins = call.argument("bins")
            is_each = type(bins) is int and call.argument("min", 0) == 0 and call.argument("max", 0) == bins - 1
            return self._known(node, _COUNTS, first, EXPERTS) if is_each else None
        if name == "cumsum" and kind == _COUNTS and _counts_exactly(node):
            return self._known(node, _ENDS, first, EXPERTS)
        if name == "searchsorted" and kind == _CHOSEN and tags == (SORTED,):
            return self._known(node, _ENDS, first, EXPERTS) if _counts_up_to_each(node) else None
        if name in ("floor_divide", "remainder") and kind == _ORDER:
            batch, tokens = self.spaces[first].sizes
            each = call.argument("other")
            is_row = type(each) is int and shape_of(first) == (batch * tokens * each,)
            return self._known(node, _ROWS if name == "floor_divide" else _SLOTS, first, SORTED) if is_row else None
        if name == "empty_like" and kind == _ORDER:
            self._memory[node] = first
        if name in _GATHERS:
            return self._indexed(node, call, name, tags)
        if "grouped_mm" in name and len(node.args) > 1:
            return self._grouped(node, name)
        return None

    def adds(self, node: Node) -> bool:
        """Whether a node is `index_add(x, 0, rows, y)`, where y is sorted and `rows` gives the row of each element."""
        if len(node.args) != 4 or node.kwargs or not set(node.all_input_nodes) <= self.tags.keys():
            return False
        x, dim, rows, y = cast("tuple[Any, ...]", node.args)
        fits = self.tags[x][:1] == (ROWS,) and self.tags[y] == (SORTED, *self.tags[x][1:])
        return fits and dim == 0 and self._kinds.get(rows) == _ROWS and self._roots[rows] is self._roots[y]

    def note(self, node: Node, name: str, tags: Tags) -> None:
        """Called for each node with rows: note its meaning, if its operand has one. Raises `Refused`."""
        first: Any = first_of(node)
        is_integer = is_tensor(node) and not node.meta["example_value"].is_floating_point()
        if not isinstance(first, Node):
            first = None
        elif name == "getitem" and node.args[1] == 1 and operator_of(first) == "topk":
            self._kinds[node], self._roots[node] = _CHOSEN, node
        if first in self._kinds and node not in self._kinds:
            reshapes = self._kinds[first] == _CHOSEN and name in ("flatten", "reshape", "view")
            is_number = is_integer or self._kinds[first] in (_CHOSEN, _COUNTS, _ENDS)
            if reshapes or (name in KEEPS_VALUES and is_number and _counts_exactly(node)):
                self._kinds[node], self._roots[node] = self._kinds[first], self._roots[first]
        if EXPERTS in tags and node not in self._kinds:
            raise refused(node, "computes with numbers of choices")
        roots = {self._roots[part] for part in node.all_input_nodes if SORTED in self.tags.get(part, ())}
        if len(roots) > 1:
            raise refused(node, "combines two routings")
        if SORTED in tags and node not in self._roots:
            if not roots:
                raise refused(node, "is sorted in a way that is not known")
            (self._roots[node],) = roots

    def known(self) -> list[Node]:
        """The integers with a known meaning, which holds as long as nobody writes to them."""
        return [*self._kinds, *self._memory]

    def inverts(self, node: Node) -> bool:
        """Whether a node is `back[order] = arange(N * k)`, in new memory."""
        memory, order, numbers = cast("tuple[Any, ...]", node.args)
        is_order = isinstance(memory, Node) and isinstance(order, Node) and self._kinds.get(order) == _ORDER
        if not is_order or memory not in self._memory or self._roots[self._memory[memory]] is not self._roots[order]:
            return False
        if not isinstance(numbers, Node) or operator_of(numbers) != "arange" or len(numbers.args) != 1:
            return False
        if shape_of(numbers) != shape_of(order):  # one number would be broadcast
            return False
        del self._memory[memory]
        self._kinds[memory], self._roots[memory] = _PLACES, self._roots[order]
        return True

    def _known(self, node: Node, kind: str | None, of: Node, tag: str) -> Tags:
        self._roots[node] = self._roots[of]
        if kind is not None:
            self._kinds[node] = kind
        return (tag,)

    def _indexed(self, node: Node, call: OperatorCall, name: str, tags: Tags) -> Tags | None:
        first: Any = first_of(node)
        index: Any = call.argument("index") if name == "index_select" else node.args[1]
        if isinstance(index, tuple) and len(index) == 1:
            (index,) = index
        if isinstance(index, (tuple, list)) and len(index) > 1:
            return self._of_each(node, tags, *index)
        if not isinstance(index, Node) or (name == "index_select" and call.argument("dim") != 0):
            return None
        kind, own = self._kinds.get(index), self.tags.get(index, ())
        if first not in self.tags and is_tensor(first) and kind == _CHOSEN:  # each expert's value, for the chosen ones
            return (*own, *(None for _ in shape_of(first)[1:]))
        if kind not in (_ORDER, _ROWS, _PLACES):
            return None
        wanted, given = {_ORDER: (CHOICES, SORTED), _ROWS: (ROWS, SORTED), _PLACES: (SORTED, CHOICES)}[kind]
        fits = tags[:1] == (wanted,) and not any(tags[1:])
        fits = fits and (kind == _ROWS or shape_of(index)[0] == shape_of(first)[0])
        if not fits or (kind == _PLACES and self._roots[first] is not self._roots[index]):
            return None
        if given == SORTED:
            self._roots[node] = self._roots[index]
        return (given, *tags[1:])

    def _of_each(self, node: Node, tags: Tags, rows: Any, of_row: Any, *more: Any) -> Tags | None:
        """`weights[rows, slots, None]`: for each sorted choice, a number of its row."""
        if not isinstance(rows, Node) or not isinstance(of_row, Node):
            return None
        kinds = self._kinds.get(rows), self._kinds.get(of_row)
        is_sorted = all(self.tags.get(part) == (SORTED,) for part in (rows, of_row))
        if tags != (ROWS, None) or not is_sorted or kinds not in ((_ROWS, _SLOTS), (_ROWS, _CHOSEN)):
            return None
        if self._roots[rows] is not self._roots[of_row] or any(part is not None for part in more):
            return None
        self._roots[node] = self._roots[rows]
        return (SORTED, *more)

    def _grouped(self, node: Node, name: str) -> Tags | None:
        x, weight, *more = cast("tuple[Any, ...]", node.args)
        ends: Any = node.kwargs.get("offs", more[0] if more else None)
        others = [part for part in node.all_input_nodes if part not in (x, ends)]
        if self.tags.get(x) != (SORTED, None) or self._kinds.get(ends) != _ENDS or self.tags.keys() & {*others}:
            return None
        if name.startswith("fxpasses::") and (len(more) > 3 or node.kwargs):  # experts without a row get no gradient
            return None
        if isinstance(weight, (tuple, list)):
            experts = len(weight)
        elif is_tensor(weight) and len(shape_of(weight)) == 3:
            experts = shape_of(weight)[0]
        else:
            return None
        is_one = self._roots[x] is self._roots[ends] and shape_of(ends) == (experts,)
        return (SORTED, None) if is_one else None


def _counts_up_to_each(node: Node) -> bool:
    """Whether a node is `searchsorted(x, arange(n), right=True)`."""
    numbers, more = node.args[1], {key: value for key, value in node.kwargs.items() if key != "out_int32"}
    is_each = isinstance(numbers, Node) and operator_of(numbers) == "arange" and len(numbers.args) == 1
    return is_each and len(node.args) == 2 and more == {"right": True}


def _counts_exactly(node: Node) -> bool:
    """Whether the numbers of all choices fit into the dtype of a value."""
    return is_tensor(node) and node.meta["example_value"].dtype in _WIDE
