"""The nodes around sparse attention: operands by heads, and a result with the layout of the attention replaced."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fxpasses.attention.match import Attention, Operand
from fxpasses.attention.spelling import same
from fxpasses.graph.building import NodeBuilder
from fxpasses.graph.calls import operator_of
from fxpasses.graph.refusals import Refused
from fxpasses.report import Reason

_USUAL = (0, 1, 2, 3)


class AttentionBuilder(NodeBuilder):
    """A `NodeBuilder` for operands and results of attention."""

    def by_heads(self, operand: Operand) -> Node:
        """An operand as [batch, heads, tokens, width]."""
        node = operand.node
        if operand.order != tuple(range(len(operand.order))):
            node = self("permute", (node, operand.order))
        return node if len(operand.order) == 4 else self("unsqueeze", (node, 0))

    def length(self, operand: Operand) -> int | Node:
        """The number of tokens of an operand: an integer, or a node if it is symbolic."""
        return self.size(operand.node, operand.order[-2])

    def as_before(self, result: Node, attention: Attention) -> Node:
        """The result with the axes, and the strides, of the attention that it replaces."""
        if len(attention.order) == 3:
            result = self("squeeze", (result, 0))
        if attention.order != _USUAL[: len(attention.order)]:
            result = self("permute", (result, attention.order))
        return self._as_laid_out(result, attention)

    def _as_laid_out(self, result: Node, attention: Attention) -> Node:
        """The result with the strides of the replaced attention, if any user may depend on them.

        SDPA's result has the same layout as the new operator's, whatever Dynamo's example says.
        """
        before = attention.node
        found, expected = result.meta["example_value"], before.meta["example_value"]
        if found.dtype is not expected.dtype or not same(tuple(found.shape), tuple(expected.shape)):
            raise Refused(Reason.NOT_BY_HEADS, f"it gives {expected.dtype} {list(expected.shape)}", before)
        if same(tuple(found.stride()), tuple(expected.stride())) or all(
            _ignores_strides(user) or (attention.fused and user.op == "output") for user in before.users
        ):
            return result
        if not expected.is_contiguous():
            raise Refused(Reason.NOT_BY_HEADS, f"it gives strides {list(expected.stride())}", before)
        return self("contiguous", (result,))


# Operators whose results have the same values for any strides of the operands; at most they copy or not.
_OF_ANY_STRIDES = frozenset({"contiguous", "reshape", "linear", "matmul", "clone", "flatten"})
_MOVES_AXES = frozenset({"transpose", "permute"})


def _ignores_strides(user: Node) -> bool:
    name = operator_of(user)
    return name in _OF_ANY_STRIDES or (name in _MOVES_AXES and all(map(_ignores_strides, user.users)))


def size_of(size: Any) -> Any:
    """The value of a size that is a node or a number."""
    return size.meta["example_value"] if isinstance(size, Node) else size
