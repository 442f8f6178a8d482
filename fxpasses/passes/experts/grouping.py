"""One loop over experts, from its branches to one program: check everything, lift, and put the results in place."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxpasses.graph.aliases import AliasAnalysis, storages
from fxpasses.graph.anti_unification import Template, Unifier, members
from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.effects import leaves
from fxpasses.graph.provenance import where
from fxpasses.graph.refusals import NotProved, Refused
from fxpasses.graph.regions import Region
from fxpasses.graph.routing import Routing
from fxpasses.graph.speculation import SpeculatedBranch
from fxpasses.graph.symbols import constant, expression, is_unbacked, symbol
from fxpasses.passes.experts.assertions import Sizes
from fxpasses.passes.experts.batched_values import example_of, parts_of
from fxpasses.passes.experts.batching_rules import lift
from fxpasses.passes.experts.describe import described, spelling
from fxpasses.passes.experts.legality import Surroundings
from fxpasses.passes.experts.lifting import Lifting
from fxpasses.passes.experts.loops import Loop, has_rows
from fxpasses.passes.experts.merging import Merging
from fxpasses.passes.experts.obligations import erase_unused, prove
from fxpasses.passes.experts.row_partition import Cut, Spans, cut_of, spans_of
from fxpasses.passes.experts.selection import asked_by, is_query, selection_of
from fxpasses.report import Reason

_MOST = 2**48  # bytes that a processor can address: no tensor has more rows


class Grouping:
    """A loop whose branches are one program, as far as can be told before it is lifted."""

    def __init__(
        self, region: Region, loop: Loop, memory: AliasAnalysis, fake_mode: Any, skips: dict[int, SpeculatedBranch]
    ) -> None:
        """Raises `NotProved` where the branches are not one program, or the loop may not be moved."""
        self.graph, self.loop, self.memory, self.positions = region.gm.graph, loop, memory, memory.positions
        self.routing = Routing(memory.is_constant)
        self._emit = NodeBuilder(self.graph, fake_mode, loop.merges[0].node, Reason.NOT_ALIKE)
        self.values = Unifier(spans_of).unify([merge.values for merge in loop.merges])
        families = members([self.values])
        self.branch = [family for family in families if any(has_rows(node) for node in family.nodes)]
        self.queries = [(family, *asked_by(family)) for family in families if is_query(family)]
        self.queries += [(key, key, False) for key in [_mask_key(loop, self.values)] if key is not None]
        self.selection = selection_of(self.routing, *self.queries[0][1:]) if self.queries else None
        parts = [(family, cut) for family in families if (cut := cut_of(family)) is not None]
        cuts = [cut for _, cut in parts]
        self.cut = cuts[0] if cuts else None
        self.totals = {total: cut for cut in cuts for total in cut.totals}
        spans = [leaf for leaf in leaves(self.values) if isinstance(leaf, Spans)]
        if self.selection is None and self.cut is None:
            raise NotProved("the branches ask for no tokens")
        rows = {node for family in self.branch for node in family.nodes}
        rows.update(*(cut.nodes for cut in cuts), *(span.nodes for span in spans))
        totals = set(self.totals)
        self.around = Surroundings(self.graph, loop, memory, families, rows, totals, self._sizes(parts))
        ends = {*loop.ends, *(part for merge in loop.merges for part in merge.parts)}
        own, selected = self.around.inside | ends, self.selection or self.cut
        self.proof = prove(self.graph, skips, loop, own, self.routing, selected, fake_mode)

    def experts(self) -> Any:
        """Which experts the branches are of."""
        selection = self.selection
        return (selection.first, selection.step, selection.count) if selection is not None else None

    def _sizes(self, cuts: list[tuple[Template, Cut]]) -> Sizes:
        """How many rows the experts have, as the graph's assertions speak of them."""
        counts = [sympy.Symbol(f"rows_{e}", integer=True, nonnegative=True) for e in range(len(self.loop.merges))]
        known: dict[Any, Any] = {}

        def learn(family: Template, width: int | float = 1) -> None:
            for node, count in zip(family.nodes, counts, strict=True):
                found = parts_of(node.meta["example_value"])[0]
                size = next(filter(is_unbacked, found.shape), None) if isinstance(found, torch.Tensor) else None
                if symbol(size) is not None:
                    known.setdefault(symbol(size), count * width)

        if self.selection is None:
            for family, _ in cuts:
                learn(family)
            size = expression(cuts[0][1].rows.meta["example_value"].shape[0])
            # The parts are all rows: the split checks it, or else it must be known for the loop to be lifted.
            total = None if self.totals else size
            return Sizes(counts, known, size if isinstance(size, int) else None, total)
        bounds: list[int] = []  # all queries of a loop find as many tokens, so each is bounded by the smallest mask
        for family, mask, spread in self.queries:
            if isinstance(mask, Template):
                sizes = mask.example.shape[:-1] if spread else mask.example.shape
                bounds += [math.prod(sizes)] if all(isinstance(size, int) for size in sizes) else []
            width = constant(example_of(family.args[0]).shape[-1]) if spread else 1
            if width is not None:
                learn(family, width)
        total = expression(self.selection.ids.meta["example_value"].numel()) if self.selection.covers else None
        return Sizes(counts, known, min(bounds, default=_MOST), total)

    def run(self) -> str:
        """What was done, in words; raises `Refused`, and leaves the graph as it was."""
        lifting, around = Lifting(self._emit, self.routing, lift), self.around
        question = self.queries[0][0].nodes[0] if self.queries else self.cut.nodes[0]  # type: ignore[union-attr]
        last = max(self.loop.ends, key=self.positions.__getitem__)
        place, words = where(last), spelling(question, self.loop.kind, len(self.loop.merges))
        routing = described(len(self.loop.merges), self.selection.top if self.selection is not None else None)
        try:
            with self.graph.inserting_before(around.at):
                if self.selection is not None:
                    lifting.begin(self.selection)
                elif self.cut is not None:
                    lifting.begin_cut(self.cut)
                # In the order of the program, so that what is written in place is written before it is read.
                for family in sorted(self.branch, key=lambda family: self.positions[family.nodes[0]]):
                    lifting.lift(family)
                results = Merging(lifting, self.loop).results(self.values)
                if self.loop.lists:
                    results = [self._own_memory(*pair) for pair in zip(self.loop.lists, results, strict=True)]
            known = around.known | {total: lifting.total(cut) for total, cut in self.totals.items()}
        except Refused:
            self._emit.undo()
            raise
        self._replace(results, last)
        left = self._erase(around.inside - known.keys())
        for number, value in known.items():
            self._emit.settle(number, value)
        self._erase(left | known.keys())
        self._emit.update(results)
        erase_unused(self.graph, self.proof.conditions - around.inside, around.assertions_on)
        return f"{words} at {place} → level 2, one grouped program ({routing})"

    def _own_memory(self, concatenated: Node, result: Node) -> Node:
        """`torch.cat` gives new memory, to which the program may write; rows may be those of others."""
        theirs = {key for node in self.graph.nodes if not self._emit.made(node) for key in storages(node)}
        given = any(user.op == "output" for user in self.memory.users(concatenated, concatenated, None))
        if given or not self.memory.is_constant(concatenated) or theirs.intersection(storages(result)):
            return self._emit("clone", (result,))
        return result

    def _replace(self, results: list[Node], last: Node) -> None:
        """Let the rest of the graph look at the results where it looked at those of the branches."""
        loop, ends = self.loop, self.loop.ends
        if loop.lists:
            for node, result in zip(loop.lists, results, strict=True):
                node.replace_all_uses_with(result)
        elif loop.kind not in ("setadd", "assign"):
            # In place, the result of any branch is the buffer, whoever looks at it later.
            for node in [last] if loop.is_functional else ends:
                node.replace_all_uses_with(results[0], lambda user: user not in ends)
        for node in dict.fromkeys(reversed(ends)):
            self.graph.erase_node(node)

    def _erase(self, inside: set[Node]) -> set[Node]:
        """Erase what nobody uses any more; returns the others."""
        left = set()
        for node in sorted(inside, key=lambda node: -self.positions[node]):
            if node.users:
                left.add(node)
            else:
                self.graph.erase_node(node)
        return left


def _mask_key(loop: Loop, values: Any) -> Template | None:
    """The mask of `out[mask] = y`, which asks for tokens as well."""
    if loop.kind not in ("setadd", "assign"):
        return None
    key = values[0]
    return key if isinstance(key, Template) and getattr(key.example, "dtype", None) is torch.bool else None
