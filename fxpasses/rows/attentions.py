"""Attention among rows, in every spelling, and the meaning of its mask.

| mask | a query sees a key |
|---|---|
| none, `is_causal` | always; where the key is not later |
| bool operand | where it is True |
| additive operand | where it is 0; hidden where it is the least of its dtype, or -inf |
| `masked_fill(scores, m, least)`, `where(m, scores, least)` | where the scores are kept |

A row that sees nothing is 0 with a bool operand of `scaled_dot_product_attention`, and also by a plan. In the other
spellings it is NaN or a mean over all keys: a batch in which such a row is needed is not packed. Neither is a batch
whose additive mask has other values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpasses.attention.match import Attention, Mask, Operand
from fxpasses.attention.unfused import Unfused, is_softmax
from fxpasses.graph.calls import argument, is_in_place, operator_of
from fxpasses.graph.refusals import Refused
from fxpasses.report import Reason
from fxpasses.rows.spaces import BATCH, TOKENS, Tags

ATTENTION = "scaled_dot_product_attention"
HIDES = -1e30  # a summand hides a score if it is at most this, which is infinite compared with any score
MODERATE = 1e6  # the most of a constant that scores are multiplied by, or that a bias is computed from
_USUAL = (0, 1, 2, 3)


@dataclass(frozen=True, eq=False)
class RowAttention:
    """query, key, value: [B, H, T, D], axes in each operand's order. order: the order of the result's axes. inside: the
    nodes that become unused.

    masks: a query sees the keys that all masks let it see; if `is_causal`, those that are not later. is_unpacked:
    whether it is computed as written, on unpacked rows; tags: those of its result then.
    """

    node: Node
    query: Operand
    key: Operand
    value: Operand
    masks: tuple[Mask, ...]
    scale: Any
    order: tuple[int, ...]
    inside: tuple[Node, ...] = ()
    is_causal: bool = False
    is_unpacked: bool = False
    tags: Tags = (BATCH, None, TOKENS, None)

    @property
    def is_exact(self) -> bool:
        """Whether a plan gives the same result in rows that see nothing."""
        are_bool = all(mask.node.meta["example_value"].dtype is torch.bool for mask in self.masks)
        return not self.masks or (are_bool and not self.inside and not self.is_unpacked)

    @property
    def reads(self) -> list[Node]:
        """The nodes that the attention reads."""
        return self.node.all_input_nodes if self.is_unpacked else [operand.node for operand in self.operands]

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        return self.query, self.key, self.value


def fused(node: Node) -> RowAttention:
    """A call of `scaled_dot_product_attention`. Raises `Refused`."""
    parts = [argument(node, name) for name in ("query", "key", "value")]
    mask, is_causal = argument(node, "attn_mask"), bool(argument(node, "is_causal", False))
    if argument(node, "dropout_p", 0.0):
        raise Refused(Reason.DROPOUT, f"`{ATTENTION}` drops pairs at random", node)
    if not all(isinstance(part, Node) and part.meta["example_value"].dim() == 4 for part in parts):
        raise Refused(Reason.NOT_BY_ROWS, f"`{ATTENTION}` is not by heads", node)
    query, key, value = (Operand(part, _USUAL) for part in parts)
    if mask is not None and (is_causal or not isinstance(mask, Node)):
        raise Refused(Reason.NOT_BY_ROWS, f"`{ATTENTION}` has two masks", node)
    found = () if mask is None else (Mask(mask),)
    return RowAttention(node, query, key, value, found, argument(node, "scale"), _USUAL, is_causal=is_causal)


def written_out(graph: Graph, is_metadata: Callable[[Node], bool]) -> tuple[dict[Node, RowAttention], list[Refused]]:
    """The attentions that a graph writes as products with a softmax, by their results; and near misses."""

    def check(mask: Node) -> None:
        if not is_metadata(mask):
            raise Refused(Reason.ACTIVATION, f"`{mask.name}`", mask)

    found, refused = {}, []
    for node in graph.nodes:
        if node.op.startswith("call") and is_softmax(node):
            try:
                attention = Unfused(node, check).attention()
                if attention is not None:
                    found[attention.node] = _of(attention)
            except Refused as error:
                refused.append(error)
    return found, refused


def _of(found: Attention) -> RowAttention:
    parts, fill = (found.query, found.key, found.value), found.mask.fill
    if any(len(part.order) != 4 for part in parts):
        raise Refused(Reason.NOT_BY_ROWS, "attention is not by heads", found.node)
    if fill is not None and fill > HIDES:
        raise Refused(Reason.SCORES_CHANGED, f"{fill:g} does not hide a score for certain", found.node)
    if found.scale is not None and abs(found.scale) > MODERATE:
        raise Refused(Reason.SCORES_CHANGED, f"a score may exceed a mask after a scale of {found.scale:g}", found.node)
    if found.node.meta["example_value"].dtype is torch.float16:
        raise Refused(Reason.SCORES_CHANGED, "the least float16 does not hide a score", found.node)
    inside = {node for node in found.inside if node is not found.node}
    first = next(node for node in found.node.graph.nodes if node in inside)
    return RowAttention(found.node, *parts, (found.mask,), found.scale, found.order, (first, *(inside - {first})))


def is_written_between(attention: RowAttention) -> bool:
    """Whether memory other than its own scores is written in place between the nodes of written-out attention."""
    if not attention.inside:
        return False
    node: Node = attention.inside[0]
    while node is not attention.node:
        if is_in_place(operator_of(node)) and node not in attention.inside:
            return True
        node = node.next
    return False
