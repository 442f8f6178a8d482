"""Whether a batch has enough dead rows for packing to pay off: each of the two kinds of batches has a graph.

The graph is guarded by the choice that was made for its batch, so a batch of the other kind makes the other graph, and
there is no third. The guard counts rows as the prologue does, once per batch.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxpasses.base.containment import contained
from fxpasses.dynamo.checks import Check
from fxpasses.dynamo.dynamo_names import guard_compiled_graph
from fxpasses.dynamo.guarding import can_guard
from fxpasses.graph.provenance import input_sources
from fxpasses.graph.symbols import free_symbols, is_unbacked, note_batch_values, symbol
from fxpasses.graph.values import Ref
from fxpasses.metadata.draft import Draft, Extra
from fxpasses.metadata.runtime.prologue import OperatorFailed, Prologue
from fxpasses.rows.operators import NotPacked
from fxpasses.rows.row_stats import count

# The share of live rows from which on packing takes longer than the products that it saves.
MOST_LIVE = 0.9


@dataclass(frozen=True, eq=False)
class RowCounts:
    """Counts the rows of a batch.

    prologue: computes the size of each set, and the number of all rows. positions, sources: those of the graph's inputs
    that it reads. shares: for each set, its share of the step's products; the other products are on all rows. symbols:
    of the sizes of the sets. all_rows: whether values of all rows are computed beside them, whose number may change.
    """

    prologue: Prologue
    positions: tuple[int, ...]
    sources: tuple[str, ...]
    shares: tuple[float, ...]
    symbols: tuple[Any, ...] = ()
    all_rows: bool = False
    _counted: list[tuple[Any, tuple[float, float]]] = field(default_factory=list)  # inputs, and a guard's result

    def __reduce__(self) -> tuple[Any, ...]:
        return RowCounts, (self.prologue, self.positions, self.sources, self.shares, self.symbols, self.all_rows)

    def of_step(self, inputs: Sequence[Any]) -> tuple[float, float]:
        """`parts`, taken from the guard of this step, if it has computed them."""
        counted, self._counted[:] = self._counted[:], []
        for of, found in counted:
            if all(own() is other for own, other in zip(of, inputs, strict=True)):
                return found
        return self.parts(inputs)

    def live(self, inputs: Sequence[Any]) -> float:
        """The share of the rows that is computed, weighted by their products; infinite if they cannot be packed.

        inputs: those at `sources`.
        """
        return self.parts(inputs)[0]

    def parts(self, inputs: Sequence[Any]) -> tuple[float, float]:
        """`live`, and the share of the rows that nothing reads. inputs: those at `sources`."""
        try:
            *sets, rows = self.prologue(dict(zip(self.positions, inputs, strict=True)))
        except OperatorFailed as error:
            if isinstance(error.__cause__, NotPacked):
                return math.inf, 0.0
            raise
        on_all = 1 - sum(self.shares)
        packed = sum(size * share for size, share in zip(sets, self.shares, strict=True)) / max(rows, 1)
        dead = 0.0 if on_all > 1e-6 else max(0.0, 1 - max(sets) / max(rows, 1))
        return packed + on_all, dead

    def computed(self, *inputs: Any) -> tuple[float, ...]:
        """The size of each set, and the number of all rows, if values of all are computed; nothing for a batch that
        the graph is not for. inputs: those at `sources`.

        Memory does not follow the rows' products: the logits of labelled rows may take more than all layers.
        """
        try:
            *sets, rows = self.prologue(dict(zip(self.positions, inputs, strict=True)))
        except OperatorFailed:  # the guards of sizes or of the kind of batch refuse it, before or later
            return ()
        return (*sets, rows) if self.all_rows else tuple(sets)

    def of_packed(self, gm: GraphModule) -> RowCounts:
        """These, knowing whether `gm`, the packed graph, computes values of all rows."""
        return replace(self, all_rows=any(map(_has_all_rows, gm.graph.nodes)))

    def note_sizes(self, inputs: Sequence[Any], gm: GraphModule) -> None:
        """Have the sizes of the sets known to what asks for the sizes of the batch being traced. gm: the packed graph;
        inputs: those at `sources`."""
        *sets, _ = self.prologue(dict(zip(self.positions, inputs, strict=True)))
        examples = (node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder"))
        if (example := next((x for x in examples if isinstance(x, torch.Tensor) and is_unbacked(x)), None)) is not None:
            note_batch_values(example, dict(zip(self.symbols, sets, strict=True)))

    def packs(self, inputs: Sequence[Any]) -> bool:
        found = self.parts(inputs)
        if all(isinstance(x, torch.Tensor) for x in inputs):
            self._counted[:] = [([weakref.ref(x) for x in inputs], found)]
        return found[0] < MOST_LIVE


def _has_all_rows(node: Node) -> bool:
    """Whether a node computes numbers for a batch of any size, and not for some of its rows."""
    value = node.meta.get("example_value")
    if node.op == "placeholder" or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return value.dim() > 2 and bool(free_symbols(value)) and not is_unbacked(value)


def row_counts(draft: Draft | None, gm: GraphModule) -> RowCounts | None:
    """The object that counts a packed graph's rows; None if the graph was not packed, or cannot be guarded.

    draft: its prologue. gm: the captured graph.
    """
    if draft is None or not can_guard():
        return None
    target = torch.ops.fxpasses.live_rows.default
    entries = [entry for entry in draft.table.entries if entry.node.target is target]
    if not entries:
        return None
    sets = tuple(Extra(Ref(entry.number, entry.number), dimension=0) for entry in entries)
    rows = Extra(entries[0].args[0], dimension=0)
    program = Draft(draft.table, draft.inputs, (*sets, rows), ()).program()
    sources = input_sources(gm)
    positions = tuple(sorted({*program.host_inputs, *program.device_inputs}))
    if not all(sources[position] for position in positions):
        return None
    shares = tuple(float(entry.args[1]) for entry in entries)
    symbols = tuple(symbol(entry.fake.shape[0]) for entry in entries)
    return RowCounts(Prologue(program), positions, tuple(sources[position] for position in positions), shares, symbols)


def counted(compiled: Callable[..., Any], counts: RowCounts) -> Callable[..., Any]:
    """`compiled`, a graph for either kind of batch; its steps count in `fxpasses.row_stats()`."""

    def run(*inputs: Any) -> Any:
        if not counts.prologue.has_fake_root(inputs):
            with contained("counting rows"):
                live, dead = counts.of_step([inputs[position] for position in counts.positions])
                count(min(1.0, live), dead)
        return compiled(*inputs)

    return run


def guard(counts: RowCounts, packed: bool, code: CodeType | None) -> None:
    """Called while Dynamo compiles a graph: guard that all its batches are of one kind."""

    def is_alike(*inputs: Any) -> bool:
        try:
            return counts.packs(inputs) is packed
        except OperatorFailed:  # a batch of other sizes, which the guards of sizes refuse later
            return False

    text = f"{'less' if packed else 'no less'} than {MOST_LIVE:.0%} of the rows can reach the loss"
    check = Check(is_alike, None, code, "how many rows are needed")
    guard_compiled_graph(check, list(counts.sources), text)
