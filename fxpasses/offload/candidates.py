"""Extract from the partitioned graphs the plain data that `choose` decides on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fxpasses.fold.outlining import Place
from fxpasses.graph.aliases import AliasSets, storages, storages_of
from fxpasses.graph.flops import flops_of
from fxpasses.graph.provenance import where
from fxpasses.graph.symbols import bytes_of
from fxpasses.offload.choose import Candidate, Limits, Step
from fxpasses.offload.runtime.calibration import Rates
from fxpasses.offload.runtime.layout import span
from fxpasses.offload.saved import Group, Partition
from fxpasses.offload.schedule import Life
from fxpasses.options import Offload


def limits_of(options: Offload, place: Place) -> Limits:
    """The user's limits for a graph at this place. The tensors that backward needs first in a piece of a step are those
    of the step only if no other piece follows."""
    return Limits(
        options.min_bytes,
        options.keep_last if place.last else 0,
        options.buffers,
        options.device_budget,
        options.host_budget if options.tier == "host" else None,
        keeps_given=place.calls > 0,
    )


def candidates_of(found: Sequence[Group], partition: Partition) -> list[Candidate | None]:
    """Each group as data; None where its size is not known."""
    forward, backward = (AliasSets(g.graph.nodes) for g in (partition.forward, partition.backward))
    return [candidate(group, partition, forward, backward) for group in found]


def candidate(group: Group, partition: Partition, forward: AliasSets, backward: AliasSets) -> Candidate | None:
    """A group as data; None if its size is not known."""
    lead = group.lead
    size = moved_bytes(lead)
    if size is None:
        return None
    positions = {node: number for number, node in enumerate(partition.forward.graph.nodes)}
    first = len(positions)
    later = {node: first + number for number, node in enumerate(partition.backward.graph.nodes)}
    placeholders = {node.name: node for node in partition.backward.graph.find_nodes(op="placeholder")}
    members = [placeholders[node.name] for node in group.saved]
    users = [later[user] for node in members for user in node.users]
    last = [later[user] for node in members for alias in backward.sharing(node) for user in alias.users]
    return Candidate(
        name=lead.name,
        bytes=size,
        made=min(positions[node] for node in forward.sharing(lead)),
        released=positions[departure(lead, forward, positions)],
        needed=min(users),
        done=max(last),
        boundary=_begins_checkpoint(lead, forward),
        given=is_given(lead, forward),
        layer=layer(lead, forward),
        where=where(lead),
    )


def is_given(node: Node, memory: AliasSets) -> bool:
    """Whether a tensor is an input of the graph, or a view of one."""
    return memory.sharing(node)[0].op == "placeholder"


def departure(node: Node, memory: AliasSets, positions: dict[Node, int]) -> Node:
    """The node after which a tensor's copy may start: the last one that uses its memory, other than to return it.

    After that node the memory may be reused. An input's memory belongs to the caller, so its copy starts at once.
    """
    if is_given(node, memory):
        return max((node, *node.graph.find_nodes(op="placeholder")), key=lambda n: positions[n])
    nodes = {user for alias in memory.sharing(node) for user in (alias, *alias.users) if user.op != "output"}
    return max(nodes, key=lambda n: positions[n])


def moved_bytes(node: Node) -> int | None:
    """The bytes from the first to the last element, at the traced sizes."""
    value = node.meta["val"]
    total = bytes_of(value)
    if total and all(type(number) is int for number in (*value.shape, *value.stride())):
        return span(value)
    return total


def _begins_checkpoint(node: Node, memory: AliasSets) -> bool:
    """Whether a checkpoint that a node is not in, where nodes are recomputed, reads it; it may be in another one."""
    own = node.meta.get("ac_graph_id")
    users = {user for alias in memory.sharing(node) for user in alias.users}
    return any(user.meta.get("ac_graph_id") not in (None, own) for user in users)


def layer(node: Node, memory: AliasSets) -> str:
    """The module that computes a tensor, `layers.3`, or else one that uses it."""
    for near in (node, *(user for alias in memory.sharing(node) for user in alias.users)):
        stack = near.meta.get("nn_module_stack") or near.meta.get("fwd_nn_module_stack")
        if stack:
            path = str(list(stack.values())[-1][0])
            path = re.sub(r"(?:\._modules)?\['([^']*)'\]", r".\1", path)
            return re.sub(r"^[LG]\.(self\.)?", "", path)
    return ""


def step_of(partition: Partition, moved: list[Group], rates: Rates) -> Step:
    """The compute time of each node, and the memory that is live besides the candidates."""
    graphs = (partition.forward.graph, partition.backward.graph)
    seconds: list[float] = []
    lives: list[Life] = []
    candidates = {node.name for group in moved for node in (group.lead, *group.saved)}
    first = 0
    total = sum(len(graph.nodes) for graph in graphs)
    forward = len(graphs[0].nodes)
    inputs: set[int] = set()
    for graph in graphs:
        memory = AliasSets(graph.nodes)
        positions = {node: first + number for number, node in enumerate(graph.nodes)}
        seconds += [_seconds(node, rates) for node in graph.nodes]
        for storage, nodes in memory.owners.items():
            if any(node.name in candidates for node in nodes) or storage in inputs:
                continue
            leaves = (leaf for node in nodes for leaf in _leaves(node))
            size = max(bytes_of(leaf) or 0 for leaf in leaves if storage in map(memory.number, storages_of(leaf)))
            begin = positions[nodes[0]]
            end = max(positions[user] for node in nodes for user in (node, *node.users))
            if nodes[0].op == "placeholder" and first == 0:
                begin, end = 0, total - 1  # a parameter or input, which its owner keeps
                inputs.add(storage)
            elif nodes[0].op == "placeholder":
                begin = first  # an incoming gradient, or a saved tensor
            elif end == forward - 1 and first == 0:
                end = total - 1  # saved, or returned to the caller
            lives.append(Life(size, begin, end))
        first += len(graph.nodes)
    return Step(seconds, forward, lives, rates.out, rates.back)


def _seconds(node: Node, rates: Rates) -> float:
    if not node.op.startswith("call") or _is_view(node):
        return 0.0
    leaves = _leaves(node)
    touched = sum(bytes_of(leaf) or 0 for leaf in leaves)
    touched += sum(bytes_of(leaf) or 0 for argument in node.all_input_nodes for leaf in _leaves(argument))
    return max((flops_of(node, leaves) or 0) / rates.flops, touched / rates.memory)


def _is_view(node: Node) -> bool:
    own = set(storages(node))
    return not own or any(own.intersection(storages(argument)) for argument in node.all_input_nodes)


def _leaves(node: Node) -> list[torch.Tensor]:
    value: Any = node.meta.get("val")
    return [leaf for leaf in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(leaf, torch.Tensor)]
