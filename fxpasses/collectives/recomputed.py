"""Partitions a joint graph so that backward repeats the collectives that a checkpoint repeats in eager mode.

A partitioner recomputes a value only if backward uses it. Eager mode recomputes everything up to the last tensor that
backward needs, including dead tensors, and tensors of which only a size was used. Before the partition:

    wait = wait_tensor(all_reduce(a))            in a checkpoint; a size that was read from it is saved
    return (y, ..., grad)

After, if eager mode issues it again and the partitioner would not:

    wait = wait_tensor(all_reduce(a))            saved, if needed
    again = wait_tensor(all_reduce(a))           only in backward, and dead there
    return (y, ..., grad, again)                 the partition's backward returns `grad` alone
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence

from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from fxpasses.graph.collectives import KEY, collectives_of, is_wait, keys_of
from fxpasses.graph.copying import copy_graph

Graphs = tuple[GraphModule, GraphModule]
_MOST_ATTEMPTS = 4


def partition_with_repeats(
    gm: GraphModule, wanted: Sequence[int], partition: Callable[[GraphModule], Graphs]
) -> Graphs:
    """`partition(gm)`, with the collectives of the keys `wanted` in backward, in any order, if that is possible."""
    saved: set[int] = set()
    repeated: set[int] = set()
    for _ in range(_MOST_ATTEMPTS):
        copy = GraphModule(gm, copy_graph(gm.graph))
        added = _prepare(copy.graph, saved, repeated)
        graphs = partition(copy)
        _drop_outputs(graphs[1].graph, added)
        have, want = Counter(keys_of(graphs[1].graph)), Counter(wanted)
        if have == want:
            break
        repeated |= (want - have).keys()
        saved |= (have - want).keys() | repeated
    return graphs


def _prepare(graph: Graph, saved: set[int], repeated: set[int]) -> int:
    """Mark collectives to save, and add copies of those to repeat; returns how many outputs it added for them."""
    added: list[Node] = []
    for node in collectives_of(graph):
        key = node.meta[KEY]
        if key in saved:
            for kept in (node, *_results(node)):
                kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if key in repeated:
            added += _repeat(graph, node)
    output = graph.output_node()
    outputs, descriptions = pytree.arg_tree_leaves(*output.args), output.meta.get("desc")
    output.args = ([*outputs, *added],)
    if descriptions is not None:
        leaves = pytree.arg_tree_leaves(*descriptions) if isinstance(descriptions, (tuple, list)) else [descriptions]
        output.meta["desc"] = [*leaves, *leaves[-1:] * len(added)]
    graph.lint()
    return len(added)


def _results(collective: Node) -> list[Node]:
    """The nodes that unpack a collective's results and wait for them."""
    found: list[Node] = []
    for user in collective.users:
        if user.target is operator.getitem:
            found += [user, *_results(user)]
        elif is_wait(user):
            found.append(user)
    return found


def _repeat(graph: Graph, collective: Node) -> list[Node]:
    """Copy a collective and its waits, for backward alone; returns the copies without users."""
    copies: dict[Node, Node] = {}
    chain = [collective, *_results(collective)]
    order = {node: place for place, node in enumerate(graph.nodes)}
    place = max(chain, key=order.__getitem__)
    for node in chain:
        with graph.inserting_after(place):
            place = copies[node] = graph.node_copy(node, lambda operand: copies.get(operand, operand))
        place.meta["partitioner_tag"] = "must_be_in_backward"
        place.meta.pop("recompute", None)
    return [copy for copy in copies.values() if not copy.users]


def _drop_outputs(graph: Graph, count: int) -> None:
    """Drop the last outputs, which `_prepare` added so that they are computed."""
    if not count:
        return
    output = graph.output_node()
    output.args = (tuple(pytree.arg_tree_leaves(*output.args)[:-count]),)
    for name in ("desc", "output_stack_traces"):
        if isinstance(output.meta.get(name), (list, tuple)):
            output.meta[name] = list(output.meta[name])[:-count]
