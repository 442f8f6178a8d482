"""What the graph shows of a router's choice: integers below the number of experts, no expert twice for a token."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxpasses.graph.families import operator_of

_KEEP_VALUES = ("to", "long", "int", "contiguous", "detach", "view", "reshape", "flatten", "squeeze", "transpose", "t")


def is_integer(node: Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and not example.dtype.is_floating_point and not example.dtype.is_complex


def is_topk_index(ids: Node) -> bool:
    """Whether the last axis holds different numbers: the index of `torch.topk`, as it is or cast."""
    name = operator_of(ids)
    source = ids.args[0] if ids.args else None
    if not isinstance(source, Node):
        return False
    if name == "getitem" and ids.args[1] == 1:
        inner = operator_of(source)
        dim = source.kwargs.get("dim", source.args[2] if len(source.args) > 2 else -1)
        last = ids.meta["example_value"].ndim - 1
        return inner == "topk" and dim in (-1, last)
    return name in ("to", "long", "int", "contiguous", "detach") and is_integer(source) and is_topk_index(source)


def chooses_among(ids: Node) -> int | None:
    """How many experts there are to choose from, where `ids` is the index of `torch.topk`: they are below that."""
    name = operator_of(ids)
    source = ids.args[0] if ids.args else None
    if not isinstance(source, Node):
        return None
    if name == "getitem" and ids.args[1] == 1 and operator_of(source) == "topk":
        scores = source.args[0]
        if not is_topk_index(ids):
            return None
        size = scores.meta["example_value"].shape[-1] if isinstance(scores, Node) else None
        return size if isinstance(size, int) else None
    if name in _KEEP_VALUES or (name == "getitem" and is_integer(source)):
        return chooses_among(source)
    return None
