"""A step of a graph on fake tensors: its FLOPs, what forward keeps for backward, and the memory that is live in it.

AOTAutograd makes forward and backward of a graph, with PyTorch's own partitioner, for the sizes of one batch and in a
fake mode of its own, so that nothing of the user's compilation changes. The captured graph and the one after the passes
are measured alike.

Private names, checked on torch 2.11 and 2.13: `torch._functorch.aot_autograd.aot_module_simplified`, `torch._guards`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg
from torch.utils import flop_counter

import fxpasses.attention.runtime.operators  # noqa: F401 (registers the operators)
from fxpasses.base import sample
from fxpasses.base.sample import Form
from fxpasses.graph import flop_formulas
from fxpasses.graph.aliases import storages
from fxpasses.graph.effects import regions
from fxpasses.graph.symbols import bytes_of, in_batch
from fxpasses.inspect.model import Step
from fxpasses.inspect.snapshot import leaves_of
from fxpasses.metadata.runtime.prologue import autocast_state

MOST_NODES = 4000  # of a graph: tracing it takes some milliseconds a node
_MOST_POINTS = 400


class DryRun:
    """A graph that can be measured later. It keeps the graph, and so the parameters that it refers to.

    provided: how many of the last inputs the prologue provides. Gradients and autocast are as where this is made.
    """

    def __init__(self, gm: GraphModule, provided: int = 0) -> None:
        self._provided = provided
        self._examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        self._gm = GraphModule(gm, _copy(gm.graph)) if len(gm.graph.nodes) <= MOST_NODES else None
        self._training = torch.is_grad_enabled()
        self._autocast = [(*state, torch.is_autocast_cache_enabled()) for state in autocast_state()]

    def step(self, share: float) -> Step | None:
        """The figures; None if the graph is too large, if the batch for which it was compiled was never run, or if it
        has sizes that operators of the graph find out, as those of experts' tokens are.

        share: of the pairs of attention by a plan, those that are computed. Raises if the graph cannot be traced
        without numbers that only a batch knows.
        """
        if self._gm is None:
            return None
        flop_formulas.register()
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        from_prologue = sample.provided(sample.shape_env_of(self._examples)) if self._provided else []
        if from_prologue is None or len(from_prologue) != self._provided:
            return None
        given = [*self._examples[: len(self._examples) - self._provided], *from_prologue]
        forward, backward = self._traced(self._gm, mode, [_static(value, mode) for value in given])
        if not all(_is_known(node) for gm in (forward, backward) if gm is not None for node in gm.graph.nodes):
            return None
        return _measured(forward, backward, self._provided, share)

    def _traced(
        self, gm: GraphModule, mode: FakeTensorMode, inputs: list[Any]
    ) -> tuple[GraphModule, GraphModule | None]:
        from functorch.compile import min_cut_rematerialization_partition
        from torch._functorch import config
        from torch._functorch.aot_autograd import aot_module_simplified

        found: list[Any] = []

        def partition(joint: GraphModule, arguments: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
            found[:] = min_cut_rematerialization_partition(joint, arguments, **options)
            return found[0], found[1]

        def keep(gm: GraphModule, _: Any) -> Any:
            if not found:
                found.append(gm)
            return gm

        compile_with: Any = {"fw_compiler": keep, "bw_compiler": keep, "partition_fn": partition}
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(mode)))
            stack.enter_context(config.patch(enable_autograd_cache=False))
            stack.enter_context(torch.set_grad_enabled(self._training))
            stack.enter_context(regions(self._autocast))
            aot_module_simplified(gm, inputs, **compile_with)
        return found[0], found[1] if len(found) > 1 else None


def _copy(graph: Graph) -> Graph:
    """A copy in which numbers of known value are literals: in another fake mode they would be unknown."""
    copy, made = Graph(), dict[Node, Any]()
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if node.op != "placeholder" and isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            if (number := in_batch(value)) is not None:
                made[node] = value.node.pytype(number)
                continue
        made[node] = copy.node_copy(node, lambda one: made[one])
        made[node].meta.pop("unbacked_bindings", None)  # of another shape environment
    return copy


def _static(value: Any, mode: FakeTensorMode) -> Any:
    """An input of the sizes that were traced, or that a batch had."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.pytype(value.node.hint)
    if isinstance(value, torch.Tensor):
        value = Form.of(value)
    if not isinstance(value, Form):
        return value
    sizes, strides = ([_static(number, mode) for number in numbers] for numbers in (value.shape, value.stride))
    with mode:
        made = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


def _measured(forward: GraphModule, backward: GraphModule | None, provided: int, share: float) -> Step:
    """The figures of two graphs of AOTAutograd, operator by operator. provided: how many inputs the prologue makes."""
    first, second = (list(gm.graph.nodes) if gm is not None else [] for gm in (forward, backward))
    nodes, turn = [*first, *second], len(first)
    inputs = [node for node in first if node.op == "placeholder"]
    kept = {node.name: node for node in second if node.op == "placeholder"}
    outside = {key for node in inputs[: len(inputs) - provided] for key in storages(node)}
    life = _lifetimes(nodes, kept.keys(), outside)
    change = [0] * (len(nodes) + 1)
    for made, size, end in life.values():
        change[made] += size
        change[min(end, len(nodes) - 1) + 1] -= size
    points, live = list[int](), 0
    for one in change[:-1]:
        live += one
        points.append(live)
    of_inputs = {key for node in inputs for key in storages(node)}
    names = {node.name for node in first}
    saved = {key for name, node in kept.items() if name in names for key in storages(node)} - of_inputs
    return Step(
        flops=sum(_flops(node, share) for node in nodes),
        bytes_moved=sum(_moved(node) for node in nodes),
        peak_bytes=max(points, default=0),
        saved_bytes=sum(life[key][1] for key in saved if key in life),
        live=_thinned(points),
        turn=_place(turn, len(points)),
    )


def _lifetimes(nodes: list[Node], kept: Collection[str], outside: set[int]) -> dict[int, tuple[int, int, int]]:
    """For each storage: where it is made, its bytes, and where it is last used; what is returned lives to the end."""
    life: dict[int, tuple[int, int, int]] = {}
    for number, node in enumerate(nodes):
        if node.op == "output":
            for source in node.all_input_nodes:
                if number == len(nodes) - 1 or source.name not in kept:
                    life.update({key: (*life[key][:2], len(nodes)) for key in storages(source) if key in life})
            continue
        for key in storages(node):
            if key not in outside:
                made, size, end = life.get(key, (number, 0, number))
                life[key] = (made, max(size, _bytes(node)), max(end, number))
        for source in node.all_input_nodes:
            for key in storages(source):
                if key in life:
                    life[key] = (*life[key][:2], max(life[key][2], number))
    return life


def _is_known(node: Node) -> bool:
    return all(bytes_of(leaf) is not None for leaf in leaves_of(node) if isinstance(leaf, torch.Tensor))


def _bytes(node: Node) -> int:
    return sum(bytes_of(leaf) or 0 for leaf in leaves_of(node) if isinstance(leaf, torch.Tensor))


def _moved(node: Node) -> int:
    """The bytes that an operator reads and writes; none for a view."""
    if node.op != "call_function" or node.target is operator.getitem:
        return 0
    read = {key for source in node.all_input_nodes for key in storages(source)}
    if read.issuperset(storages(node)):
        return 0
    return _bytes(node) + sum(map(_bytes, node.all_input_nodes))


def _flops(node: Node, share: float) -> int:
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_counter.flop_registry.get(packet)
    if node.op != "call_function" or formula is None:
        return 0
    arguments = map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
    try:
        found: int = int(formula(*arguments[0], **arguments[1], out_val=node.meta.get("val")))
    except (ArithmeticError, AssertionError, IndexError, TypeError, ValueError):  # a size that only a batch knows
        return 0
    return round(found * share) if packet in _by_plan() else found


@functools.cache
def _by_plan() -> tuple[Any, ...]:
    return torch.ops.fxpasses.sparse_attention_forward, torch.ops.fxpasses.sparse_attention_backward


def _thinned(points: list[int]) -> list[int]:
    """At most `_MOST_POINTS` points: the highest of each run."""
    count = min(len(points), _MOST_POINTS)
    return [max(points[len(points) * n // count : len(points) * (n + 1) // count]) for n in range(count)]


def _place(number: int, count: int) -> int:
    """Where a node of `count` is among the thinned points."""
    return number * min(count, _MOST_POINTS) // max(count, 1)
