"""Values that are known under the assumption that every expert has tokens: the list of such experts, and its users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxpasses.dynamo.dispatch_state import as_in_new_thread
from fxpasses.experts.routing import Routing, writes_integers
from fxpasses.experts.routing_facts import Ends, Hits, Presence
from fxpasses.graph import effects
from fxpasses.graph.calls import operator_of
from fxpasses.graph.symbols import expression, symbol

_EVALUATED = frozenset(
    {"eq", "flatten", "ge", "getitem", "gt", "int", "item", "le", "long", "lt", "ne", "reshape", "select", "squeeze",
     "unsqueeze", "view", "cpu", "detach"}
)  # fmt: skip
_OF_NUMBERS = frozenset({"add", "eq", "ge", "gt", "item", "le", "lt", "ne", "sub", "sym_not"})
_MOST_STEPS = 16


def is_routing(routing: Routing, node: Node) -> bool | None:
    """The truth of `mask.any()` or `mask.sum() == 0` for an expert with tokens; None for conditions of other kinds."""
    fact = routing.of(node)
    return fact.present if isinstance(fact, Presence) else None


def counted_mask(node: Node, counted: Any) -> Node | None:
    """The tensor whose nonzero elements `counted` counts, or whose single element it is.

    `mask` for `torch.where(mask)[0].numel()` and `x[mask].shape[0]`, `mask.sum()` for `mask.sum().item()`.
    """
    for _ in range(_MOST_STEPS):
        example, name = node.meta.get("example_value"), operator_of(node)
        operands = [arg for arg in node.args[:2] if isinstance(arg, Node)]
        if not operands:
            return None
        if name == "item":
            is_asked = isinstance(example, (torch.SymInt, torch.SymBool)) and counted in example.node.expr.free_symbols
            return operands[0] if is_asked else None
        if isinstance(example, torch.Tensor) and counted not in map(expression, example.shape):
            return None
        if name == "where" or (name == "nonzero" and node.op.startswith("call")):
            return operands[0]
        if name == "getitem" and len(operands) == 2:
            node = operands[1]
            index = node.meta.get("example_value")
            if isinstance(index, torch.Tensor) and index.dtype is torch.bool:
                return node
        else:
            node = operands[0]
    return None


def ends_compared(routing: Routing, node: Node) -> tuple[Node, int, tuple[Any, Any]] | None:
    """(ends, e, (symbol of ends[e - 1], symbol of ends[e])) of a number computed from these two elements alone."""
    waiting, read = [node], dict[Any, tuple[Node, int]]()
    while waiting:
        number = waiting.pop()
        if operator_of(number) not in _OF_NUMBERS or len(read) > 2:
            return None
        if operator_of(number) != "item":
            waiting += number.all_input_nodes
            continue
        element, found = number.args[0], symbol(number.meta.get("example_value"))
        if found is None or operator_of(element) != "getitem" or type(element.args[1]) is not int:  # type: ignore[arg-type, union-attr]
            return None
        read[found] = element.args  # type: ignore[union-attr, assignment]
    if len(read) != 2:
        return None
    (before, (tensor, first)), (last, (other, index)) = sorted(read.items(), key=lambda pair: pair[1][1])
    if tensor is not other or index != first + 1 or first < 0 or not isinstance(routing.of(tensor), Ends):
        return None
    return tensor, index, (before, last)


@dataclass(frozen=True)
class Read:
    """A use of the assumed value of `node`, as a number or a truth value.

    index_of: the node `x[number]` that the number is the index of, and which is all that it is used for. is_truth:
    whether a jump has taken it as a truth value, and nothing else has.
    """

    node: Node
    index_of: Node | None = None
    is_truth: bool = False


class AssumedValues:
    """CPU tensors with the assumed values of nodes.

    reads: the uses that the trace has made of them. asked: how often it has turned to the routing analysis.
    """

    def __init__(self) -> None:
        self._routing = Routing()
        self._noted: dict[Node, torch.Tensor] = {}
        self._known: dict[Node, torch.Tensor | None] = {}
        self.reads: list[Read] = []
        self.asked = 0

    @property
    def routing(self) -> Routing:
        """The routing analysis of the trace."""
        self.asked += 1
        return self._routing

    def note(self, node: Node, value: torch.Tensor) -> None:
        self._noted[node] = self._known[node] = value

    def of(self, variable: Any) -> torch.Tensor | None:
        """The assumed value of one of Dynamo's variables, or None."""
        proxy = getattr(variable, "proxy", None)
        return self._value(proxy.node) if self._known and proxy is not None else None

    def known(self, node: Node) -> torch.Tensor | None:
        """The assumed value of a node, or None."""
        return self._value(node) if self._known else None

    def known_with(self, node: Node, others: Mapping[Node, Node]) -> torch.Tensor | None:
        """The assumed value that a node would have if the graph had `others` in the place of some nodes."""
        if node in others:
            return self.known(others[node])
        if node in self._noted:
            return self._noted[node]
        return self._evaluated(node, lambda operand: self.known_with(operand, others))

    def _value(self, node: Node) -> torch.Tensor | None:
        if node not in self._known:
            self._known[node] = self._evaluated(node, self._value)
        return self._known[node]

    def if_all_are_hit(self, node: Node) -> torch.Tensor | None:
        """The value of `hit`, or of `hit.flatten()`, if `hit` lists the experts that have tokens; else None."""
        count = _number_of_experts(self.routing, node)
        if count is None:
            return self._evaluated(node, self.if_all_are_hit)
        value = torch.arange(count, dtype=node.meta["example_value"].dtype)
        return value.unsqueeze(1) if operator_of(node) == "nonzero" else value

    def _evaluated(self, node: Node, value_of: Any) -> torch.Tensor | None:
        if operator_of(node) not in _EVALUATED or not node.args:
            return None
        values = {operand: value_of(operand) for operand in node.all_input_nodes}
        if not values or any(value is None for value in values.values()):
            return None
        try:
            with as_in_new_thread():
                value = effects.call(node, *torch.fx.map_arg((node.args, node.kwargs), lambda operand: values[operand]))
        except Exception:
            return None
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def list_of_hits(node: Node) -> Node:
    """The query for the experts, without the nodes that reshape its result, which may be unused and so eliminated."""
    while operator_of(node) not in ("nonzero", "where", "unique") and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def choices_of(routing: Routing, ids: Node) -> int | None:
    """The number of experts that ids are chosen from, while the graph is traced; None after any write to integers."""
    if any(node.op.startswith("call") and writes_integers(node) for node in ids.graph.nodes):
        return None
    return routing.choice(ids).choices


def _number_of_experts(routing: Routing, node: Node) -> int | None:
    """The number of experts, if `node` lists those with tokens: `(counts > 0).nonzero()`, `ids.unique()`."""
    fact = routing.of(node)
    if not isinstance(fact, Hits) or fact.in_tuple or operator_of(node) not in ("getitem", "nonzero", "unique"):
        return None
    asked: Any = list_of_hits(node)
    choices = choices_of(routing, fact.ids)
    if operator_of(asked) == "unique":
        return choices
    size = asked.args[0].meta["example_value"].shape[0]
    if choices is not None and isinstance(size, int):
        return min(size, choices)  # a class without ids, as for padding, has no expert
    return size if isinstance(size, int) else None
