"""A graph and all bodies in it, whatever higher-order operator runs them (`graph/regions.py` has only checkpoints')."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node


def modules_in(gm: GraphModule) -> Iterator[GraphModule]:
    """The graph itself, then the bodies."""
    return (module for module in gm.modules() if isinstance(module, GraphModule))


def nodes_in(gm: GraphModule) -> Iterator[Node]:
    return (node for module in modules_in(gm) for node in module.graph.nodes)
