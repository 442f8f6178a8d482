"""Runs the graphs of AOTAutograd operator by operator, with eager mode's results.

Two things differ between such a graph and eager mode. Some kernels' results, such as that of `softplus_backward`, have
other strides than on fake tensors, so a `view` that was legal while tracing may not be: then `reshape` copies, which is
invisible in a graph without writes. And autograd's formulas divide sizes in C++, where `std` of one token divides by
zero and gives an infinity; in the graph of backward the sizes are Python's numbers.

Private name, checked on torch 2.11 and 2.13: `torch._dynamo.backends.debugging.boxed_nop`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

Boxed = Callable[[list[Any]], Any]  # takes a list of arguments, which it may empty


def forward_by_operator(gm: GraphModule, example_inputs: Sequence[Any] = ()) -> Boxed:
    """A callable for a graph of forward, or of inference. Changes `gm`."""
    from torch._dynamo.backends.debugging import boxed_nop

    for node in gm.graph.nodes:
        if str(node.target) == "aten.view.default":
            node.target = torch.ops.aten.reshape.default
    gm.recompile()
    return boxed_nop(gm, list(example_inputs))


def backward_by_operator(gm: GraphModule, example_inputs: Sequence[Any] = ()) -> Boxed:
    """A callable for a graph of backward. Changes `gm`."""
    for node in gm.graph.find_nodes(op="call_function", target=operator.truediv):
        node.target = divide
    return forward_by_operator(gm, example_inputs)


def divide(a: Any, b: Any) -> Any:
    """Divide numbers as C++ does, where a division by zero is not an error."""
    try:
        return a / b
    except ZeroDivisionError:
        return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)
