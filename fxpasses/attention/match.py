"""The result of the matchers of attention, whatever its spelling: softmax(query · keyᵀ · scale, masked) · value."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node


@dataclass(frozen=True)
class Mask:
    """The mask of an attention.

    node: an additive or bool operand; with `fill`, a condition. fill: the number that replaces scores where the
    condition equals `hides`; None if the mask is an operand of the attention.
    """

    node: Node
    fill: float | None = None
    hides: bool = True


@dataclass(frozen=True)
class Operand:
    """A tensor of an attention: a node, and the permutation of its axes to [batch, heads, tokens, width]."""

    node: Node
    order: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention. query, key: [batch, heads, tokens, width]; value: [batch, heads, tokens, any width].

    node: the result, whose axes are those of [batch, heads, tokens, width] in `order`. scale: that of the scores; None
    for the usual one. started: the node that reads query and key first. inside: nodes that become unused when `node` is
    replaced. fused: whether it is one operator, which defines the result of rows whose mask hides all keys. grouped:
    whether that operator repeats the heads of keys and values.
    """

    node: Node
    query: Operand
    key: Operand
    value: Operand
    mask: Mask
    scale: float | None
    started: Node
    order: tuple[int, ...] = (0, 1, 2, 3)
    inside: tuple[Node, ...] = ()
    fused: bool = False
    grouped: bool = False
