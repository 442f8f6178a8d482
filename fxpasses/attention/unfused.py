"""Matches unfused attention: two products with a softmax between them, and a mask before it.

    scores = query @ key.transpose(2, 3) * scale        or scaled before, divided, in the letters of `einsum`
    scores = scores + mask                              or masked_fill, where
    weights = softmax(scores, -1, dtype=float32).to(query.dtype)
    output = dropout(weights, p=0.0) @ value

The match starts at the softmax and goes upwards to the product of query and key, and downwards to the product with the
value. Every step between must be known, and its result may have no other user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from fxpasses.attention.match import Attention, Mask
from fxpasses.attention.products import Product, as_output, as_scores, product_of
from fxpasses.attention.spelling import constant_of, is_cast, shape_of, tensor_of
from fxpasses.graph.calls import OperatorCall, argument, operator_of
from fxpasses.graph.refusals import Refused
from fxpasses.graph.traits import ADDITIONS
from fxpasses.report import Reason

_FILLS = frozenset({"masked_fill", "masked_fill_"})
_SCALES = frozenset({"mul", "mul_"})
_DIVISIONS = frozenset({"div", "div_"})
_NEAR = 12  # a near miss is reported if at most so many steps lead from a softmax up to a product


def is_softmax(node: Node) -> bool:
    """Whether a node is a softmax over the last axis of a tensor that may be the scores of an attention."""
    if operator_of(node) != "softmax" or not node.args:
        return False
    found = tensor_of(node.args[0])
    if found is None or not found.dtype.is_floating_point or found.ndim not in (3, 4):
        return False
    return argument(node, "dim") in (-1, found.ndim - 1)


class Unfused:
    """The attention around one softmax. check_mask: raises `Refused` unless a mask is the batch's metadata."""

    def __init__(self, softmax: Node, check_mask: Callable[[Node], None]) -> None:
        self._softmax, self._check_mask = softmax, check_mask
        self._scale = 1.0
        self._mask: Mask | None = None
        self._steps: list[Node] = []  # from the softmax up to the product

    def attention(self) -> Attention | None:
        """The attention; None if there is none, or one without a mask. Raises `Refused`."""
        try:
            product = self._upwards()
        except Refused:
            if _is_near_miss(self._softmax):
                raise
            return None
        scores = as_scores(product) if product is not None else None
        if product is None or scores is None or self._mask is None:
            return None
        weights = self._downwards()
        output = product_of(weights[-1])
        found = as_output(output, weights[-2]) if output is not None else None
        if found is None:
            raise _changed(weights[-1], "the weights")
        value, order = found
        inside = (*reversed(self._steps), *weights)
        for step in inside[:-1]:
            if len(step.users) != 1:
                raise Refused(Reason.WEIGHTS_USED, f"`{step.name}`", step)
        return Attention(weights[-1], *scores, value, self._mask, self._scale, product.node, order, inside)

    def _upwards(self) -> Product | None:
        """The product of query and key."""
        node = self._softmax.args[0]
        while isinstance(node, Node) and node.op.startswith("call"):
            self._steps.append(node)
            if (product := product_of(node)) is not None:
                return product
            node = self._before(node)
        return None

    def _before(self, node: Node) -> Any:
        """The scores before a step, which is a cast, a scale or the mask; raises `Refused` for any other."""
        name = operator_of(node)
        if is_cast(node):
            return node.args[0]
        scaled = _scaled(node, name)
        if scaled is not None and self._mask is not None:  # a scale after the mask would scale the mask as well
            self._scale *= scaled[1]
            return scaled[0]
        masked = self._masked(node, name)
        if masked is None:
            raise _changed(node, "the scores")
        self._check_mask(masked[1].node)
        if self._mask is not None:
            raise Refused(Reason.SCORES_CHANGED, "the scores are masked twice", node)
        self._mask = masked[1]
        return masked[0]

    def _masked(self, node: Node, name: str) -> tuple[Node, Mask] | None:
        """The scores and the mask of a step that applies a mask; None for another step."""
        if name in ADDITIONS and OperatorCall.of(node).has_only("input", "other"):
            return self._added(node)
        if name in _FILLS:
            scores, condition, hides = node.args[0], argument(node, "mask"), True
            fill = constant_of(argument(node, "value"))
        elif name == "where" and len(node.args) == 3:
            condition, *sides = node.args
            fills = [constant_of(side) for side in sides]
            hides = fills[1] is None  # the number replaces scores where the condition holds
            scores, fill = sides[hides], fills[not hides]
        else:
            return None
        if fill is None or not isinstance(scores, Node) or not isinstance(condition, Node):
            return None
        return scores, Mask(condition, fill, hides)

    def _added(self, node: Node) -> tuple[Node, Mask] | None:
        scores, mask = argument(node, "input"), argument(node, "other")
        if not isinstance(scores, Node) or not isinstance(mask, Node):
            return None
        if _product_above(mask) and not _product_above(scores):
            scores, mask = mask, scores
        found = tensor_of(mask)
        if found is None or not found.dtype.is_floating_point or not _product_above(scores):
            return None
        return scores, Mask(mask)

    def _downwards(self) -> list[Node]:
        """The nodes from the softmax to the product with the value; raises `Refused`."""
        nodes = [self._softmax]
        while True:
            node = nodes[-1]
            if len(node.users) != 1:
                raise Refused(Reason.WEIGHTS_USED, f"`{node.name}`", node)
            (user,) = node.users
            if user.op == "output":
                raise Refused(Reason.WEIGHTS_USED, f"`{node.name}` is returned", node)
            nodes.append(user)
            if product_of(user) is not None:
                return nodes
            if operator_of(user) == "dropout":
                _check_dropout(user)
            elif not is_cast(user):
                raise _changed(user, "the weights")


def _scaled(node: Node, name: str) -> tuple[Node, float] | None:
    """The operand that a step scales, and the factor; None for another step."""
    if len(node.args) != 2 or node.kwargs or name not in _SCALES | _DIVISIONS:
        return None
    for scores, factor in [node.args, node.args[::-1]] if name in _SCALES else [node.args]:
        number = constant_of(factor)
        if number is not None and isinstance(scores, Node) and (number or name in _SCALES):
            return scores, number if name in _SCALES else 1 / number
    return None


def _check_dropout(node: Node) -> None:
    probability, training = argument(node, "p", 0.5), argument(node, "training", True)
    if probability not in (0, 0.0) and training is not False:
        raise Refused(Reason.DROPOUT, f"p = {probability}", node)


def _changed(node: Node, what: str) -> Refused:
    return Refused(Reason.SCORES_CHANGED, f"{what} go through `{operator_of(node) or node.name}`", node)


def _product_above(node: Node, steps: int = _NEAR) -> bool:
    """Whether a value depends on a product of two batches of matrices, a few steps back."""
    if product_of(node) is not None:
        return True
    if steps == 0 or not node.op.startswith("call") or len(shape_of(node)) not in (3, 4):
        return False
    return any(_product_above(part, steps - 1) for part in node.all_input_nodes)


def _is_near_miss(softmax: Node) -> bool:
    """Whether a softmax looks like a masked attention's, although the attention does not match."""
    waiting, masked = [(softmax.args[0], 0)], False
    while waiting:
        node, steps = waiting.pop()
        if not isinstance(node, Node) or steps > _NEAR:
            continue
        if product_of(node) is not None:
            return masked
        name = operator_of(node)
        masked = masked or (name in (ADDITIONS | _FILLS | {"where"}) and len(node.all_input_nodes) > 1)
        waiting += [(part, steps + 1) for part in node.all_input_nodes if len(shape_of(part)) in (3, 4)]
    return False
