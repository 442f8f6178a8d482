"""When each tensor leaves and returns, as positions in the two graphs, read from the inserted operators."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from fxpasses.graph.symbols import bytes_of
from fxpasses.offload.runtime import operators
from fxpasses.offload.saved import Partition
from fxpasses.report import Transfer


def transfers(partition: Partition, tier: str) -> Iterator[Transfer]:
    """One transfer for each tensor that moves, in the order in which they leave."""
    forward, backward = partition.forward.graph, partition.backward.graph
    places = {node: number for number, node in enumerate(backward.nodes)}
    begins: dict[str, int] = {}  # by the handle's name: the first `reload` that starts its copy
    needed: dict[str, int] = {}
    for node in backward.find_nodes(op="call_function", target=operators.reload._opoverload):
        handle, upcoming = node.args[0], node.args[1]
        for started in (handle, *upcoming):
            begins.setdefault(started.name, places[node])
        needed[handle.name] = min((places[user] for user in node.users), default=places[node])
    for position, node in enumerate(forward.nodes):
        source = node.args[0] if node.args and node.target is operators.offload._opoverload else None
        if isinstance(source, Node) and node.name in needed:
            size = bytes_of(source.meta["val"]) or 0
            yield Transfer(node.name, size, position, begins[node.name], needed[node.name], tier)
