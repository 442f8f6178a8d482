"""A compiled graph runs its whole backward as soon as one output's gradient is requested; eager mode does not.

    gathered = all_gather(x);  y = x.cos();  return gathered, y          the program trains on `y` alone
    eager mode's backward:     nothing for `gathered`
    compiled:                  reduce_scatter of zeros, then the gradient of `y`

The program after the graph determines which gradients are requested. If it matters for a graph, the graph runs
uncompiled until this is known; from then on it runs compiled if the requested gradients take all of backward's
collectives, and otherwise uncompiled for good.

Private name, checked on torch 2.13: AOTAutograd runs a graph's backward as one node, a `CompiledFunctionBackward`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxpasses.collectives.as_written import uncompiled
from fxpasses.collectives.eager_sequences import Issued, eager_sequences
from fxpasses.graph.collectives import OrderChanged, communicates
from fxpasses.graph.effects import leaves

_COMPILED = "CompiledFunctionBackward"


def with_requested_gradients(gm: GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, made of `gm`, with a backward that issues only the collectives of requested gradients."""
    places = _differentiable(gm)
    if len(places) < 2 or not communicates(gm):
        return compiled
    every = eager_sequences(gm).backward
    if not every or all(eager_sequences(gm, [place]).backward == every for place in places):
        return compiled
    return _Chooser(gm, compiled, every)


def _differentiable(gm: GraphModule) -> list[int]:
    """The positions of the outputs that have a gradient."""
    outputs = leaves(gm.graph.output_node().args)
    examples = [node.meta.get("example_value") if isinstance(node, Node) else None for node in outputs]
    return [place for place, example in enumerate(examples) if getattr(example, "requires_grad", False)]


class _Chooser:
    """Runs a graph compiled or uncompiled. requested: the outputs whose gradients uncompiled runs have computed."""

    def __init__(self, gm: GraphModule, compiled: Callable[..., Any], every: list[Issued]) -> None:
        self.gm, self.compiled, self.every = gm, compiled, every
        self.uncompiled = uncompiled(gm)
        self.requested: set[int] = set()
        self.is_compiled: bool | None = None  # None: not known yet

    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.compiled(*inputs)
        if self.is_compiled is None and self.requested:
            self._decide()
        results = self.compiled(*inputs) if self.is_compiled else self.uncompiled(*inputs)
        if self.is_compiled is not False:
            outputs = {p: t for p, t in enumerate(results) if isinstance(t, torch.Tensor) and t.requires_grad}
            self._check(outputs) if self.is_compiled else self._record(outputs)
        return results

    def _decide(self) -> None:
        self.is_compiled = self._issues_all(self.requested)
        if not self.is_compiled:
            warnings.warn(
                "fxpasses: a graph with collectives runs uncompiled, because the program does not train on all of its "
                "outputs: compiled, its backward would issue collectives that eager mode does not. Detach the outputs "
                "that it does not train on.",
                stacklevel=3,
            )

    def _issues_all(self, places: Collection[int]) -> bool:
        """Whether the gradients of these outputs take all of backward's collectives."""
        return eager_sequences(self.gm, places).backward == self.every

    def _record(self, outputs: dict[int, torch.Tensor]) -> None:
        for place, output in outputs.items():
            output.register_hook(lambda gradient, place=place: self.requested.add(place))

    def _check(self, outputs: dict[int, torch.Tensor]) -> None:
        """Raise in backward, before it issues anything, if fewer gradients are requested than before."""
        found = {place: _node_of_graph(output) for place, output in outputs.items()}
        nodes = [node for node, _ in filter(None, found.values())]
        if not nodes:
            return
        own = max(nodes, key=lambda node: node._sequence_nr())  # an input may come from an earlier graph
        numbers = {place: node[1] for place, node in found.items() if node is not None and node[0] is own}
        others = found.keys() - numbers.keys()  # views of inputs, which the graph does not compute

        def check(gradients: tuple[Any, ...]) -> None:
            given = others | {place for place, number in numbers.items() if gradients[number] is not None}
            if not self.requested <= given and not self._issues_all(given):
                raise OrderChanged(
                    "the program trains on fewer outputs of a compiled graph than before, and its backward would issue "
                    "collectives that eager mode does not; detach the outputs that it does not train on"
                )

        own.register_prehook(check)


def _node_of_graph(output: torch.Tensor) -> tuple[Any, int] | None:
    """The autograd node of a compiled graph's backward, and the output's number there; for a view, its base's."""
    node, number = output.grad_fn, output.output_nr
    while node is not None and type(node).__name__ != _COMPILED:
        if len(node.next_functions) != 1:
            return None
        node, number = node.next_functions[0]
    return None if node is None else (node, number)
