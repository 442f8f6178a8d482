"""Writes in a checkpoint that eager mode makes twice: in forward, and when backward recomputes the body.

The written memory outlives the body: it is an input of the whole graph, such as a buffer. Most writes are known by an
operator's name or schema; others, such as those of `F.batch_norm` to its running statistics, are found by running the
node on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxpasses.graph import effects
from fxpasses.graph.aliases import AliasSets, storages, written_operands
from fxpasses.graph.calls import operator_of
from fxpasses.graph.regions import Region
from fxpasses.graph.traits import WRITES_NOTHING

# Operators with f(f(x)) = f(x), if all other arguments are constants.
IDEMPOTENT = frozenset(
    {"abs_", "ceil_", "clamp_", "clamp_max_", "clamp_min_", "fill_", "floor_", "relu_", "sign_", "tril_", "triu_",
     "trunc_", "zero_"}
)  # fmt: skip


def inputs(graph: Graph) -> set[int]:
    """The storages of a whole graph's inputs, which outlive it."""
    return {key for node in graph.nodes if node.op in ("placeholder", "get_attr") for key in storages(node)}


def is_recomputed(call: Node) -> bool:
    """Whether backward recomputes the checkpoint of a call."""
    results = pytree.tree_leaves(call.meta.get("example_value", call.meta.get("val")))
    return any(isinstance(result, torch.Tensor) and result.requires_grad for result in results)


def is_idempotent(write: Node) -> bool:
    return operator_of(write) in IDEMPOTENT and len(write.all_input_nodes) <= 1


def writes(body: GraphModule, memory: set[int], fake_mode: Any) -> Iterator[Node]:
    """The nodes of a checkpoint's body that write to the storages `memory`."""
    sets = AliasSets(body.graph.nodes)
    held = {sets.number(storage) for storage in memory}
    for node in body.graph.nodes:
        if operator_of(node) in WRITES_NOTHING and "out" not in node.kwargs:
            continue
        touched = [operand for operand in node.all_input_nodes if sets.of(operand) & held]
        if touched and node.op.startswith("call"):
            written = _written(node, body, fake_mode)
            if any(storage in held for operand in written for storage in map(sets.number, operand)):
                yield node


def _written(node: Node, body: GraphModule, fake_mode: Any) -> list[list[int]]:
    """The storages of each operand that a node writes to; none if the operator's effects are not known."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        has_bodies = any(isinstance(getattr(body, str(o.target), None), GraphModule) for o in node.all_input_nodes)
        return [storages(operand) for operand in written_operands(node, body)] if has_bodies else []
    if node.op != "call_module":
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("example_value"))
        touch = effects.touch(node, args, kwargs, fake_mode)
        if touch is not None:
            tensors = [leaf for leaf in effects.leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            return [[effects.storage_key(tensors[position])] for position in touch.writes]
        if "." not in operator_of(node):
            return [storages(operand) for operand in written_operands(node, body)]
    return []


def remaining(gm: GraphModule, fake_mode: Any) -> Node | None:
    """A write in a graph's checkpoint that eager mode makes twice and compiled code once; None if there is none."""
    memory = inputs(gm.graph)
    for region in Region(gm).walk():
        if region.call is not None and is_recomputed(region.call):
            found = next(writes(region.gm, memory, fake_mode), None)
            if found is not None:
                return found
    return None
