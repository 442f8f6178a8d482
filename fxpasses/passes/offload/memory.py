"""Who shares memory with whom in a partitioned graph, and what is written to. Fake tensors know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

# Higher-order operators that do nothing to their tensors but to run the operator that they are given.
_RUN_AN_OPERATOR = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")


@dataclass
class Memory:
    """Which nodes of a graph share memory: a view's fake tensor lies on its base's storage."""

    owners: dict[int, list[Node]]

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Memory:
        owners: dict[int, list[Node]] = {}
        for node in nodes:
            for storage in storages(node):
                owners.setdefault(storage, []).append(node)
        return cls(owners)

    def sharing(self, node: Node) -> list[Node]:
        """All nodes on the memory of a tensor, itself among them, in the graph's order."""
        return self.owners[storages(node)[0]]


def storages(node: Node) -> list[int]:
    """The storages of a node's result, by identity.

    Private name, checked on torch 2.11 and 2.13: `untyped_storage()._cdata`.
    """
    values = node.meta.get("val")
    leaves = values if isinstance(values, (tuple, list)) else [values]
    return [
        leaf.untyped_storage()._cdata
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]


def written(graph: Graph) -> set[int]:
    """The storages that nodes write to, as their schemas say, and those that other callables are given."""
    return {
        storage
        for node in graph.nodes
        if node.op.startswith("call")
        for changed in _may_change(node)
        for storage in storages(changed)
    }


def _may_change(node: Node) -> list[Node]:
    operator = node.target
    if isinstance(operator, torch._ops.OpOverload):
        schema = operator._schema.arguments
        given = dict(zip((argument.name for argument in schema), node.args, strict=False)) | node.kwargs
        values = [given.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
        return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Node)]
    if getattr(operator, "__name__", "") in (*_RUN_AN_OPERATOR, "getitem"):
        return []
    return node.all_input_nodes
