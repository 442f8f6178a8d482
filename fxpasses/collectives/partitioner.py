"""The partitioner for several ranks: a compiled graph issues eager mode's collectives, in eager mode's order.

AOTAutograd's partitioners merge equal collectives (common subexpressions), omit or repeat dead ones, and reorder those
of backward. That is correct if all ranks run the same graph. Here each rank may break or give up a frame alone, so this
module keeps the inner partitioner from making such changes, and checks its result:

    joint:     r0 = all_reduce(a); r1 = all_reduce(a); ...; s0 = all_reduce(grad)
    forward:   r0, r1                each once, in this order
    backward:  s0                    after those that a checkpoint's recomputation issues again (`eager_sequences.py`)

Private names, checked on torch 2.11 and 2.13: `torch._inductor.custom_graph_pass.CustomPartitionerFn`;
`torch._functorch.partitioners.min_cut_rematerialization_partition`; the marks `partitioner_tag` and `recompute` in a
joint graph's `node.meta`, and placeholders called `tangents`; `torch._functorch.compile_utils.rand_ops`, the operators
that CSE leaves alone. Without the last, graphs with collectives are compiled without CSE.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch import compile_utils
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxpasses.collectives.eager_sequences import Sequences
from fxpasses.collectives.recomputed import Graphs, partition_with_repeats
from fxpasses.graph.aliases import written_operands
from fxpasses.graph.collectives import (
    KEY,
    OrderChanged,
    collectives_of,
    is_collective,
    is_wait,
    keys_of,
    may_communicate,
)
from fxpasses.version import __version__


class CollectivePartitioner(CustomPartitionerFn):
    """Partitions a joint graph; raises `OrderChanged` if eager mode's sequence of collectives cannot be kept.

    eager: eager mode's sequences, for a graph with checkpoints. inner: the partitioner to call; None is PyTorch's.
    """

    def __init__(self, eager: Sequences | None, inner: CustomPartitionerFn | None = None) -> None:
        self.eager, self.inner = eager, inner

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        inner: Callable[..., Graphs] = self.inner or min_cut_rematerialization_partition

        def partition(gm: GraphModule) -> Graphs:
            with _unmerged(gm.graph):
                return inner(gm, joint_inputs, **kwargs)

        collectives = collectives_of(gm.graph)
        if not collectives:
            return partition(gm)
        for place, node in enumerate(collectives):
            node.meta[KEY] = place
        backward = _of_backward(gm.graph, kwargs["num_fwd_outputs"])
        forward = [node for node in collectives if node not in backward]
        gradients = [node for node in collectives if node in backward]
        for node in collectives:
            _pin(node, node in backward)
        if _repeats(self.eager) or any(_is_checkpointed(node) for node in forward):
            wanted = _eager_backward(self.eager, forward, gradients)
            graphs = partition_with_repeats(gm, wanted, partition)
        else:
            wanted = [node.meta[KEY] for node in gradients]
            graphs = partition(gm)
        _put_in_order(graphs[0], [node.meta[KEY] for node in forward], "forward")
        _put_in_order(graphs[1], wanted, "backward")
        return graphs

    def uuid(self) -> Any | None:
        """The key for the caches of Inductor and AOTAutograd."""
        inner = self.inner.uuid() if self.inner is not None else ""
        return None if inner is None else ("fxpasses", __version__, "collectives", repr(self.eager), inner)


def _repeats(eager: Sequences | None) -> bool:
    """Whether a checkpoint issues collectives again. torch 2.11 marks none inside a user's autograd.Function."""
    return eager is not None and any(issued.again is not None for issued in eager.backward)


def _eager_backward(eager: Sequences | None, forward: list[Node], gradients: list[Node]) -> list[int]:
    """The keys of backward's collectives, in eager mode's order; repeated ones keep their keys from forward."""
    if eager is None:
        raise OrderChanged("it is not known which collectives a checkpoint's recomputation issues")
    of_gradients = [issued.operator for issued in eager.backward if issued.again is None]
    if eager.forward != [str(node.target) for node in forward] or of_gradients != [str(n.target) for n in gradients]:
        raise OrderChanged("the joint graph has other collectives than eager mode")
    remaining = iter(gradients)
    nodes = [forward[issued.again] if issued.again is not None else next(remaining) for issued in eager.backward]
    return [node.meta[KEY] for node in nodes]


def _of_backward(graph: Graph, num_fwd_outputs: int) -> set[Node]:
    """The collectives of backward: computed from a gradient, marked as backward's, or placed among such nodes.

    Raises `OrderChanged` for a collective between forward and backward that may belong to either.
    """
    dependent: set[Node] = set()
    last_forward = first_backward = -1
    outputs = pytree.arg_tree_leaves(*graph.output_node().args)[:num_fwd_outputs]
    needed = _ancestors([output for output in outputs if isinstance(output, Node)])
    for place, node in enumerate(graph.nodes):
        mark = str(node.meta.get("partitioner_tag"))
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or mark.endswith("backward") or not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
            if first_backward < 0 and node.op != "placeholder":
                first_backward = place
        elif node in needed or mark.endswith("forward"):
            needed.add(node)
            last_forward = place
    found = set()
    for place, node in enumerate(graph.nodes):
        if not is_collective(node.target) or node in needed or (place < last_forward and node not in dependent):
            continue
        if node not in dependent and not 0 <= first_backward < place:
            raise OrderChanged(f"`{node.name}` may belong to forward or to backward")
        found.add(node)
    return found


def _ancestors(nodes: list[Node]) -> set[Node]:
    found: set[Node] = set()
    while nodes:
        node = nodes.pop()
        if node not in found:
            found.add(node)
            nodes += node.all_input_nodes
    return found


def _pin(node: Node, is_backward: bool) -> None:
    """Keep a collective and the wait for it in only one of the graphs, even if its result is dead."""
    if _is_checkpointed(node):
        return  # backward may issue it again
    for pinned in (node, *(user for user in node.users if is_wait(user))):
        pinned.meta["partitioner_tag"] = "must_be_in_backward" if is_backward else "must_be_in_forward"


def _is_checkpointed(node: Node) -> bool:
    return "ac_graph_id" in node.meta or "recompute" in node.meta


def _put_in_order(gm: GraphModule, keys: Sequence[int], name: str) -> None:
    found = {node.meta.get(KEY): node for node in collectives_of(gm.graph)}
    if Counter(keys_of(gm.graph)) != Counter(keys):
        raise OrderChanged(f"the compiled {name} would issue other collectives than eager mode")
    _issue_in_order(gm.graph, [found[key] for key in keys])
    gm.recompile()


def _issue_in_order(graph: Graph, wanted: Sequence[Node]) -> None:
    """Reorder a graph so that `wanted` run in this order, moving as few nodes as possible, and only up.

    Raises `OrderChanged` if one depends on a later one, or if a node would be moved over a write to memory.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    if all(order[one] < order[next_] for one, next_ in itertools.pairwise(wanted)):
        return
    last = max(order[node] for node in wanted)
    if any(map(written_operands, list(graph.nodes)[:last])):
        raise OrderChanged("a graph that writes to memory between its collectives cannot be reordered")
    before = dict(zip(wanted[1:], wanted, strict=False))
    placed = _sorted(graph.nodes, lambda node: [*node.all_input_nodes, *filter(None, [before.get(node)])])
    cursor = placed[0]
    for node in placed[1:]:
        cursor.append(node)
        cursor = node


def _sorted(nodes: Iterable[Node], needs: Callable[[Node], list[Node]]) -> list[Node]:
    """The nodes in their order, but each after those that it needs; raises `OrderChanged` for a cycle."""
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


_patching = threading.RLock()


@contextlib.contextmanager
def _unmerged(graph: Graph) -> Iterator[None]:
    """Inside, collectives and operators that are not PyTorch's own are not merged as common subexpressions."""
    kept = {node.target.overloadpacket for node in graph.nodes if may_communicate(node.target)}
    known: Any = getattr(compile_utils, "rand_ops", None)
    if not isinstance(known, list):
        functorch: Any = torch._functorch.config
        with functorch.patch(cse=False):
            yield
        return
    with _patching:
        compile_utils.rand_ops = [*known, *kept]
        try:
            yield
        finally:
            compile_utils.rand_ops = known
