"""The passes: one line each, in the order in which they run.

A pass is added by its own file and a line in `PASSES`; the classes are loaded when they are needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

CAPTURED, FOLDING, PARTITIONED = "captured", "folding", "partitioned"


@dataclass(frozen=True)
class Entry:
    """A pass.

    where: its class. graphs: the kind of graphs it works on. CAPTURED: Dynamo's graphs; these passes run in order.
    FOLDING: runs after them, and only its result is given up if it does not compile. PARTITIONED: AOTAutograd's graphs;
    the partitioner runs the pass. requires: passes without which it is left out. options: those that no other pass
    reads. not_in_inductor: why Inductor's own hooks cannot run it; "" if they can.
    """

    where: str
    graphs: str = CAPTURED
    requires: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    not_in_inductor: str = ""

    @property
    def name(self) -> str:
        return self.where.split(".")[-2]

    def load(self) -> Any:
        """The class."""
        module, _, name = self.where.rpartition(".")
        return getattr(importlib.import_module(module), name)


PASSES = [
    Entry(
        "fxpasses.metadata.hoist_writes.HoistWrites",
        not_in_inductor="it has to know that the graph is all of the program, which no hook tells",
    ),
    Entry("fxpasses.experts.group_experts.GroupExperts", options=("experts",)),
    Entry(
        "fxpasses.experts.factor_adapters.FactorAdapters",
        requires=("group_experts",),
        options=("adapters",),
    ),
    Entry(
        "fxpasses.rows.live_rows.LiveRows",
        requires=("hoist_metadata",),
        options=("rows",),
        not_in_inductor="which rows are live is known once per batch, from the prologue of hoist_metadata",
    ),
    Entry(
        "fxpasses.loss.chunk_loss.ChunkLoss",
        options=("loss",),
        not_in_inductor="its programs live in the process, and no hook runs for a graph that PyTorch's cache has",
    ),
    Entry(
        "fxpasses.attention.sparsify_attention.SparsifyAttention",
        requires=("hoist_metadata",),
        options=("attention",),
        not_in_inductor="its plans would be made in every layer, without the prologue of hoist_metadata",
    ),
    Entry(
        "fxpasses.metadata.hoist_metadata.HoistMetadata",
        not_in_inductor="its prologue runs once per batch, before the compiled code, and no hook runs there",
    ),
    Entry(
        "fxpasses.attention.omit_masks.OmitMasks",
        not_in_inductor="it leaves out what sparsify_attention makes superfluous",
    ),
    Entry("fxpasses.metadata.coalesce_reads.CoalesceReads"),
    Entry("fxpasses.topk.split_topk.SplitTopk", options=("topk",)),
    Entry(
        "fxpasses.fold.fold_layers.FoldLayers",
        graphs=FOLDING,
        options=("fold",),
        not_in_inductor="it compiles bodies of layers apart, and Inductor calls its hooks when it has the whole graph",
    ),
    Entry("fxpasses.offload.offload_activations.OffloadActivations", graphs=PARTITIONED, options=("offload",)),
]


def names() -> tuple[str, ...]:
    return tuple(entry.name for entry in PASSES)


def selected(chosen: Iterable[str], graphs: str = CAPTURED) -> list[Entry]:
    """The chosen passes on one kind of graphs, without those that lack a pass which they require."""
    chosen = set(chosen)
    return [
        entry
        for entry in PASSES
        if entry.graphs == graphs and entry.name in chosen and chosen.issuperset(entry.requires)
    ]
