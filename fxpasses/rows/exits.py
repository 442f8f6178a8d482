"""Where rows end: operators that take rows but whose results have none, and which rows they read.

| exit | rows that it reads |
|---|---|
| `cross_entropy(logits, target)` | those whose target is not ignored |
| `x[:, 0]`, `x[b, t]`, `x.view(-1, C)[rows]`; `x[mask]`, by its positions | those selected |
| `(x * mask).sum(1)`, `(losses * mask).sum()` | those for which the batch's factor is not 0 |
| `x * mask`, one number for each row, of which something unknown reads all | the same |
| `x.sum(1)` | all |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxpasses.graph.calls import OperatorCall, is_in_place, operator_of
from fxpasses.graph.traits import CASTS
from fxpasses.rows.routing import is_inside
from fxpasses.rows.spaces import BATCH, GROUPS, ROWS, TOKENS, Tags


@dataclass(frozen=True)
class Exit:
    """kind: "loss", "picked", "summed" or "masked". operand: the value with rows. by: the metadata that decides which
    rows are read: the targets, the index, or the factor; None for all rows. hides: whether the factor hides rows where
    it is True.
    """

    kind: str
    operand: Node
    by: Any = None
    hides: bool = False


def exit_of(node: Node, tags: Mapping[Node, Tags], is_metadata: Callable[[Node], bool]) -> Exit | None:
    """The exit that a node is, given the tags of the values before it; or None."""
    call, name = OperatorCall.of(node), operator_of(node)
    first = call.argument("input", node.args[0] if node.args else None)
    if not isinstance(first, Node) or first not in tags:
        return None
    if GROUPS in tags[first] or is_inside(tags[first]):
        return None
    if name == "cross_entropy":
        return _loss(call, first, tags, is_metadata)
    if name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return _picked(index, first, tags[first], is_metadata)
    if name == "sum" and _ends_rows(call.argument("dim"), tags[first]):
        return Exit("summed", first, *(_factor(first, tags, is_metadata) or ()))
    return None


def masked(node: Node, tags: Mapping[Node, Tags], is_metadata: Callable[[Node], bool]) -> Exit | None:
    """The exit that a product `x * mask` is, of one number for each row, if all of it is read; None for other nodes.

    Rows that the mask hides are 0 in it, whatever x is.
    """
    factor = _factor(node, tags, is_metadata)
    operands = [operand for operand in node.all_input_nodes if operand in tags]
    if factor is None or factor[0] not in node.all_input_nodes or len(operands) != 1:
        return None
    (operand,) = operands
    has_numbers = tags[node] in ((ROWS,), (BATCH, TOKENS)) and tags[operand] == tags[node]
    return Exit("masked", operand, *factor) if has_numbers and not is_in_place(operator_of(node)) else None


def _loss(call: OperatorCall, logits: Node, tags: Mapping[Node, Tags], is_metadata: Any) -> Exit | None:
    """A loss whose targets are class indices: the prologue knows which are ignored."""
    target, weight = call.argument("target"), call.argument("weight")
    if call.argument("reduction", "mean") == "none" or weight in tags or not isinstance(target, Node):
        return None
    fits = tags[logits] == (ROWS, None) and is_metadata(target) and target.meta["example_value"].dim() == 1
    return Exit("loss", logits, target) if fits else None


def _picked(index: tuple[Any, ...], x: Node, tags: Tags, is_metadata: Any) -> Exit | None:
    places = 1 if tags[:1] == (ROWS,) else 2
    if tags[:places] not in ((ROWS,), (BATCH, TOKENS)) or any(part != slice(None) for part in index[places:]):
        return None
    if places == 2 and len(index) > 1 and index[0] == slice(None) and type(index[1]) is int:
        return Exit("picked", x, index)
    parts = [part for part in index[:places] if isinstance(part, Node) and is_metadata(part)]
    examples = [part.meta["example_value"] for part in parts]
    fits = len(parts) == places and all(part.dim() == 1 and part.dtype is torch.int64 for part in examples)
    return Exit("picked", x, index) if fits else None


def _ends_rows(dims: Any, tags: Tags) -> bool:
    """Whether a sum is over all rows, or over the tokens of each sequence."""
    if dims is None:
        return True
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    summed = {tags[dim] for dim in dims}
    return ROWS in summed or TOKENS in summed


def _factor(x: Node, tags: Mapping[Node, Tags], is_metadata: Any) -> tuple[Any, bool] | None:
    """The metadata that decides which rows of a sum are 0, and whether these are where it is True."""
    call, name = OperatorCall.of(x), operator_of(x)
    operand: Any = x.args[0] if x.args else None
    others = [part for part in x.all_input_nodes if part not in tags]
    if name in ("mul", "masked_fill") and len(others) == 1 and is_metadata(others[0]):
        if name == "mul":
            return others[0], False
        return (others[0], True) if operand in tags and call.argument("value") == 0 else None
    if name == "where" and len(x.args) == 3 and is_metadata(operand):
        kept = [part for part in x.args[1:] if isinstance(part, Node)]
        return (operand, x.args[1] not in kept) if others == [operand] and 0 in x.args[1:] and len(kept) == 1 else None
    if name in ("neg", *CASTS) or (name in ("mul", "div") and operand in tags and not others):
        return _factor(operand, tags, is_metadata) if len(x.all_input_nodes) == 1 else None
    return None
