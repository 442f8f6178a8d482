"""Partitions a joint graph with PyTorch's partitioner or the user's, then orders saved tensors and offloads.

Private names, checked on torch 2.11 and 2.13: `torch._inductor.custom_graph_pass.CustomPartitionerFn`, whose `uuid` is
part of the caches' keys, and `torch._functorch.partitioners.min_cut_rematerialization_partition`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch._inductor.config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import Graph, GraphModule

from fxpasses.compiler.saved_order import order_saved
from fxpasses.fold.outlining import WHOLE, Place
from fxpasses.graph.copying import copy_graph
from fxpasses.offload.inputs import movable
from fxpasses.offload.offload_activations import NAME, OffloadActivations
from fxpasses.offload.saved import Partition
from fxpasses.options import Offload
from fxpasses.passes.pipeline import report_dropped
from fxpasses.report import Report
from fxpasses.version import code_digest

log = logging.getLogger(__name__)


class Planner(Protocol):
    """moving: the names of the values that are to move; None if that is not decided."""

    moving: frozenset[str] | None


class Partitioner(CustomPartitionerFn):
    """Partitions a joint graph, orders the saved values, then offloads.

    options: None to offload nothing. activations: positions of the captured graph's inputs that may be moved. inner:
    the partitioner to call; None is PyTorch's. place: the graph's place in its step. planner: decides, while `inner`
    runs, which of the saved values are to move. fused: whether Inductor compiles the two graphs. reports: the pass's
    report for each partition. If the pass fails, the plain partition stays, with one warning; with `strict` it raises
    `PassError`.
    """

    name = NAME

    def __init__(
        self,
        options: Offload | None,
        strict: bool,
        activations: frozenset[int] = frozenset(),
        inner: CustomPartitionerFn | None = None,
        place: Place = WHOLE,
        planner: Planner | None = None,
        fused: bool = True,
    ) -> None:
        self.options, self.strict, self.activations, self.inner = options, strict, activations, inner
        self.place, self.planner, self.fused = place, planner, fused
        self.reports: list[Report] = []
        self.called = False  # nothing is partitioned for inference, or if a cache has the result

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        self.called = True
        partition: Callable[..., tuple[GraphModule, GraphModule]] = self.inner or min_cut_rematerialization_partition
        outputs = kwargs["num_fwd_outputs"]
        inputs = movable(gm, self.activations, outputs)
        forward, backward = partition(gm, joint_inputs, **kwargs)
        order_saved(forward, backward, outputs)
        if self.options is not None:
            self._offload(self.options, Partition(forward, backward, outputs, inputs))
        return forward, backward

    def _offload(self, options: Offload, partition: Partition) -> None:
        plain: tuple[Graph, Graph] | None = None
        started = time.perf_counter()
        try:
            plain = copy_graph(partition.forward.graph), copy_graph(partition.backward.graph)
            planned = self.planner.moving if self.planner is not None else None
            move = OffloadActivations(options, replayed=replayed(), place=self.place, planned=planned, fused=self.fused)
            report = move(partition)
        except Exception as error:
            report_dropped(NAME, error, self.strict, "all activations where they are")
            if plain is not None:
                partition.forward.graph, partition.backward.graph = plain
            return
        report.seconds = time.perf_counter() - started
        log.info("%s (%.3f s)", report, report.seconds)
        self.reports.append(report)

    def uuid(self) -> Any | None:
        """The key for the caches of Inductor and AOTAutograd: options, this code, the activations, the inner uuid."""
        inner = self.inner.uuid() if self.inner is not None else ""
        if inner is None:
            return None
        options = repr(self.options), self.place.calls, self.place.last
        return ("fxpasses", code_digest(), *options, tuple(sorted(self.activations)), inner)


def replayed() -> bool:
    """Whether Inductor will run the graph that it is compiling as a CUDA graph."""
    inductor: Any = torch._inductor.config
    return bool(inductor.triton.cudagraphs)
