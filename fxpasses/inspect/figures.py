"""The cost of a stage, counted on its nodes: of the step before and after a pass, and of the prologue.

Bytes and FLOPs are estimates for the traced sizes of an eager forward run of the graph: without backward, without the
tensors that autograd saves, and without a compiler's fusion.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpasses.inspect.dataflow import Dataflow
from fxpasses.inspect.ledger import unbacked_in
from fxpasses.inspect.memory import timeline
from fxpasses.inspect.model import MAIN, Graph, Stage

# A prologue's nodes lack the metadata that identifies host reads; these operators read numbers there.
_READS = frozenset(
    {"item", "tolist", "nonzero", "masked_select", "unique", "unique_consecutive", "_local_scalar_dense"}
)


@dataclass
class Figures:
    """Counts of one stage, bodies included. operators: the nodes that call something.

    host_reads: nodes at which the host waits for data. data_dependent: tensors whose size depends on data. assertions:
    nodes that check a number. inputs_from_prologue: placeholders that the prologue fills. prologue_nodes: operators
    that run once per batch; prologue_reads: host reads among them. flops: of one forward run; products of unknown size
    count as 0. bytes_moved: read and written by operators that allocate memory. peak_bytes: the largest sum of live
    memory, inputs included.
    """

    nodes: int = 0
    operators: int = 0
    host_reads: int = 0
    data_dependent: int = 0
    assertions: int = 0
    inputs_from_prologue: int = 0
    prologue_nodes: int = 0
    prologue_reads: int = 0
    flops: int = 0
    bytes_moved: int = 0
    peak_bytes: int = 0


def figures(stage: Stage, graph: Dataflow | None = None) -> Figures:
    graph = graph or Dataflow(stage)
    found = Figures(peak_bytes=max((point.bytes for point in timeline(graph)), default=0))
    has_prologue = any(graph.in_prologue)
    for number, node in enumerate(graph.nodes):
        calls = node.op.startswith("call")
        if graph.in_prologue[number]:
            found.prologue_nodes += calls
            found.prologue_reads += calls and (node.host_read or node.short_target in _READS)
            continue
        found.nodes += 1
        found.operators += calls
        found.host_reads += node.host_read
        found.data_dependent += calls and any(unbacked_in(size) for value in node.values for size in value.shape)
        found.assertions += node.is_assertion
        found.flops += node.flops or 0
        found.bytes_moved += _bytes_moved(graph, number) if calls else 0
        is_input = graph.region[number] == MAIN and node.op == "placeholder"
        found.inputs_from_prologue += is_input and has_prologue and not node.source_name
    return found


def _bytes_moved(graph: Dataflow, number: int) -> int:
    """The bytes that an operator reads and writes; none for a view, which shares an input's memory."""
    inputs = [value for source in dict.fromkeys(graph.inputs[number]) for value in graph.nodes[source].values]
    outputs = graph.nodes[number].values
    shared = {value.storage for value in inputs}
    if not outputs or all(value.storage in shared for value in outputs):
        return 0
    return sum(value.bytes or 0 for value in [*inputs, *outputs])


def before_and_after(graph: Graph) -> tuple[Figures, Figures]:
    """The figures of a graph as captured, and after the last pass."""
    return figures(graph.captured), figures(graph.final)


def saved_and_moved(graph: Graph) -> tuple[int, int]:
    """Bytes that wait for backward on the device, and off it; 0 if this graph was not partitioned in this process."""
    if graph.partition is None:
        return 0, 0
    moved = sum(transfer.bytes for report in graph.reports for transfer in report.transfers)
    return graph.partition.saved_bytes - moved, moved
