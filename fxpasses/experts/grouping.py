"""One loop over experts, from its branches to one program: check legality, lift, and replace the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxpasses.experts.anti_unification import Template, Unifier, members
from fxpasses.experts.assertions import Sizes
from fxpasses.experts.batched_values import example_of, is_tensor, parts_of
from fxpasses.experts.batching_rules import lift
from fxpasses.experts.branches import Marked
from fxpasses.experts.describe import describe_loop, describe_routing
from fxpasses.experts.legality import Legality, needs_gradient, without_gradient
from fxpasses.experts.lifting import Lifting
from fxpasses.experts.loops import Loop, has_rows
from fxpasses.experts.merging import Merging
from fxpasses.experts.obligations import erase_unused, prove
from fxpasses.experts.routing import Routing
from fxpasses.experts.routing_facts import Mask
from fxpasses.experts.row_partition import Cut, Spans, cut_of, spans_of
from fxpasses.experts.selection import is_mask, is_query, mask_of, selection_of
from fxpasses.graph.aliases import AliasAnalysis, storages, written_operands
from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.effects import leaves
from fxpasses.graph.provenance import where
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import constant, expression, is_unbacked, symbol
from fxpasses.graph.traits import PRODUCTS
from fxpasses.report import Reason

_MOST = 2**48  # bytes that a processor can address, so more than the rows of any tensor


class Grouping:
    """A loop whose branches have a common template and which may be moved; lifting may still refuse it."""

    def __init__(
        self,
        region: Region,
        loop: Loop,
        memory: AliasAnalysis,
        marked: Marked,
        fake_mode: Any,
    ) -> None:
        """Raises `NotProved` if the branches are not one program, or the loop may not be moved."""
        self.graph, self.loop, self.memory, self.positions = region.gm.graph, loop, memory, memory.positions
        self.routing = Routing(memory.is_constant)
        self._emit = NodeBuilder(self.graph, fake_mode, loop.merges[0].node, Reason.NOT_ALIKE)
        self._without_gradient = without_gradient(self.graph)
        self.values = Unifier(spans_of, self._is_own, self._repeats).unify([merge.values for merge in loop.merges])
        templates = members([self.values])
        self.branch = [template for template in templates if any(has_rows(node) for node in template.nodes)]
        self._check_order()
        self._check_gradients(templates)
        self.queries = [(template, *mask_of(template)) for template in templates if is_query(template)]
        if loop.kind in ("setadd", "assign") and is_mask(key := self.values[0]):  # `out[mask] = y` is a query as well
            self.queries.append((key, key, False))
        self.selection = selection_of(self.routing, *self.queries[0][1:]) if self.queries else None
        parts = [(template, cut) for template in templates if (cut := cut_of(template)) is not None]
        cuts = [cut for _, cut in parts]
        self.cut = cuts[0] if cuts else None
        self.totals = {total: cut for cut in cuts for total in cut.totals}
        spans = [leaf for leaf in leaves(self.values) if isinstance(leaf, Spans)]
        if self.selection is None and self.cut is None:
            raise NotProved("the branches query no tokens")
        rows = {node for template in self.branch for node in template.nodes}
        self.legality = Legality(self.graph, loop, memory, templates, rows, [*cuts, *spans], self._sizes(parts))
        ends = {*loop.ends, *(part for merge in loop.merges for part in merge.parts)}
        own, selected = self.legality.inside | ends, self.selection or self.cut
        self.proof = prove(marked, loop, own, self.routing, selected, fake_mode)

    def _is_own(self, node: Node) -> bool:
        """In a loop of one branch: whether a node is the branch's own, a mask or a tensor that holds its rows."""
        return has_rows(node) or isinstance(self.routing.of(node), Mask)

    def _repeats(self, nodes: Sequence[Node]) -> bool:
        """Whether a computation that branches repeat has one value, with a gradient in all of them or in none."""
        first, last = (choose(nodes, key=self.positions.__getitem__) for choose in (min, max))
        if len({node in self._without_gradient for node in nodes}) > 1:
            return False
        held = [node for node in (first, *first.all_input_nodes) if is_tensor(node)]
        return all(self.memory.writer(node, first, last) is None for node in held)

    def _check_gradients(self, templates: list[Template]) -> None:
        """Raise `NotProved` if an operand has no gradient, and the program at the loop's end would give it one."""
        own = {node for template in templates for node in template.nodes if template not in self.branch}
        lost = sorted(own & self._without_gradient, key=self.positions.__getitem__)
        if lost and any(map(needs_gradient, self.loop.ends)):
            raise NotProved(f"`{lost[0].name}` is computed without a gradient", lost[0])

    def _check_order(self) -> None:
        """Raise `NotProved` if branches write in place, and one has another node order or aliases than the first."""
        if not any(written_operands(template.nodes[0]) for template in self.branch):
            return
        for number in range(len(self.branch[0].nodes)):
            place = {id(t): self.positions[t.nodes[number]] for t in self.branch}
            ordered = sorted(self.branch, key=lambda t: place[id(t)])
            if len(set(place.values())) < len(place) or ordered != self._in_order():
                raise NotProved("branches that write in place in other orders", self.branch[0].nodes[number])

    def _in_order(self) -> list[Template]:
        return sorted(self.branch, key=lambda template: self.positions[template.nodes[0]])

    @property
    def multiplies(self) -> bool:
        """Whether the branches compute products, which cost more than everything else."""
        return any(template.name in PRODUCTS for template in self.branch)

    def experts(self) -> Any:
        """The experts of the branches: (first, step, count); None if the rows are cut by counts."""
        selection = self.selection
        return (selection.first, selection.step, selection.count) if selection is not None else None

    def _sizes(self, cuts: list[tuple[Template, Cut]]) -> Sizes:
        """The numbers of the experts' rows, in terms of the symbols that the graph's assertions use."""
        counts = [sympy.Symbol(f"rows_{e}", integer=True, nonnegative=True) for e in range(len(self.loop.merges))]
        known: dict[Any, Any] = {}

        def learn(template: Template, width: int | float = 1) -> None:
            for node, count in zip(template.nodes, counts, strict=True):
                found = parts_of(node.meta["example_value"])[0]
                size = next(filter(is_unbacked, found.shape), None) if isinstance(found, torch.Tensor) else None
                if symbol(size) is not None:
                    known.setdefault(symbol(size), count * width)

        if self.selection is None:
            for template, _ in cuts:
                learn(template)
            size = expression(cuts[0][1].rows.meta["example_value"].shape[0])
            # The parts cover all rows: the split checks it, or lifting requires it to be known.
            total = None if self.totals else size
            return Sizes(counts, known, size if isinstance(size, int) else None, total)
        bounds: list[int] = []  # all queries of a loop find the same number of tokens, so the smallest mask bounds it
        for template, mask, spread in self.queries:
            if isinstance(mask, Template):
                sizes = mask.example.shape[:-1] if spread else mask.example.shape
                bounds += [math.prod(sizes)] if all(isinstance(size, int) for size in sizes) else []
            width = constant(example_of(template.args[0]).shape[-1]) if spread else 1
            if width is not None:
                learn(template, width)
        total = expression(self.selection.ids.meta["example_value"].numel()) if self.selection.covers else None
        return Sizes(counts, known, min(bounds, default=_MOST), total)

    def run(self) -> str:
        """Rewrite the loop; returns a description. Raises `Refused`, and leaves the graph as it was."""
        lifting = Lifting(self._emit, self.routing, lift, skips=bool(self.proof.discharged))
        legality = self.legality
        query = self.queries[0][0].nodes[0] if self.queries else self.cut.nodes[0]  # type: ignore[union-attr]
        last = max(self.loop.ends, key=self.positions.__getitem__)
        spelling = f"{describe_loop(query, self.loop.kind, len(self.loop.merges))} at {where(last)}"
        routing = describe_routing(len(self.loop.merges), self.selection.top if self.selection is not None else None)
        with self._emit.before(legality.at):
            if self.selection is not None:
                lifting.begin(self.selection)
            elif self.cut is not None:
                lifting.begin_cut(self.cut)
            # In program order, so that writes in place come before the reads that depend on them.
            for template in self._in_order():
                lifting.lift(template)
            results = Merging(lifting, self.loop).results(self.values)
            if self.loop.lists:
                results = [self._own_memory(*pair) for pair in zip(self.loop.lists, results, strict=True)]
            known = legality.known | {total: lifting.total(cut) for total, cut in self.totals.items()}
        self._replace(results, last)
        shared = {operand for node in legality.inside for operand in node.all_input_nodes} - legality.inside
        left = self._erase(legality.inside - known.keys())
        for number, value in known.items():
            self._emit.settle(number, value)
        self._erase(left | known.keys())
        self._emit.update(results)
        # The nodes that masks were computed from, such as `one_hot`, and what branches asked of experts' numbers; and
        # conditions, unless an earlier loop had them.
        unused = {node for node in shared | (self.proof.idle - legality.inside) if not node.users}
        unused |= self.proof.conditions - legality.inside
        erase_unused(self.graph, unused.intersection(self.graph.nodes), legality.assertions_on)
        read = " and a copy of its offsets to the host" if lifting.offsets_on_host is not None else ""
        return f"{spelling} → level 2, one grouped program{read} ({routing})"

    def _own_memory(self, concatenated: Node, result: Node) -> Node:
        """The result; a copy if the program writes to or returns the result of `torch.cat`, or if it has aliases."""
        theirs = {key for node in self.graph.nodes if not self._emit.made(node) for key in storages(node)}
        escapes = any(user.op == "output" for user in self.memory.users(concatenated, concatenated, None))
        if escapes or not self.memory.is_constant(concatenated) or theirs.intersection(storages(result)):
            return self._emit("clone", (result,))
        return result

    def _replace(self, results: list[Node], last: Node) -> None:
        """Replace the branches' results in the rest of the graph."""
        loop, ends = self.loop, self.loop.ends
        if loop.lists:
            for node, result in zip(loop.lists, results, strict=True):
                node.replace_all_uses_with(result)
        elif loop.kind not in ("setadd", "assign"):
            # If branches merge in place, the result of any of them is the buffer, and may be used later.
            for node in [last] if loop.is_functional else ends:
                node.replace_all_uses_with(results[0], lambda user: user not in ends)
        for node in dict.fromkeys(reversed(ends)):
            self.graph.erase_node(node)

    def _erase(self, inside: set[Node]) -> set[Node]:
        """Erase the unused nodes; returns the others."""
        left = set()
        for node in sorted(inside, key=lambda node: -self.positions[node]):
            if node.users:
                left.add(node)
            else:
                self.graph.erase_node(node)
        return left
