"""Backward takes values that forward computed from an input before overwriting it, instead of recomputing them.

    def forward(self, x):
        self.steps += 1
        return x / (1 + self.steps)

The joint graph ends in `copy_(steps, add)`, with `add = steps + 1`. PyTorch's min-cut partitioner may save `steps` and
have backward add 1 again: `steps` is overwritten by then, so the gradient is silently wrong, on torch 2.13, under stock
Inductor as well ([docs/upstream.md](../docs/upstream.md)).

Private names, checked on torch 2.11 and 2.13: `torch._inductor.custom_graph_pass.CustomPartitionerFn`,
`torch._functorch.partitioners.min_cut_rematerialization_partition`, and the mark `recompute` in a joint graph's
`node.meta`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxpasses.graph.aliases import AliasSets, written_operands
from fxpasses.graph.bodies import nodes_in
from fxpasses.version import __version__


def writes_in_place(gm: GraphModule) -> bool:
    """Whether a graph that Dynamo captured, or the body of a checkpoint in it, writes to anything in place."""
    return any(map(written_operands, nodes_in(gm)))


class SavingPartitioner(CustomPartitionerFn):
    """Partitions a joint graph in which nothing is recomputed from overwritten inputs. inner: None is PyTorch's."""

    def __init__(self, inner: CustomPartitionerFn | None = None) -> None:
        self.inner = inner

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        partition: Callable[..., Any] = self.inner or min_cut_rematerialization_partition
        for node in results_of_overwritten(gm.graph):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)  # a checkpoint's policy takes precedence
        return partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any | None:
        """The key for the caches of Inductor and AOTAutograd."""
        inner = self.inner.uuid() if self.inner is not None else ""
        return None if inner is None else ("fxpasses", __version__, "overwritten inputs", inner)


def results_of_overwritten(graph: Graph) -> list[Node]:
    """The nodes of a joint graph that read an overwritten input, or a view of one, and have memory of their own."""
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    overwritten = [node.args[0] for node in writes if node.args[0].op == "placeholder"]
    if not overwritten:
        return []
    sets = AliasSets(graph.nodes)
    on_memory = {node for each in overwritten for number in sets.of(each) for node in sets.owners[number]}
    readers = dict.fromkeys(user for node in on_memory for user in node.users if user.op == "call_function")
    return [node for node in readers if node not in on_memory and node not in writes]
