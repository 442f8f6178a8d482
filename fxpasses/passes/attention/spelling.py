"""The words that programs have for simple things: constants, casts, views, sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxpasses.graph.families import plain_operator_of
from fxpasses.graph.symbols import expression

_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "detach"})
_CONSTANTS = {"tensor": 0, "scalar_tensor": 0, "full": 1}


def tensor_of(value: Any) -> torch.Tensor | None:
    """A node's value on fake tensors, if it is one tensor."""
    found = value.meta.get("example_value") if isinstance(value, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def shape_of(value: Any) -> tuple[Any, ...]:
    found = tensor_of(value)
    return () if found is None else tuple(found.shape)


def same(first: Any, second: Any) -> bool:
    """Whether two sizes, or shapes, are known to be equal; asking makes no guard."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(expression(first) == expression(second))


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument that may be given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def is_cast(node: Node) -> bool:
    """Whether a node gives the values of its first argument, in a floating-point dtype and some memory."""
    found = tensor_of(node)
    return plain_operator_of(node) in _CASTS and found is not None and found.dtype.is_floating_point


def constant_of(value: Any) -> float | None:
    """A number that is written in the program, as such or as a tensor of no dimensions; else None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, Node) or shape_of(value) or tensor_of(value) is None:
        return None
    name = plain_operator_of(value)
    if name == "zeros":
        return 0.0
    if name == "to" or name == "detach":
        return constant_of(value.args[0])
    if name not in _CONSTANTS:
        return None
    position = _CONSTANTS[name]
    found = argument(value, position, "fill_value") if len(value.args) > position or name == "full" else None
    return constant_of(found) if not isinstance(found, Node) else None
