"""A graph and all bodies in it, whatever higher-order operator runs them (`graph/regions.py` has only checkpoints')."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node


def modules_in(gm: GraphModule) -> Iterator[GraphModule]:
    """The graph itself, then the bodies."""
    return (module for module in gm.modules() if isinstance(module, GraphModule))


def has_nested_regions(gm: GraphModule) -> bool:
    """Whether `torch.compiler.nested_compile_region` marks a part of a graph."""
    return any(node.target is torch.ops.higher_order.invoke_subgraph for node in nodes_in(gm))


def nodes_in(gm: GraphModule) -> Iterator[Node]:
    return (node for module in modules_in(gm) for node in module.graph.nodes)
