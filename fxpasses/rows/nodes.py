"""Queries about nodes that all parts of `live_rows` use."""

from __future__ import annotations

from typing import Any

import sympy
from torch import Tensor
from torch.fx import Node

from fxpasses.graph.calls import operator_of
from fxpasses.graph.refusals import Refused
from fxpasses.graph.symbols import expression
from fxpasses.report import Reason


def shape_of(node: Node) -> tuple[Any, ...]:
    """The sizes of a tensor, as integers or expressions."""
    return tuple(sympy.sympify(expression(size)) for size in node.meta["example_value"].shape)


def is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("example_value"), Tensor)


def first_of(node: Node) -> Any:
    return node.args[0] if node.args else None


def whole_index(index: Any, ndim: int) -> list[Any]:
    """The parts of `x[index]`: one for each of the `ndim` dimensions of x, and `None` for each new dimension."""
    parts = list(index) if isinstance(index, tuple) else [index]
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    parts[at : at + 1] = [slice(None)] * (ndim - sum(part not in (None, Ellipsis) for part in parts))
    return parts


class Unfollowed(Refused):
    """Rows cannot be followed, for example because memory is written by several names: the graph is left alone."""


def refused(node: Node, text: str = "is not known to work row by row") -> Refused:
    return Refused(Reason.NOT_BY_ROWS, f"`{operator_of(node) or node.name}` {text}", node)


def unfollowed(node: Node, text: str) -> Unfollowed:
    found = refused(node, text)
    return Unfollowed(found.reason, found.text, node)
