"""What the graph shows of a router's choice: integers below the number of experts, no expert twice for a token."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.fx import Node

from fxpasses.graph import effects
from fxpasses.graph.families import operator_of

# Their results are new memory.
_NEW = frozenset(
    {"where", "nonzero", "unique", "sum", "any", "amax", "bincount", "eq", "ne", "gt", "ge", "lt", "le", "item",
     "tolist", "one_hot", "clone", "argsort", "sort", "scatter_add", "index_select"}
)  # fmt: skip
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
    """How many experts there are to choose from, where `ids` is the index of `topk`, `max` or `argmax`."""
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
    if name == "argmax" or (name == "getitem" and ids.args[1] == 1 and operator_of(source) == "max"):
        return _best_of_last(ids if name == "argmax" else source)
    if name in KEEP_VALUES or (name == "getitem" and is_integer(source)):
        return chooses_among(source, is_constant)
    return None


def _best_of_last(node: Node) -> int | None:
    """How many there are to choose from in `scores.argmax(-1)`, `scores.max(-1)`."""
    scores = node.args[0].meta.get("example_value") if isinstance(node.args[0], Node) else None
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if not isinstance(scores, torch.Tensor) or type(dim) is not int or dim not in (-1, scores.ndim - 1):
        return None
    return scores.shape[-1] if isinstance(scores.shape[-1], int) else None


def writes_integers(node: Node) -> bool:
    """Whether a node may write to a tensor of integers or truths; higher-order operators are taken not to."""
    return not isinstance(node.target, torch._ops.HigherOrderOperator) and any(map(is_integer, written_by(node)))


def written_by(node: Node) -> list[Node]:
    """The operands that a node writes to; all of a custom operator's that writes, and of a higher-order operator's."""
    if node.op not in ("call_function", "call_method"):
        return []
    name = operator_of(node)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return node.all_input_nodes
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return node.all_input_nodes
    written: list[Node] = [part for part in effects.leaves(node.kwargs.get("out")) if isinstance(part, Node)]
    in_place = (name.endswith("_") and not name.endswith("__")) or name in effects.WRITERS or node.kwargs.get("inplace")
    if in_place and node.args:
        written += [part for part in effects.leaves(node.args[0]) if isinstance(part, Node)]
    return written


def writers_of(tensors: Iterable[Node]) -> list[Node]:
    """The nodes that write to tensors, or to what is made of one of them and may share its memory."""
    waiting, seen, writers = list(tensors), set(), []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if node in written_by(user):
                writers.append(user)
            if node in user.all_input_nodes[:1] and operator_of(user) not in _NEW:
                waiting.append(user)
    return writers
