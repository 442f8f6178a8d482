"""Whether one program at the end of a loop over experts may replace all branches.

No other node may use the branches' rows, no node may write to their operands, and no node may use the results before
all of them are complete.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fxpasses.experts.anti_unification import Template
from fxpasses.experts.assertions import Sizes
from fxpasses.experts.loops import Loop
from fxpasses.experts.row_partition import Cut, Spans
from fxpasses.graph.aliases import AliasAnalysis, storages, written_operands
from fxpasses.graph.calls import operator_of
from fxpasses.graph.effects import leaves
from fxpasses.graph.modes import autocast_regions
from fxpasses.graph.reachability import reached
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.symbols import is_symbolic
from fxpasses.graph.traits import FACTORIES, SETS_AUTOCAST, SETS_GRADIENTS, SETS_INFERENCE


class Legality:
    """One loop in its graph. inside: the nodes to erase with it. known: numbers that follow from the sizes of all rows.

    at: the end of the loop that the program replaces. sizes: what is known about the numbers of rows.
    """

    def __init__(
        self,
        graph: Graph,
        loop: Loop,
        memory: AliasAnalysis,
        templates: list[Template],
        rows: set[Node],
        cuts: Sequence[Cut | Spans],
        sizes: Sizes,
    ) -> None:
        """rows: the nodes of the branches that hold rows. cuts: the bounds of the rows, if they are already sorted.

        Raises `NotProved` if the loop may not be moved.
        """
        self.graph, self.loop, self.memory, self.sizes = graph, loop, memory, sizes
        self.positions = memory.positions
        self._ends = frozenset(loop.ends)
        own = {node for template in templates for node in template.nodes}
        self._rows = rows.union(*(cut.nodes for cut in cuts), *(merge.parts for merge in loop.merges))
        self._bounds = {node for cut in cuts for node in cut.nodes if cut.reads(node)}
        self.known: dict[Node, int] = {}
        scaffolding = self.assertions_on(self._rows, self.known)
        shared = self._check_users(scaffolding, {total for cut in cuts for total in getattr(cut, "totals", ())})
        # The span of the loop: from the first node that holds rows to the last end.
        first = min(self.positions[node] for node in (*(self._rows - self._bounds), *loop.ends))
        last = max(self.positions[node] for node in loop.ends)
        self._check_between(first, last)
        self._check_counts(cuts, last)
        self._check_before(own, first)
        self._check_buffer(own, first, last)
        self.at = self._place(templates)
        # The operands of the rows (masks, a weight of each expert) are erased with them, unless they have other users.
        made = {node for node in own if node.op.startswith("call") and not written_operands(node)}
        if shared:  # the bounds stay, and so do the assertions about them
            rows = self._rows - self._bounds
            scaffolding = {node for node in scaffolding if self._follows(node, rows)}
        self.inside = self._rows | scaffolding | made

    def _check_users(self, scaffolding: set[Node], totals: set[Node]) -> bool:
        """Whether other rows are cut at the same bounds, as in two projections of the same tokens."""
        shared = False
        for node in self._rows - totals:
            for user in node.users:
                if user in self._rows or user in self._ends or user in scaffolding:
                    continue
                if node not in self._bounds or not _cuts(user):
                    raise NotProved(f"`{user.name}` uses an expert's tokens as well", user)
                shared = True
        return shared

    def _check_counts(self, cuts: Sequence[Cut | Spans], last: int) -> None:
        """Raise `NotProved` if counts are written to between the program's reads and the end of the loop."""
        for cut in cuts:
            read = min((node for node in cut.nodes if cut.reads(node)), key=self.positions.__getitem__)
            writer = self.memory.writer(cut.counts, read, None)
            if writer is not None and self.positions[writer] <= last:
                raise NotProved(f"`{writer.name}` writes to the counts", writer)

    def _check_between(self, first: int, last: int) -> None:
        for node in self.graph.nodes:
            if not first <= self.positions[node] <= last or node in self._ends:
                continue
            name = operator_of(node)
            if name in SETS_AUTOCAST | SETS_INFERENCE or (name in SETS_GRADIENTS and not self._has_all_gradients()):
                raise NotProved(f"`{name}` in the middle of the loop", node)
            if written_operands(node) and node not in self._rows:
                raise NotProved(f"`{node.name}` writes in the middle of the loop", node)

    def _has_all_gradients(self) -> bool:
        """Whether all results of differentiable operands have gradients: `no_grad` in the loop covers only queries."""
        enabled = None
        for node in self.graph.nodes:
            if operator_of(node) in SETS_GRADIENTS:
                enabled = node.args[0]
            if node not in self._rows and node not in self._ends:
                continue
            if written_operands(node) and enabled is not True:
                return False
            # The fake tensor of a view does not show that it lacks a gradient.
            is_view = enabled is False and needs_gradient(node) is True
            loses_gradient = is_view or (operator_of(node) != "detach" and needs_gradient(node) is False)
            if loses_gradient and any(map(needs_gradient, node.all_input_nodes)):
                return False
        return True

    def _check_before(self, own: set[Node], first: int) -> None:
        """Raise `NotProved` if the nodes before the loop, which move to its end, would compute something else there:
        because memory that they use is written in between, or because another autocast casts their operands.
        """
        made = [node for node in own if node.op.startswith("call") and self.positions[node] < first]
        regions = autocast_regions(self.graph)
        end = regions[max(self.loop.ends, key=self.positions.__getitem__)]
        for node in made:
            if regions[node] != end and needs_gradient(node) is not None and operator_of(node) != "getitem":
                raise NotProved(f"`{node.name}`, which the branches use, is computed in another autocast region", node)
        kept = {
            key for node in made for operand in (node, *node.all_input_nodes) for key in self.memory.sets.of(operand)
        }
        start = min((self.positions[node] for node in made), default=first)
        for node in self.graph.nodes:
            between = start <= self.positions[node] < first and node not in self._rows
            if between and kept & self.memory.written_by(node):
                raise NotProved(f"`{node.name}` writes to an operand of the branches", node)

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
        users = [user for holder in {buffer, *chained} for user in holder.users]
        if not self.loop.is_functional:
            users += self.memory.users(buffer, buffer, None)  # the users of its views
        for user in users:
            if user not in chained | parts and first <= self.positions[user] < last:
                raise NotProved(f"`{user.name}` uses the sum before it is complete", user)
        if any(node in own for node in (buffer, *chained)):
            raise NotProved("a branch reads what another has added", buffer)

    def _place(self, templates: list[Template]) -> Node:
        """The last end; with several lists, the first end if all operands of the program are computed before it."""
        ends = sorted(self.loop.ends, key=self.positions.__getitem__)
        if self.loop.kind != "cat" or len(ends) == 1:
            return ends[-1]
        operands = {leaf for template in templates for leaf in leaves((template.args, template.kwargs))}
        if any(end in operands for end in ends):
            raise NotProved("a branch reads the results of others", ends[0])
        nodes = [*(leaf for leaf in operands if isinstance(leaf, Node)), *(n for t in templates for n in t.nodes)]
        if all(self.positions[node] < self.positions[ends[0]] for node in nodes):
            return ends[0]
        for user in (user for end in ends[:-1] for user in end.users):
            if self.positions[user] < self.positions[ends[-1]]:
                raise NotProved(f"`{user.name}` uses a part of the results before all are complete", user)
        return ends[-1]

    # Assertions of sizes

    def assertions_on(self, rows: set[Node], known: dict[Node, int] | None = None) -> set[Node]:
        """The assertions on sizes of rows, as Dynamo makes them, and the nodes that lead to nothing else.

        known: if given, nodes may also lead to numbers that follow from the number of all rows; these are added to it.
        """
        found: set[Node] = set()
        numbers, asserted = self._following(rows)
        seen = numbers | asserted
        queue = [(-self.positions[node], node) for node in seen]  # the last node of the graph first: users before it
        heapq.heapify(queue)
        while queue:
            _, node = heapq.heappop(queue)
            if node in asserted:
                is_found = self.sizes.imply(node)
            else:
                is_found = bool(node.users) and all(user in found for user in node.users) and not _is_tensor_op(node)
                if not is_found and known is not None and node in numbers:
                    number = self.sizes.number(node)
                    is_found = number is not None
                    known |= {} if number is None else {node: number}
            if is_found:
                found.add(node)
                operands = set(node.all_input_nodes) - seen - rows
                operands = {operand for operand in operands if operand.op in _CALLS and operand in self.positions}
                seen |= operands
                for operand in operands:
                    heapq.heappush(queue, (-self.positions[operand], operand))
        return found

    def _following(self, rows: set[Node]) -> tuple[set[Node], set[Node]]:
        """The numbers and elements of tensors that depend on rows through others of their kind, and the assertions on
        either."""
        numbers, asserted = set[Node](), set[Node]()
        waiting = list(rows)
        while waiting:
            for user in waiting.pop().users:
                if user in rows or user in numbers or user.op not in _CALLS or user not in self.positions:
                    continue
                if user.target is torch.ops.aten._assert_scalar.default or user.target is torch._check:
                    asserted.add(user)
                elif is_symbolic(user.meta.get("example_value")) or _is_element(user):
                    numbers.add(user)
                    waiting.append(user)
        return numbers, asserted

    def _follows(self, node: Node, rows: set[Node]) -> bool:
        """Whether a number depends on rows, through numbers and elements of tensors."""

        def operands(current: Node) -> list[Node]:
            is_number = is_symbolic(current.meta.get("example_value")) or _is_element(current)
            return current.all_input_nodes if current not in rows and is_number else []

        return any(found in rows for found in reached([node], operands))


_CALLS = ("call_function", "call_method")


def _is_element(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor) and node.target is operator.getitem


def _cuts(node: Node) -> bool:
    """Whether a node cuts rows at numbers, rather than computing with them."""
    if operator_of(node) == "split":
        return True
    key = node.args[1] if operator_of(node) == "getitem" else None
    return any(isinstance(part, slice) for part in (key if isinstance(key, tuple) else (key,)))


def _is_new_memory(node: Node) -> bool:
    """Whether an operator allocated a tensor: it is neither an operand nor a view of one."""
    if not node.op.startswith("call_f") or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if not isinstance(node.meta.get("example_value"), torch.Tensor) or operator_of(node) == "getitem":
        return False
    return not {key for operand in node.all_input_nodes for key in storages(operand)}.intersection(storages(node))


def _is_tensor_op(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor) and node.target is not operator.getitem


def needs_gradient(node: Node) -> bool | None:
    """Whether a node's result requires a gradient; None if it cannot have one."""
    found = [leaf for leaf in pytree.tree_leaves(node.meta.get("example_value")) if isinstance(leaf, torch.Tensor)]
    floating = [tensor.requires_grad for tensor in found if tensor.dtype.is_floating_point]
    return any(floating) if floating else None


def without_gradient(graph: Graph) -> set[Node]:
    """The nodes under `no_grad` whose results lack a gradient although their operands have one.

    The fake tensor of a view does not show this.
    """
    found, enabled = set(), True
    for node in graph.nodes:
        if operator_of(node) in SETS_GRADIENTS:
            enabled = node.args[0]
        if not enabled and needs_gradient(node) is not None and any(map(needs_gradient, node.all_input_nodes)):
            found.add(node)
    return found
