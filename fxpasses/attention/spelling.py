"""How programs spell constants, casts and sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxpasses.graph.calls import argument, operator_of
from fxpasses.graph.symbols import expression
from fxpasses.graph.traits import KEEPS_VALUES

_CASTS = KEEPS_VALUES | {"type_as"}
_CONSTANTS = {"tensor": "data", "scalar_tensor": "s", "full": "fill_value"}


def tensor_of(value: Any) -> torch.Tensor | None:
    """A node's value on fake tensors, if that is a tensor."""
    found = value.meta.get("example_value") if isinstance(value, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def shape_of(value: Any) -> tuple[Any, ...]:
    found = tensor_of(value)
    return () if found is None else tuple(found.shape)


def same(first: Any, second: Any) -> bool:
    """Whether two sizes, or shapes, are known to be equal; installs no guard."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(expression(first) == expression(second))


def is_cast(node: Node) -> bool:
    """Whether a node has its first argument's values, in a floating-point dtype, perhaps in other memory."""
    found = tensor_of(node)
    return operator_of(node) in _CASTS and found is not None and found.dtype.is_floating_point


def constant_of(value: Any) -> float | None:
    """The value of a literal number or of a tensor [] that is made of one; else None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, Node) or shape_of(value) or tensor_of(value) is None:
        return None
    name = operator_of(value)
    if name == "zeros":
        return 0.0
    if name in ("to", "detach"):
        return constant_of(value.args[0])
    found = argument(value, _CONSTANTS[name]) if name in _CONSTANTS else None
    return constant_of(found) if not isinstance(found, Node) else None
