"""Collectives in a graph: which operators communicate with other ranks, and in which order a graph issues them.

Each rank decides for itself whether a frame runs captured, with graph breaks or in eager mode. The k-th collective of
one rank is matched with the k-th of the others, whatever it is. So a collective is an effect, and each way to run the
frame must issue the same sequence.

Checked on torch 2.11 and 2.13: the namespaces, and `torch.ops._c10d_functional.wait_tensor`, which follows each
collective and, like all of `torch.fx.node._side_effectful_functions`, survives dead-code elimination.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxpasses.graph.bodies import modules_in

_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem"}
)
# Operators of these namespaces that do not communicate.
_LOCAL = frozenset({"wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group", "get_remote_tensors"})
KEY = "fxpasses_collective"  # in `node.meta`, which copies keep: a collective's position in the joint graph
_PURE_NAMESPACES = frozenset({"aten", "prims", "prim"})


class OrderChanged(RuntimeError):
    """A graph would issue other collectives than eager mode does, or in another order."""


def namespace(target: Any) -> tuple[str, str] | None:
    """`("_c10d_functional", "all_reduce")` for an operator or one of its overloads; None for anything else."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace, target._schema.name.rpartition("::")[2]
    if isinstance(target, torch._ops.OpOverloadPacket):
        space, _, name = target._qualified_op_name.partition("::")
        return space, name
    return None


def is_collective(target: Any) -> bool:
    """Whether a node with this target communicates with other ranks."""
    operator = namespace(target)
    if operator is not None:
        return operator[0] in _NAMESPACES and operator[1] not in _LOCAL
    return callable(target) and (getattr(target, "__module__", None) or "").startswith("torch.distributed.")


def is_all_to_all(target: Any) -> bool:
    """Whether a node with this target sends rows of its first operand to the ranks, by the splits in its third."""
    operator = namespace(target)
    return operator is not None and operator[0] in _NAMESPACES and operator[1] == "all_to_all_single"


def may_communicate(target: Any) -> bool:
    """Whether an operator may communicate: it is a collective, or not PyTorch's own."""
    operator = namespace(target)
    return operator is not None and operator[0] not in _PURE_NAMESPACES and operator[1] not in _LOCAL


def collectives_of(graph: Graph) -> list[Node]:
    """The nodes that issue a collective, in program order."""
    return [node for node in graph.nodes if node.op == "call_function" and is_collective(node.target)]


def keys_of(graph: Graph) -> list[int]:
    """The keys of a graph's collectives, -1 for those absent from the joint graph."""
    return [node.meta.get(KEY, -1) for node in collectives_of(graph)]


def is_wait(node: Node) -> bool:
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def sequence(gm: GraphModule) -> list[str]:
    """The names of the collectives in a graph and its bodies, for comparison."""
    return [str(node.target) for graph in _graphs(gm) for node in collectives_of(graph)]


def check_waits(gm: GraphModule) -> None:
    """Raise `OrderChanged` for a collective whose result is never waited for: a compiler would eliminate it."""
    for node in (node for graph in _graphs(gm) for node in collectives_of(graph)):
        space, name = namespace(node.target) or ("", "")
        may_be_dead = space.startswith("_c10d_functional") and not name.endswith("_")
        if may_be_dead and not node.users and node.target not in torch.fx.node._side_effectful_functions:
            raise OrderChanged(f"nobody waits for the result of `{node.name}`")


def communicates(gm: GraphModule) -> bool:
    """Whether a graph from Dynamo may issue collectives: it contains one, or a `DTensor`.

    An operator on a `DTensor` issues collectives that no node shows.
    """
    if not spans_ranks():
        return False
    graphs = _graphs(gm)
    spread = (_is_spread(node.meta.get("example_value")) for graph in graphs for node in graph.nodes)
    return any(map(collectives_of, graphs)) or any(spread)


def _graphs(gm: GraphModule) -> list[Graph]:
    return [module.graph for module in modules_in(gm)]


def spans_ranks() -> bool:
    """Whether this process is one of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _is_spread(example: Any) -> bool:
    return any(hasattr(leaf, "_spec") and hasattr(leaf, "device_mesh") for leaf in pytree.tree_leaves(example))
