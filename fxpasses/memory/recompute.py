"""Partitions of a joint graph that save less and recompute more, by PyTorch's own solver.

    activation_memory_budget   1.0                  0.5                         0.01
    saved for backward         all that products    what costs most to          next to nothing
                               and softmax need     recompute for its bytes

From one ratio to the next the solver may leave a large step, or all of them: then as much of what the larger ratio
saves is saved as well as fits, what takes longest to recompute for its bytes first.

A partition takes 4 to 8 % of the time in which Inductor compiles the graph, whatever its size. So of a large graph few
are made; how many, its nodes decide, and no clock: equal programs have equal plans.

Recomputed random numbers would be others, where Inductor does not draw them from a seed that is saved; so the results
of operators that draw them are saved, as are those of operators whose effects nobody may repeat, or nobody knows.

Private names, checked on torch 2.11, 2.13 and 2.15: `min_cut_rematerialization_partition` and its setting
`activation_memory_budget`, which may save inputs alone at 0, whatever a node says; and `node.meta["recompute"]`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
import torch.utils._pytree as pytree
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fxpasses.graph.copying import copy_graph_module
from fxpasses.graph.flops import flops_of
from fxpasses.graph.symbols import batch_sizes_of

log = logging.getLogger(__name__)

Partition = tuple[GraphModule, GraphModule]
# From the most that is saved to the least.
RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01)
_FEWEST = 8  # partitions that any graph may have: half of the time in which Inductor compiles it
_NODES = 12_000  # of all partitions of a smaller graph, which take some ten seconds
PEAKS = 100  # of a partition, each of which takes a thirtieth of making it
_ROUNDS = 4
_FLOPS_PER_BYTE = 16  # of processors: so many operations take as long as to read a byte
_FORCED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def partitions(
    joint: GraphModule, partition: Callable[[GraphModule], Partition], undo_checkpoints: bool
) -> Callable[..., Partition | None]:
    """A function that partitions a copy of `joint` at one of the `RATIOS`, and saves nodes of these names in any case;
    None where PyTorch cannot."""

    def at(ratio: float, saving: Collection[str] = ()) -> Partition | None:
        gm = copy_graph_module(joint)
        for node in gm.graph.nodes:
            if undo_checkpoints and node.meta.get("recompute") in _FORCED:
                node.meta = {key: value for key, value in node.meta.items() if key not in ("recompute", "ac_graph_id")}
            if ratio < 1 and "recompute" not in node.meta and (node.name in saving or _happens_once(node)):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        settings: Any = torch._functorch.config
        with settings.patch(activation_memory_budget=ratio):
            try:
                found = partition(gm)
                return found if all(map(_is_savable, found[0].graph.output_node().all_input_nodes)) else None
            except Exception as error:
                if ratio == RATIOS[0]:
                    raise
                log.debug("no partition at %s", ratio, exc_info=error)
                return None

    return at


@dataclass(frozen=True)
class Effort:
    """How much a search may do for a graph. partitions: to make at most. peaks: to predict at most for one partition,
    with other values that move."""

    partitions: int
    peaks: int

    @property
    def ratios(self) -> Sequence[float]:
        """Those to look at. Where they are few, `saving_more` bridges the wider steps."""
        return RATIOS if self.partitions > len(RATIOS) else RATIOS[::2]


def effort(nodes: int) -> Effort:
    """For a graph of so many nodes."""
    return Effort(max(_FEWEST, _NODES // max(nodes, 1)), max(2 * _FEWEST, min(PEAKS, 4 * _NODES // max(nodes, 1))))


def least_recomputing(
    at: Callable[[float], Any], peak_of: Callable[[Any], int], most: int, ratios: Sequence[float] = RATIOS
) -> tuple[float, Any, Any]:
    """The largest ratio whose partition has a peak of at most `most` bytes, with the partition, and that of the next
    larger ratio that was tried.

    If there is none, the ratio with the lowest peak. The peak is taken to fall with the ratio, so that few are tried.
    """
    tried: dict[int, tuple[Any, float]] = {}

    def fits(place: int) -> bool:
        if place not in tried:
            found = at(ratios[place])
            tried[place] = found, math.inf if found is None else peak_of(found)
        return tried[place][1] <= most

    low, high = 0, len(ratios) - 1
    if not fits(low) and fits(high):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
    elif not fits(low):
        any([fits(place) for place in range(high)])  # recomputed at one time, tensors may need more than saved ones
    fitting = [place for place, (_, peak) in tried.items() if peak <= most]
    best = min(fitting) if fitting else min(tried, key=lambda place: tried[place][1])
    larger = max((place for place in tried if place < best and tried[place][0] is not None), default=best)
    return ratios[best], tried[best][0], tried[larger][0]


def saving_more(
    at: Callable[..., Partition | None],
    fits: Callable[[Partition], bool],
    ratio: float,
    found: Partition,
    larger: Partition,
    tries: int,
) -> Partition:
    """`found`, the partition at a ratio, or one that saves in addition what fits of what `larger` saves.

    tries: how many partitions to make at most.
    """
    named = {node.name: node for node in larger[0].graph.output_node().all_input_nodes}
    again = {node.name: node for node in found[1].graph.nodes if node.op == "call_function" and node.name in named}
    costs = {node: _flops(node) / _FLOPS_PER_BYTE + _bytes(node) for node in _operators(found[1])}
    order = sorted(again, key=lambda name: _recomputing(again[name], costs) / max(_bytes(named[name]), 1), reverse=True)
    chosen: list[str] = []
    for _ in range(_ROUNDS):  # each passes over one that does not fit
        low, high = 0, len(order) + 1  # so many of them fit, and do not
        while high - low > 1 and tries > 0:
            tries -= 1
            middle = (low + high) // 2
            tried = at(ratio, frozenset([*chosen, *order[:middle]]))
            if tried is not None and fits(tried):
                low, found = middle, tried
            else:
                high = middle
        chosen, order = [*chosen, *order[:low]], order[low + 1 :]
    return found


def _recomputing(node: Node, costs: Mapping[Node, float]) -> float:
    """What it takes to compute a node of backward from what is saved, in bytes that could be read in that time. costs:
    of each operator alone."""
    cost, seen, stack = 0.0, {node}, [node]
    while stack:
        current = stack.pop()
        cost += costs[current]
        new = [each for each in current.all_input_nodes if each in costs and each not in seen]
        seen.update(new)
        stack += new
    return cost


def _bytes(node: Node) -> int:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    elements = [(batch_sizes_of(leaf), leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return sum(math.prod(sizes) * leaf.element_size() for sizes, leaf in elements if sizes is not None)


@dataclass(frozen=True)
class Recomputed:
    """What backward computes again of forward. flops: floating-point operations; forward: those of all of forward."""

    operators: int
    flops: int
    forward: int


def recomputed(partition: Partition) -> Recomputed:
    again = recomputed_nodes(*partition)
    return Recomputed(len(again), sum(map(_flops, again)), sum(map(_flops, _operators(partition[0]))))


def recomputed_nodes(forward: GraphModule, backward: GraphModule) -> list[Node]:
    """Backward's nodes that forward has as well: PyTorch's partitioner leaves a recomputed node its name."""
    names = {node.name for node in _operators(forward)}
    return [node for node in _operators(backward) if node.name in names]


def _operators(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def _flops(node: Node) -> int:
    return flops_of(node, pytree.tree_leaves(node.meta.get("val")), batch_sizes_of) or 0


def _is_savable(node: Node) -> bool:
    """Whether a result of forward is no tuple. PyTorch saves an operator with several results whole, where it is all
    that has to be saved."""
    return not isinstance(node.meta.get("val"), (list, tuple))


def _happens_once(node: Node) -> bool:
    """Whether running a node again may give another result, or repeat an effect.

    At ratios below 1, PyTorch runs anything again that is not tagged as random: bodies of higher-order operators, and
    operators of other libraries, whose schemas do not say what they do.
    """
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    known = target.namespace in ("aten", "prims", "fxpasses") and target._schema.name not in _RUN_PROGRAMS
    return not known or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags


# Operators of ours that call functions of the program.
_RUN_PROGRAMS = frozenset({"fxpasses::host_function", "fxpasses::loop_over_parts", "fxpasses::part_function"})
