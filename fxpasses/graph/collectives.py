"""Collectives in a graph: which operators talk to other ranks, and in what order a graph issues them.

Ranks choose alone whether they run a frame captured, broken or in eager mode. The k-th collective of one rank meets the
k-th of the others, whatever it is: so it is an effect, and each way of running the frame issues the same sequence.

Checked on torch 2.11 and 2.13: the namespaces, and `torch.ops._c10d_functional.wait_tensor`, which follows each
collective, and which dead-code elimination keeps, as it does all of `torch.fx.node._side_effectful_functions`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem"}
)
# Of these namespaces, what talks to nobody.
_LOCAL = frozenset({"wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group", "get_remote_tensors"})
KEY = "fxpasses_collective"  # in `node.meta`: the place of a collective in the joint graph, which copies keep
_PURE_NAMESPACES = frozenset({"aten", "prims", "prim"})


class OrderChanged(RuntimeError):
    """A graph would issue other collectives than eager mode, or in another order."""


def namespace(target: Any) -> tuple[str, str] | None:
    """`("_c10d_functional", "all_reduce")` for an operator or one of its overloads; None for anything else."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace, target._schema.name.rpartition("::")[2]
    if isinstance(target, torch._ops.OpOverloadPacket):
        space, _, name = target._qualified_op_name.partition("::")
        return space, name
    return None


def is_collective(target: Any) -> bool:
    """Whether other ranks take part in what a node with this target does."""
    operator = namespace(target)
    if operator is not None:
        return operator[0] in _NAMESPACES and operator[1] not in _LOCAL
    return callable(target) and (getattr(target, "__module__", None) or "").startswith("torch.distributed.")


def may_communicate(target: Any) -> bool:
    """Whether nobody knows that an operator does not: it is a collective, or somebody's own."""
    operator = namespace(target)
    return operator is not None and operator[0] not in _PURE_NAMESPACES and operator[1] not in _LOCAL


def collectives_of(graph: Graph) -> list[Node]:
    """The nodes that issue a collective, in the order in which they run."""
    return [node for node in graph.nodes if node.op == "call_function" and is_collective(node.target)]


def keys_of(graph: Graph) -> list[int]:
    """The keys of a graph's collectives, -1 for one that the joint graph did not have."""
    return [node.meta.get(KEY, -1) for node in collectives_of(graph)]


def is_wait(node: Node) -> bool:
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def sequence(gm: GraphModule) -> list[str]:
    """The collectives that are written in a graph and in the bodies below it, in words, for comparison."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    return [str(node.target) for graph in graphs for node in collectives_of(graph)]


def check_waits(gm: GraphModule) -> None:
    """Raise `OrderChanged` for a collective whose result nobody waits for: a compiler would leave it out."""
    for module in gm.modules():
        for node in collectives_of(module.graph) if isinstance(module, GraphModule) else ():
            space, name = namespace(node.target) or ("", "")
            may_be_dead = space.startswith("_c10d_functional") and not name.endswith("_")
            if may_be_dead and not node.users and node.target not in torch.fx.node._side_effectful_functions:
                raise OrderChanged(f"nobody waits for the result of `{node.name}`")


def communicates(gm: GraphModule) -> bool:
    """Whether a graph as Dynamo captures it may issue collectives: it holds one, or a tensor that is spread over ranks.

    An operator on a `DTensor` issues collectives that no node shows.
    """
    if not spans_ranks():
        return False
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    return any(
        (node.op == "call_function" and is_collective(node.target)) or _is_spread(node.meta.get("example_value"))
        for graph in graphs
        for node in graph.nodes
    )


def spans_ranks() -> bool:
    """Whether this process is one of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _is_spread(example: Any) -> bool:
    return any(hasattr(leaf, "_spec") and hasattr(leaf, "device_mesh") for leaf in pytree.tree_leaves(example))


def issue_in_order(graph: Graph, wanted: Sequence[Node]) -> None:
    """Move nodes of a graph, as few as possible and only up, so that `wanted` run in this order.

    Raises `OrderChanged` where one needs the result of a later one, or where a node would pass a write to memory.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    if all(order[one] < order[next_] for one, next_ in itertools.pairwise(wanted)):
        return
    last = max(order[node] for node in wanted)
    if any(_is_write(node) for node in list(graph.nodes)[:last]):
        raise OrderChanged("a graph that writes to memory among its collectives cannot be put in order")
    before = dict(zip(wanted[1:], wanted, strict=False))
    placed = _sorted(graph.nodes, lambda node: [*node.all_input_nodes, *filter(None, [before.get(node)])])
    cursor = placed[0]
    for node in placed[1:]:
        cursor.append(node)
        cursor = node


def _sorted(nodes: Iterable[Node], needs: Callable[[Node], list[Node]]) -> list[Node]:
    """The nodes in their order, each behind what it needs; raises `OrderChanged` where that is a cycle."""
    done: dict[Node, None] = {}
    for first in nodes:
        pending, open_ = [first], set[Node]()
        while pending:
            node = pending[-1]
            missing = [] if node in done else [other for other in needs(node) if other not in done]
            if not missing:
                done[pending.pop()] = None
                continue
            if node in open_:
                raise OrderChanged(f"`{node.name}` needs the result of a collective that has to follow it")
            open_.add(node)
            pending += missing
    return list(done)


def _is_write(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
