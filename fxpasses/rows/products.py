"""Products in which each row is multiplied by something of its own, or by something that all rows share.

einsum("btd,hde->bthe", x, weights)      of x: batch, tokens, -      batch, tokens, -, -
x[:, :, :, None] @ y[:, :, None]         of both: batch, tokens, -, -
keys.transpose(1, 2) @ values            no rows: sums over the tokens
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from torch.fx import Node

from fxpasses.graph.calls import argument, operator_of
from fxpasses.rows.nodes import is_tensor, shape_of
from fxpasses.rows.spaces import BATCH, ROWS, TOKENS, Tags

_KNOWN = {BATCH, TOKENS, ROWS}


def tags_of_product(node: Node, tags: Mapping[Node, Tags]) -> Tags | None:
    """The tags of a product; None if it mixes rows. tags: those of the operands with rows."""
    found = _axes(node)
    if found is None:
        return None
    operands, axes = found
    known = {letter: tag for x, own in operands for letter, tag in zip(own, tags.get(x, ()), strict=False) if tag}
    if not set(known.values()) <= _KNOWN or not set(known) <= set(axes):
        return None
    for x, own in operands:
        for letter, tag, size in zip(own, tags.get(x, (None,) * len(own)), shape_of(x), strict=True):
            if known.get(letter, tag) != tag and size != 1:
                return None
    return tuple(known.get(letter) for letter in axes)


def _axes(node: Node) -> tuple[list[tuple[Node, str]], str] | None:
    """The operands and the result of a product, with a letter for each dimension, as in `einsum`."""
    operands: Any
    if operator_of(node) == "einsum":
        equation, *given = node.args
        operands = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        if not isinstance(equation, str) or "." in equation or "->" not in equation:
            return None
        terms, _, axes = equation.replace(" ", "").partition("->")
        letters = terms.split(",")
    else:
        operands = argument(node, "input"), argument(node, "other")
        if not all(is_tensor(x) and len(shape_of(x)) >= 2 for x in operands):
            return None
        ndims = [len(shape_of(x)) for x in operands]
        batch = string.ascii_lowercase[: max(ndims) - 2]
        letters = [batch[len(batch) + 2 - ndim :] + last for ndim, last in zip(ndims, ("xy", "yz"), strict=True)]
        axes = batch + "xz"
    fits = len(letters) == len(operands) and all(is_tensor(x) for x in operands)
    fits = fits and all(len(shape_of(x)) == len(own) == len(set(own)) for x, own in zip(operands, letters, strict=True))
    return (list(zip(operands, letters, strict=True)), axes) if fits else None
