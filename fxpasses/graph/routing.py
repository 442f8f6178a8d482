"""What the graph shows of a router's choice: integers below the number of experts, no expert twice for a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from fxpasses.graph.effects import WRITERS
from fxpasses.graph.families import operator_of

KEEP_VALUES = ("to", "long", "int", "contiguous", "detach", "view", "reshape", "flatten", "squeeze", "transpose", "t")


def is_integer(node: Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and not example.dtype.is_floating_point and not example.dtype.is_complex


def is_topk_index(ids: Node, is_constant: Callable[[Node], bool]) -> bool:
    """Whether the last axis holds different numbers: the index of `torch.topk`, as it is or cast.

    is_constant: whether nobody writes to a tensor once it is made.
    """
    name = operator_of(ids)
    source = ids.args[0] if ids.args else None
    if not isinstance(source, Node) or not is_constant(ids):
        return False
    if name == "getitem" and ids.args[1] == 1:
        inner = operator_of(source)
        dim = source.kwargs.get("dim", source.args[2] if len(source.args) > 2 else -1)
        last = ids.meta["example_value"].ndim - 1
        return inner == "topk" and dim in (-1, last)
    return (
        name in ("to", "long", "int", "contiguous", "detach")
        and is_integer(source)
        and is_topk_index(source, is_constant)
    )


def chooses_among(ids: Node, is_constant: Callable[[Node], bool]) -> int | None:
    """How many experts there are to choose from, where `ids` is the index of `torch.topk`: they are below that."""
    name = operator_of(ids)
    source = ids.args[0] if ids.args else None
    if not isinstance(source, Node) or not is_constant(ids):
        return None
    if name == "getitem" and ids.args[1] == 1 and operator_of(source) == "topk":
        scores = source.args[0]
        if not is_topk_index(ids, is_constant):
            return None
        size = scores.meta["example_value"].shape[-1] if isinstance(scores, Node) else None
        return size if isinstance(size, int) else None
    if name in KEEP_VALUES or (name == "getitem" and is_integer(source)):
        return chooses_among(source, is_constant)
    return None


def writes_integers(node: Node) -> bool:
    """Whether a node may write to a tensor of integers or truths, as far as its name tells."""
    name = operator_of(node)
    in_place = (name.endswith("_") and not name.endswith("__")) or name in WRITERS or "out" in node.kwargs
    target = node.kwargs.get("out", node.args[0] if node.args else None)
    return in_place and isinstance(target, Node) and is_integer(target)
