"""The weight of each row's loss in the program's loss, computed backwards.

    losses [N]                            N losses, each of weight mask / count / 2
    total = (losses * mask).sum()         of weight 1 / count / 2
    loss = total / count / 2              of weight 1

If the path from the losses to one number is linear, the weights are known in forward. Then gradients can be computed
there, and the number is the sum of the losses times their weights. A `tail` is such a path.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.calls import OperatorCall, operator_of
from fxpasses.graph.reachability import reached
from fxpasses.graph.traits import KEEPS_VALUES, RESHAPES, SQUEEZES
from fxpasses.rows.nodes import is_tensor, shape_of

_RESHAPES = RESHAPES | SQUEEZES


@dataclass(frozen=True, eq=False)
class Tail:
    """nodes: those from the losses to `loss`, the last one, which is a number; in program order."""

    nodes: list[Node]

    @property
    def loss(self) -> Node:
        return self.nodes[-1]


def find_tail(sources: Sequence[Node], carries: Callable[[Node], bool], dependent: Collection[Node]) -> Tail | None:
    """The longest tail of some results; None if no linear path leads to a number, or if something else reads them.

    carries: whether a gradient may flow through a node, or through its writes to operands. dependent: the values that
    are computed from the rows, or logits, and so cannot be factors that are known before.
    """
    if not sources:
        return None
    inside: dict[Node, None] = dict.fromkeys(sources)
    for node in sources[0].graph.nodes:
        if node not in inside and carries(node) and any(operand in inside for operand in node.all_input_nodes):
            others = [operand for operand in node.all_input_nodes if operand not in inside]
            if is_linear(node, inside) and not any(operand in dependent for operand in others):
                inside[node] = None
    ends = [node for node in inside if node not in sources and shape_of(node) == ()]
    for end in reversed(ends):
        before = _ancestors(end, inside, sources)
        users = (user for node in before if node is not end for user in node.users if carries(user))
        if all(source in before for source in sources) and all(user in before for user in users):
            return Tail([node for node in inside if node in before and node not in sources])
    return None


def _ancestors(end: Node, inside: Collection[Node], sources: Collection[Node]) -> set[Node]:
    """The nodes inside that a node is computed from, up to the sources."""

    def operands(node: Node) -> list[Node]:
        return [] if node in sources else [operand for operand in node.all_input_nodes if operand in inside]

    return set(reached([end], operands))


def is_linear(node: Node, inside: Collection[Node]) -> bool:
    """Whether a node is a linear function of those of its operands that are inside, by factors without a gradient."""
    name, call = operator_of(node), OperatorCall.of(node)
    own = [operand for operand in node.all_input_nodes if operand in inside]
    if any(_needs_gradient(operand) for operand in node.all_input_nodes if operand not in inside):
        return False
    if not is_tensor(node) or not node.meta["example_value"].is_floating_point():
        return False
    first = call.argument("input", node.args[0] if node.args else None)
    if name in ("add", "sub"):
        other = call.argument("other")
        both = first in inside and other in inside and call.has_only("input", "other")
        return both and shape_of(first) == shape_of(other) == shape_of(node)
    if len(own) != 1:
        return False
    if name == "mul":
        return call.argument("input") is not call.argument("other") and shape_of(own[0]) == shape_of(node)
    if first is not own[0] or node.args.count(own[0]) != 1:
        return False
    if name == "div":
        return call.has_only("input", "other") and shape_of(first) == shape_of(node)
    if name in ("sum", "mean"):
        return _dims(call, len(shape_of(first))) is not None
    if name == "masked_fill":
        return _is_zero(call.argument("value")) and shape_of(first) == shape_of(node)
    return name in ("neg", *KEEPS_VALUES, *_RESHAPES)


def _needs_gradient(node: Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.requires_grad


def _is_zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0


def _dims(call: OperatorCall, ndim: int) -> tuple[int, ...] | None:
    """The dimensions of a sum; all, if none is given."""
    dims = call.argument("dim")
    if dims is None:
        return tuple(range(ndim))
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    if not all(type(dim) is int for dim in dims):
        return None
    return tuple(dim % ndim for dim in dims) if dims else tuple(range(ndim))


class Weights:
    """Writes the weight of each result, going backwards through a tail.

    A weight is a number, or a tensor that is broadcast to the value that it belongs to. size: gives a number or a node
    for a size that is an expression. like: a tensor on the device.
    """

    def __init__(
        self, tail: Tail, sources: Sequence[Node], emit: NodeBuilder, size: Callable[[Any], Any], like: Node
    ) -> None:
        self.tail, self.sources, self.emit, self.size, self.like = tail, sources, emit, size, like
        self.dtype = sources[0].meta["example_value"].dtype
        self.weights: dict[Node, Any] = {tail.loss: 1.0}

    def run(self) -> list[Any]:
        """The weight of each source."""
        own = {*self.tail.nodes, *self.sources}
        for node in reversed(self.tail.nodes):
            weight = self.weights[node]
            for operand in dict.fromkeys(node.all_input_nodes):
                if operand in own:
                    through = self._through(node, operand, weight)
                    known = self.weights.get(operand)
                    self.weights[operand] = through if known is None else self._call("add", known, through)
        return [self.weights[source] for source in self.sources]

    def _call(self, name: str, one: Any, other: Any) -> Any:
        """`one + other`, `one * other` or `one / other`, for numbers and nodes."""
        if isinstance(one, Node):
            return self.emit(name, (one, other))
        if not isinstance(other, Node):
            return _PYTHON[name](one, other)
        if name == "mul" and one == 1:
            return other
        if name == "div":
            return self.emit("div", (self.emit("new_full", (self.like, (), one), {"dtype": self.dtype}), other))
        return self.emit(name, (other, one))

    def _factor(self, factor: Any, operand: Node) -> Any:
        """A factor of an operand, in the operand's dtype: the reciprocal of an integer would have the default dtype."""
        dtype = operand.meta["example_value"].dtype
        if not is_tensor(factor) or factor.meta["example_value"].dtype == dtype:
            return factor
        return self.emit("to", (factor, dtype))

    def _through(self, node: Node, operand: Node, weight: Any) -> Any:
        """The weight of an operand through a node whose result has the weight `weight`."""
        name, call = operator_of(node), OperatorCall.of(node)
        if name in ("add", "sub") and call.argument("other") is call.argument("input"):
            return self._call("mul", weight, 2.0 if name == "add" else 0.0)
        if name == "neg" or (name == "sub" and operand is call.argument("other")):
            return self._call("mul", weight, -1.0)
        if name == "mul":
            (other,) = [each for each in (call.argument("input"), call.argument("other")) if each is not operand]
            return self._call("mul", weight, self._factor(other, operand))
        if name == "div":
            return self._call("div", weight, self._factor(call.argument("other"), operand))
        if name in ("sum", "mean"):
            return self._reduced(node, operand, name, weight)
        if name == "masked_fill":
            kept = self._factor(self.emit("logical_not", (call.argument("mask"),)), operand)
            return self._call("mul", weight, kept)
        if name in _RESHAPES and isinstance(weight, Node) and shape_of(weight):
            sizes = [tuple(map(self.size, shape_of(x))) for x in (node, operand)]
            whole = weight if shape_of(weight) == shape_of(node) else self.emit("expand", (weight, sizes[0]))
            return self.emit("reshape", (whole, sizes[1]))
        return weight

    def _reduced(self, node: Node, operand: Node, name: str, weight: Any) -> Any:
        call = OperatorCall.of(node)
        dims = _dims(call, len(shape_of(operand))) or ()
        if isinstance(weight, Node) and 0 < len(shape_of(weight)) < len(shape_of(node)):
            weight = self.emit("expand", (weight, tuple(map(self.size, shape_of(node)))))
        if isinstance(weight, Node) and shape_of(weight) and not call.argument("keepdim", False):
            for dim in sorted(dims):
                weight = self.emit("unsqueeze", (weight, dim))
        if name == "mean":
            for dim in dims:
                weight = self._call("div", weight, self.size(shape_of(operand)[dim]))
        return weight


_PYTHON = {"add": operator.add, "mul": operator.mul, "div": operator.truediv}
