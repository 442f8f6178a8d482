"""Values of a loop's body, for all parts at once (`batching.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxpasses.graph.symbols import constant, expression


class Unbatched(Exception):
    """No rule applies."""


@dataclass(frozen=True)
class Batched:
    """A value for all parts.

    node: in the graph. dims: its dimensions of size T; none if it has a value for each part, in dimension 0. hides: of
    pairs, whether those of two parts are 0.
    """

    node: Node
    dims: tuple[int, ...]
    hides: bool = False


class Graph(Protocol):
    """The graph that is being written.

    rows, count: T and n, each a number or its node. ids: [T], the part of each row. lengths: [n]. same: [T, T], whether
    two rows are of one part. The last three are made on first use.
    """

    rows: Any
    count: Any

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a call; returns its node, or a list of the nodes of its results."""

    def size(self, node: Node, dim: int) -> Any:
        """A size of a value, or its node."""

    def ids(self) -> Node: ...

    def lengths(self) -> Node: ...

    def same(self) -> Node: ...


class Values:
    """What is known of a body's values. size: the symbol u. known: the values for all parts.

    several: the results of operators that have several. numbers: those that depend on u.
    """

    def __init__(self, graph: Graph, size: Any, size_node: Node) -> None:
        self.graph, self.size = graph, size
        self.known: dict[Node, Batched] = {}
        self.several: dict[Node, list[Batched]] = {}
        self.numbers: set[Node] = {size_node}

    def depends(self, node: Node) -> bool:
        return node in self.known or node in self.numbers or node in self.several

    def shape(self, node: Node) -> tuple[Any, ...]:
        """The sizes of a value for one part."""
        example = node.meta.get("example_value")
        if not isinstance(example, Tensor):
            raise Unbatched(f"`{node.name}` is no tensor")
        return tuple(map(expression, example.shape))

    def dims_of(self, node: Node) -> tuple[int, ...]:
        """The dimensions of size u of a value."""
        shape = self.shape(node)
        for size in shape:
            if size != self.size and self.size in getattr(size, "free_symbols", ()):
                raise Unbatched(f"`{node.name}` has a size that is computed from a part's")
        return tuple(at for at, size in enumerate(shape) if size == self.size)

    def unsqueezed(self, node: Node, times: int) -> Node:
        """With dimensions of size 1 behind the first one."""
        for _ in range(times):
            node = self.graph.emit(torch.unsqueeze, node, 1)
        return node

    def as_it_is(self, node: Node, dims: tuple[int, ...], target: Any = None) -> Batched:
        """The same call, on all rows. target: the operator in place of the node's."""
        args, kwargs = self._arguments(node)
        return Batched(self.graph.emit(target or node.target, *args, **kwargs), dims)

    def _arguments(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def replaced(operand: Node) -> Any:
            if operand in self.known:
                return self.known[operand].node
            if operand not in self.numbers:
                return operand
            if expression(operand.meta.get("example_value")) == self.size:
                return self.graph.rows
            raise Unbatched(f"`{node.name}` takes a number that is computed from a part's size")

        return map_arg(node.args, replaced), map_arg(node.kwargs, replaced)


def place_of(dim: int, ndim: int) -> int:
    """A dimension, counted from the first. A value without dimensions has none, though operators take its 0 and -1."""
    if not -ndim <= dim < ndim:
        raise Unbatched("a value without dimensions")
    return dim % ndim


def constant_of(node: Node, size: Any) -> int:
    found = constant(size)
    if found is None:
        raise Unbatched(f"`{node.name}` has sizes that are no constants")
    return int(found)
