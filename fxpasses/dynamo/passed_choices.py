"""Integers that depend on parameters stay activations where a graph break passes them to another frame.

    idx = torch.topk(router(x), 2)[1]     frame 1: its graph ends before the loop, and returns `idx`
    for e in idx.unique(): ...            frame 2: `idx` is an input of integers, as the batch's are

In frame 2 a question about `idx` gets no answer, as if one graph held both frames. An answer would be guarded: in each
layer and each step the guard would repeat the router's queries before the frame makes its own, and each set of experts
with tokens would be a variant. So the compiled frame 1 notes which of its results are such tensors.

The set of these tensors belongs to the process, because Dynamo offers no way from the frame that returns a tensor to
the frame that takes it. It holds weak references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakIdKeyDictionary

from fxpasses.base.containment import contained
from fxpasses.graph.calls import operator_of
from fxpasses.graph.effects import leaves
from fxpasses.graph.reachability import reached
from fxpasses.graph.symbols import is_symbolic, is_unbacked
from fxpasses.graph.traits import FACTORIES, is_integer

_passed: WeakIdKeyDictionary = WeakIdKeyDictionary()


def is_passed(value: Any) -> bool:
    """Whether a compiled graph has returned this tensor of integers or bools, computed from parameters."""
    return isinstance(value, torch.Tensor) and value in _passed


def noting(compiled: Callable[..., Any], gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """`compiled`, which runs `gm`; each call notes those of its results that depend on parameters."""
    positions = _positions(gm, example_inputs)
    if not positions:
        return compiled

    def run(*inputs: Any) -> Any:
        results = compiled(*inputs)
        with contained("noting the choices of a router"):
            for position in positions:
                _passed[results[position]] = True
        return results

    return run


def _positions(gm: GraphModule, example_inputs: Sequence[Any]) -> list[int]:
    """The results of integer or bool dtype that depend on parameters, directly or through other results."""
    inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False))
    (output,) = gm.graph.find_nodes(op="output")
    results: Any = output.args[0]
    return [
        position
        for position, result in enumerate(results if isinstance(results, (tuple, list)) else ())
        if isinstance(result, Node) and result.op.startswith("call") and is_integer(result)
        if any(_is_of_parameters(node, inputs.get(node)) for node in reached([result], _values_read))
    ]


def _values_read(node: Node) -> list[Node]:
    """The operands whose contents, and not only their sizes, a result depends on."""
    example = node.meta.get("example_value")
    if operator_of(node) in FACTORIES or (is_symbolic(example) and not is_unbacked(example)):
        return []
    return [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]


def _is_of_parameters(node: Node, value: Any) -> bool:
    example = node.meta.get("example_value")
    if node.op not in ("placeholder", "get_attr") or not isinstance(example, torch.Tensor):
        return False
    return isinstance(example, torch.nn.Parameter) or example.requires_grad or is_passed(value)
