"""Outlining: a segment of a graph becomes a separate graph.

before                       after                                the new graph
y = f(x, w)                  a, b = call_layer(layer, x, w)       def layer(x, w):
a = g(y)                     ...                                      y = f(x, w); a = g(y); b = h(y)
b = h(y)                                                              return a, b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxpasses.fold.segments import is_reference
from fxpasses.graph import modes
from fxpasses.graph.modes import Mode

# The versions of torch on which compiling graphs layer by layer was tested (`compiler/lowering_segments.py`).
CHECKED = ("2.11", "2.13", "2.15")


@dataclass(frozen=True)
class Place:
    """A graph's place in its step. calls: how often a step runs it, if it is a piece of a graph; 0 if it is whole.
    last: whether no other piece runs after it, so that backward begins with it. name: of the piece, within its step."""

    calls: int = 0
    last: bool = True
    name: str = ""


WHOLE = Place()


def checked_here() -> bool:
    """Whether the running torch is one of the checked versions."""
    return ".".join(torch.__version__.split(".")[:2]) in CHECKED


def outline(
    gm: GraphModule, nodes: Sequence[Node], operands: Sequence[Node], results: Sequence[Node], mode: Mode, name: str
) -> GraphModule:
    """A graph that takes `operands`, computes `nodes` of `gm`, and returns a tuple of `results`.

    mode: the mode before the nodes, which the new graph enters. Bodies of higher-order operators are shared with `gm`.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    taken: dict[str, Any] = {}
    for operand in operands:
        placeholder = graph.placeholder(operand.name)
        placeholder.meta = _meta(operand)
        # AOTAutograd requires the attribute, and accepts that there is no source.
        placeholder._dynamo_source = None
        copies[operand] = placeholder

    copies |= modes.enter(graph, mode.autocast)
    opened = [copies[node] for node in mode.autocast]

    def copy_of(node: Node) -> Node:
        if node not in copies:
            assert is_reference(gm, node), node
            taken[str(node.target)] = getattr(gm, str(node.target))
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        for operand in node.all_input_nodes:
            copy_of(operand)  # a body's reference must precede its call
        copies[node] = graph.node_copy(node, copy_of)
        if modes.enters_autocast(node):
            opened.append(copies[node])
        elif opened and modes.leaves_autocast(node):
            opened.pop()
    modes.leave(graph, opened)
    graph.output(tuple(copies[node] for node in results))
    return GraphModule(taken, graph, class_name=name)


def _meta(operand: Node) -> dict[str, Any]:
    return {key: value for key, value in operand.meta.items() if key in ("example_value", "tensor_dict")}


def call_layer(body: GraphModule, *operands: Any) -> tuple[Any, ...]:
    """Run an outlined graph. In a graph, it marks where a compiler calls its code for `body`."""
    results: tuple[Any, ...] = body(*operands)
    return results


def is_folded(gm: GraphModule) -> bool:
    """Whether a graph calls outlined layers."""
    return any(node.target is call_layer for node in gm.graph.nodes)
