"""Attention as the pass knows it, however it was spelt: the same program of query, key, value and mask.

Only these numbers matter: softmax(query · keyᵀ · scale, masked) · value, by batch element and head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node


@dataclass(frozen=True)
class Mask:
    """What an attention is masked with.

    node: added to the scores, or a bool operand; for `fill`, the condition. fill: the number that hides a score, in
    place of those where the condition is `hides`; None where the mask is an operand of its own.
    """

    node: Node
    fill: float | None = None
    hides: bool = True


@dataclass(frozen=True)
class Operand:
    """A tensor of an attention: a node, and the order of its axes that makes it [batch, heads, tokens, width]."""

    node: Node
    order: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention. query, key: [batch, heads, tokens, width]; value: [batch, heads, tokens, any width].

    node: has the result, whose axes are those of [batch, heads, tokens, width] in `order`. scale: of the scores; None
    for the usual one. started: the node that reads query and key first. inside: nodes that go when `node` is replaced.
    fused: whether it was one operator, which says what happens to rows that see nothing; else it was written out.
    grouped: whether it is for that operator to repeat the heads of keys and values.
    """

    node: Node
    query: Operand
    key: Operand
    value: Operand
    mask: Mask
    scale: float | None
    started: Node
    order: tuple[int, ...] = (0, 1, 2, 3)
    inside: tuple[Node, ...] = field(default=())
    fused: bool = False
    grouped: bool = False
