"""The routing analysis: what each tensor of a graph says about a router's choice, as a fact
(`experts/routing_facts.py`).

    idx = topk(scores, 2)[1]                 Choice(choices=E, distinct)
    hot = one_hot(idx, E).permute(2, 1, 0)   OneHot(idx, axes=(experts, slots, tokens))
    hot[3]                                   Mask(idx, expert=3)
    hot[3].any()                             Presence(idx, expert=3)
    counts = hot.sum((1, 2))                 Counts(idx)
    counts.cumsum(0)                         Ends(idx)
    (counts > 0).nonzero()                   Hits(idx)

The fact of a node follows from the facts of its operands (`experts/routing_transfer.py`). It holds as long as nobody
writes to its evidence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from fxpasses.experts.anti_unification import REPEATED
from fxpasses.experts.routing_facts import Choice, Counts, Ends, Fact, Mask, Nothing, OneHot, Presence, Scattered
from fxpasses.experts.routing_transfer import CASTS, RESHAPES, TRANSFER, WIDE, ZEROS, dtype_of, pairs_of, reads_bits
from fxpasses.graph.aliases import written_operands
from fxpasses.graph.calls import operator_of
from fxpasses.graph.reachability import reached
from fxpasses.graph.symbols import constant, is_unbacked
from fxpasses.graph.traits import is_integer

# Operators that lead from the router's choice to a mask, a count or a list: see `Routing.concerns`.
_BEGINNING = frozenset({"bincount", "histc", "one_hot", "scatter", "scatter_", "scatter_add", "scatter_add_"})
_FOLLOWING = frozenset(
    {*CASTS, *RESHAPES, "add", "amax", "any", "count_nonzero", "cumsum", "eq", "ge", "getitem", "gt", "item", "le",
     "lt", "max", "ne", "nonzero", "select", "sub", "sum", "where"}
)  # fmt: skip


class Routing:
    """The facts of a graph's nodes, memoised: a change of the graph requires a new object.

    is_constant: says whether nobody writes to a node's memory after the node.
    """

    def __init__(self, is_constant: Callable[[Node], bool] = lambda node: True) -> None:
        self.is_constant = functools.cache(is_constant)
        self._facts: dict[Node, Fact] = {}
        self._first: dict[Any, Node] = {}
        self._canonical: dict[Node, Node] = {}

    def of(self, node: Node) -> Fact:
        """The fact of a node, found without recursion because graphs are deep."""
        waiting = [node]
        while waiting:
            current = waiting[-1]
            operands = current.all_input_nodes if operator_of(current) in TRANSFER else []
            missing = [operand for operand in operands if operand not in self._facts]
            waiting += missing if current not in self._facts else []
            if waiting[-1] is current:
                waiting.pop()
                if current not in self._facts:
                    self._learn(current)
        return self._facts[node]

    def _learn(self, node: Node) -> None:
        name = operator_of(node)
        transfer = TRANSFER.get(name)
        found = transfer(self, node) if transfer is not None else None
        if isinstance(found, Fact):
            made = min(node.users) if name in ZEROS else node  # the first user of zeros fills them
            found = replace(found, evidence=found.evidence | {made})
            if not all(map(self.is_constant, found.evidence)):
                found = "a mask that is written to"
        if not isinstance(found, Fact):
            default = f"`{name}` is not a known mask of an expert's tokens" if name else "an unknown mask"
            found = Nothing(found or default, node)
        self._facts[node] = found

    def concerns(self, node: Node) -> bool:
        """Whether a tensor is computed from integers compared with a number, from one-hot masks or from counts."""
        return any(map(self._begins, reached([node], _followed)))

    def _begins(self, node: Node) -> bool:
        name = operator_of(node)
        if name in ZEROS:
            return any(operator_of(user) == "scatter_" for user in node.users)
        compares = name == "eq" and any(map(is_integer, _followed(node)))
        return compares or name in _BEGINNING or isinstance(self.of(node), Ends)

    def choice(self, ids: Node) -> Choice:
        fact = self.of(ids)
        return fact if isinstance(fact, Choice) else Choice(None)

    def presence(self, node: Node) -> Presence | None:
        """The expert that has pairs if and only if some element of the tensor is not zero."""
        fact = self.of(node)
        if isinstance(fact, Mask) and isinstance(fact.ids, Node):
            return Presence(fact.ids, fact.expert, evidence=fact.evidence)
        return fact if isinstance(fact, Presence) else None

    def total(self, counts: Node, running: bool) -> Any:
        """The sum of a vector of counts, or of the counts behind a vector of ends, as an expression; None if unknown.

        running: whether the vector holds counts.
        """
        ids = self.counted(counts, running)
        return pairs_of(ids) if ids is not None else None

    def counted(self, counts: Node, running: bool) -> Node | None:
        """The ids of which a vector of counts, or of ends, counts each once; None if that is not known.

        Every id is counted if all ids are known to be below the number of counts. A symbolic number of pairs is guarded
        to be one that the counts represent exactly.
        """
        fact = self.of(counts)
        if not isinstance(fact, (Counts if running else Ends)) or dtype_of(counts) not in WIDE:
            return None
        pairs = fact.ids.meta["example_value"].numel()
        if fact.exact_to < math.inf and (is_unbacked(pairs) or pairs > fact.exact_to):
            return None
        choices, length = self.choice(fact.ids).choices, constant(counts.meta["example_value"].shape[0])
        return fact.ids if choices is not None and length is not None and choices <= length else None

    def is_fill(self, node: Node) -> bool:
        """Whether a node writes numbers to zeros that nobody has read yet: `zeros.scatter_(1, ids, 1)`."""
        return operator_of(node) == "scatter_" and isinstance(self.of(node), (OneHot, Scattered))

    def canonical(self, node: Node) -> Node:
        """The first of the nodes that compute the same value, such as `idx.flatten()` in every iteration of a loop."""
        if node not in self._canonical:
            self._canonical[node] = node
            if operator_of(node) in REPEATED and all(map(self.is_constant, (node, *node.all_input_nodes))):
                arguments = torch.fx.map_arg((node.args, node.kwargs), self.canonical)
                self._canonical[node] = self._first.setdefault((node.graph, node.op, node.target, str(arguments)), node)
        return self._canonical[node]

    def source(self, ids: Node) -> Node:
        """The ids before the operators that only change their shape or width."""
        while operator_of(ids) in (*RESHAPES, *CASTS) and isinstance(ids.args[0], Node):
            source = ids.args[0]
            if not {dtype_of(ids), dtype_of(source)} <= {*WIDE} or reads_bits(ids):
                break
            ids = source
        return ids


def _followed(node: Node) -> list[Node]:
    operands = [arg for arg in node.args[:2] if isinstance(arg, Node)] if operator_of(node) in _FOLLOWING else []
    return operands[-1:] if operator_of(node) == "getitem" else operands[:1]  # `x[tok]` has as many rows as `tok`


def writes_integers(node: Node) -> bool:
    """Whether a node may write to a tensor of integers or bools; higher-order operators are assumed not to."""
    return not isinstance(node.target, torch._ops.HigherOrderOperator) and any(map(is_integer, written_operands(node)))
