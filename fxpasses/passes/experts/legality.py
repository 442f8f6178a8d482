"""What else the graph does around a loop over experts: whether one program at its end may stand for all branches.

Nothing else may look at the branches' rows, nothing may write to what they are made of, and nobody may look at the
results before all are there.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fxpasses.graph.aliases import AliasAnalysis, storages, written_operands
from fxpasses.graph.anti_unification import Template
from fxpasses.graph.calls import FACTORIES, operator_of
from fxpasses.graph.effects import leaves
from fxpasses.graph.reachability import reached
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.symbols import is_symbolic
from fxpasses.passes.experts.assertions import Sizes
from fxpasses.passes.experts.loops import Loop

_GRAD_MODES = ("_set_grad_enabled", "set_grad_enabled")
_MODES = ("_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode")


class Surroundings:
    """One loop in its graph. inside: what goes with the loop. known: numbers that follow from the sizes of all rows.

    at: the end of the loop in whose place the program comes. sizes: what is known of the numbers of rows.
    """

    def __init__(
        self,
        graph: Graph,
        loop: Loop,
        memory: AliasAnalysis,
        families: list[Template],
        rows: set[Node],
        totals: set[Node],
        sizes: Sizes,
    ) -> None:
        """rows: the nodes of the branches that hold rows, and the cuts. totals: those which anyone may look at.

        Raises `NotProved` where the loop may not be moved.
        """
        self.graph, self.loop, self.memory, self.sizes = graph, loop, memory, sizes
        self.positions = memory.positions
        own = {node for family in families for node in family.nodes}
        self._rows = rows | {part for merge in loop.merges for part in merge.parts}
        self.known: dict[Node, int] = {}
        scaffolding = self.assertions_on(self._rows, self.known)
        self._check_onlookers(scaffolding, totals)
        first, last = self._span()
        self._check_between(first, last)
        self._check_before(own, first)
        self._check_buffer(own, first, last)
        self.at = self._place(families)
        # What only led to the rows (masks, a weight of each expert) goes with them, if nobody else looks at it.
        made = {node for node in own if node.op.startswith("call") and not written_operands(node)}
        self.inside = self._rows | scaffolding | made

    def _span(self) -> tuple[int, int]:
        """The positions of the first node that holds rows, and of the last end."""
        first = min(self.positions[node] for node in (*self._rows, *self.loop.ends))
        return first, max(self.positions[node] for node in self.loop.ends)

    def _check_onlookers(self, scaffolding: set[Node], totals: set[Node]) -> None:
        for node in self._rows - totals:
            for user in node.users:
                if user not in self._rows and user not in self.loop.ends and user not in scaffolding:
                    raise NotProved(f"`{user.name}` looks at an expert's tokens as well", user)

    def _check_between(self, first: int, last: int) -> None:
        for node in self.graph.nodes:
            if not first <= self.positions[node] <= last or node in self.loop.ends:
                continue
            name = operator_of(node)
            if name in _MODES or (name in _GRAD_MODES and not self._has_all_gradients()):
                raise NotProved(f"`{name}` in the middle of the loop", node)
            if written_operands(node) and node not in self._rows:
                raise NotProved(f"`{node.name}` writes in the middle of the loop", node)

    def _has_all_gradients(self) -> bool:
        """Whether gradients go through everything, so that `no_grad` in the loop is around queries alone."""
        enabled = None
        for node in self.graph.nodes:
            if operator_of(node) in _GRAD_MODES:
                enabled = node.args[0]
            if node not in self._rows and node not in self.loop.ends:
                continue
            if written_operands(node) and enabled is not True:
                return False
            if operator_of(node) != "detach" and _needs_gradient(node) is False:
                if any(map(_needs_gradient, node.all_input_nodes)):
                    return False
        return True

    def _check_before(self, own: set[Node], first: int) -> None:
        """What was made before the loop, and is made anew for all rows at its end, must not have changed."""
        made = [node for node in own if node.op.startswith("call") and self.positions[node] < first]
        kept = {
            key for node in made for operand in (node, *node.all_input_nodes) for key in self.memory.sets.of(operand)
        }
        start = min((self.positions[node] for node in made), default=first)
        for node in self.graph.nodes:
            between = start <= self.positions[node] < first and node not in self._rows
            if between and kept & self.memory.written_by(node):
                raise NotProved(f"`{node.name}` writes to what the branches are made of", node)

    def _check_buffer(self, own: set[Node], first: int, last: int) -> None:
        buffer = self.loop.buffer
        if buffer is None:
            return
        chained = {merge.node for merge in self.loop.merges}
        parts = {part for merge in self.loop.merges for part in merge.parts}
        if self.loop.is_functional:
            for node in chained - {self.loop.merges[-1].node}:
                if not set(node.users) <= chained:
                    raise NotProved(f"`{node.name}`, a part of the sum, is used by itself", node)
        elif operator_of(buffer) not in FACTORIES | {"clone"} and not _is_new_memory(buffer):
            raise NotProved(f"`{buffer.name}`, which the results are merged into, may share memory", buffer)
        lookers = [user for holder in {buffer, *chained} for user in holder.users]
        if not self.loop.is_functional:
            lookers += self.memory.users(buffer, buffer, None)  # by views of it
        for user in lookers:
            if user not in chained | parts and first <= self.positions[user] < last:
                raise NotProved(f"`{user.name}` looks at the sum before it is complete", user)
        if any(node in own for node in (buffer, *chained)):
            raise NotProved("a branch reads what another has added", buffer)

    def _place(self, families: list[Template]) -> Node:
        """The last end; of several lists, the first one, where all is there by then that the program is made of."""
        ends = sorted(self.loop.ends, key=self.positions.__getitem__)
        if self.loop.kind != "cat" or len(ends) == 1:
            return ends[-1]
        looked_at = {leaf for family in families for leaf in leaves((family.args, family.kwargs))}
        if any(end in looked_at for end in ends):
            raise NotProved("a branch reads what others have given", ends[0])
        made_of = {node for family in families for node in family.nodes} | {n for n in looked_at if isinstance(n, Node)}
        if all(self.positions[node] < self.positions[ends[0]] for node in made_of):
            return ends[0]
        for user in (user for end in ends[:-1] for user in end.users):
            if self.positions[user] < self.positions[ends[-1]]:
                raise NotProved(f"`{user.name}` looks at a part of the results before all are there", user)
        return ends[-1]

    # Assertions of sizes

    def assertions_on(self, rows: set[Node], known: dict[Node, int] | None = None) -> set[Node]:
        """What only asserts sizes of rows as Dynamo does: all that follows from it ends in such an assertion.

        known: if given, or in a number that follows from how many rows there are; such numbers are put in.
        """
        found: set[Node] = set()
        for node in reversed(self.graph.nodes):
            if node.op not in ("call_function", "call_method") or node in rows:
                continue
            if node.target is torch.ops.aten._assert_scalar.default or node.target is torch._check:
                if any(self._follows(n, rows) for n in node.all_input_nodes) and self.sizes.imply(node):
                    found.add(node)
            elif node.users and all(user in found for user in node.users) and not _is_tensor_op(node):
                found.add(node)
            elif known is not None and (number := self.sizes.number(node)) is not None and self._follows(node, rows):
                known[node] = number
                found.add(node)
        return found

    def _follows(self, node: Node, rows: set[Node]) -> bool:
        """Whether a number is made of rows, by numbers and elements of tensors."""

        def operands(current: Node) -> list[Node]:
            example = current.meta.get("example_value")
            is_element = isinstance(example, torch.Tensor) and current.target is operator.getitem
            return current.all_input_nodes if current not in rows and (is_symbolic(example) or is_element) else []

        return any(made_of in rows for made_of in reached([node], operands))


def _is_new_memory(node: Node) -> bool:
    """Whether a tensor was made by an operator that returned none of its operands, nor a view of one."""
    if not node.op.startswith("call_f") or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if not isinstance(node.meta.get("example_value"), torch.Tensor) or operator_of(node) == "getitem":
        return False
    return not {key for operand in node.all_input_nodes for key in storages(operand)}.intersection(storages(node))


def _is_tensor_op(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor) and node.target is not operator.getitem


def _needs_gradient(node: Node) -> bool | None:
    """None for what can have none."""
    found = [leaf for leaf in pytree.tree_leaves(node.meta.get("example_value")) if isinstance(leaf, torch.Tensor)]
    floating = [tensor.requires_grad for tensor in found if tensor.dtype.is_floating_point]
    return any(floating) if floating else None
