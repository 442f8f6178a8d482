"""Attention that is written out: two products with a softmax between them, and a mask before it.

    scores = query @ key.transpose(2, 3) * scale        or scaled before, divided, in the letters of `einsum`
    scores = scores + mask                              or masked_fill, where
    weights = softmax(scores, -1, dtype=float32).to(query.dtype)
    output = dropout(weights, p=0.0) @ value

It is found from its softmax: upwards to the scores, downwards to the output. Every step between must be known, and
nobody else may look at what it gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from fxpasses.graph.calls import argument, operator_of
from fxpasses.graph.refusals import Refused
from fxpasses.passes.attention.found import Attention, Mask
from fxpasses.passes.attention.products import Product, as_output, as_scores, product_of
from fxpasses.passes.attention.spelling import constant_of, is_cast, shape_of, tensor_of
from fxpasses.report import Reason

_ADDS = frozenset({"add", "add_"})
_FILLS = frozenset({"masked_fill", "masked_fill_"})
_SCALES = frozenset({"mul", "mul_"})
_DIVISIONS = frozenset({"div", "div_"})
_NEAR = 12  # steps from a softmax up to a product, at most, for the two to be spoken of as one attention


def is_softmax(node: Node) -> bool:
    """Whether a node is a softmax over the last axis of what may be the scores of an attention."""
    if operator_of(node) != "softmax" or not node.args:
        return False
    found = tensor_of(node.args[0])
    if found is None or not found.dtype.is_floating_point or found.ndim not in (3, 4):
        return False
    return argument(node, "dim") in (-1, found.ndim - 1)


class Written:
    """One softmax, and the attention around it. obstacle: why a value is not the batch's metadata; None where it is."""

    def __init__(self, softmax: Node, obstacle: Callable[[Node], Refused | None]) -> None:
        self.softmax = softmax
        self._obstacle = obstacle
        self._scale = 1.0
        self._mask: Mask | None = None
        self._steps: list[Node] = []  # from the softmax up to the product

    def attention(self) -> Attention | None:
        """None if there is none, or none with a mask. Raises `Refused`."""
        try:
            product = self._upwards()
        except Refused:
            if _is_near_miss(self.softmax):
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
        """The product that the scores come from."""
        node = self.softmax.args[0]
        while isinstance(node, Node) and node.op.startswith("call"):
            self._steps.append(node)
            product = product_of(node)
            if product is not None:
                return product
            node = self._before(node)
        return None

    def _before(self, node: Node) -> Any:
        """The scores that a step takes; raises `Refused` for a step that is not known."""
        name = operator_of(node)
        if is_cast(node):
            return node.args[0]
        scaled = _scaled(node, name)
        if scaled is not None and self._mask is not None:  # below the mask, it would scale what hides a score too
            self._scale *= scaled[1]
            return scaled[0]
        masked = self._masked(node, name)
        if masked is None:
            raise _changed(node, "the scores")
        obstacle = self._obstacle(masked[1].node)
        if obstacle is not None:
            raise obstacle
        if self._mask is not None:
            raise Refused(Reason.SCORES_CHANGED, "the scores are masked twice", node)
        self._mask = masked[1]
        return masked[0]

    def _masked(self, node: Node, name: str) -> tuple[Node, Mask] | None:
        """The scores and the mask of a step that masks."""
        if name in _ADDS and not node.kwargs.get("alpha") and len(node.args) == 2:
            return self._added(node)
        if name in _FILLS:
            fill = constant_of(argument(node, "value"))
            return self._filled(node.args[0], argument(node, "mask"), fill, hides=True)
        if name == "where" and len(node.args) == 3:
            condition, *sides = node.args
            fills = [constant_of(side) for side in sides]
            hides = fills[1] is None  # what the condition holds for is the number
            return self._filled(sides[hides], condition, fills[not hides], hides)
        return None

    def _added(self, node: Node) -> tuple[Node, Mask] | None:
        scores, mask = node.args
        if not isinstance(scores, Node) or not isinstance(mask, Node):
            return None
        if _product_above(mask) and not _product_above(scores):
            scores, mask = mask, scores
        found = tensor_of(mask)
        if found is None or not found.dtype.is_floating_point or not _product_above(scores):
            return None
        return scores, Mask(mask)

    def _filled(self, scores: Any, condition: Any, fill: float | None, hides: bool) -> tuple[Node, Mask] | None:
        if fill is None or not isinstance(scores, Node) or not isinstance(condition, Node):
            return None
        return scores, Mask(condition, fill, hides)

    def _downwards(self) -> list[Node]:
        """The nodes from the softmax to the product with the value; raises `Refused`."""
        nodes = [self.softmax]
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
    """What a step scales, and by how much."""
    if len(node.args) != 2 or node.kwargs:
        return None
    sides = [node.args, node.args[::-1]] if name in _SCALES else [node.args]
    for scores, factor in sides:
        number = constant_of(factor)
        if number is not None and isinstance(scores, Node):
            if name in _SCALES:
                return scores, number
            return (scores, 1 / number) if name in _DIVISIONS and number else None
    return None


def _check_dropout(node: Node) -> None:
    probability, training = argument(node, "p", 0.5), argument(node, "training", True)
    if probability not in (0, 0.0) and training is not False:
        raise Refused(Reason.DROPOUT, f"p = {probability}", node)


def _changed(node: Node, what: str) -> Refused:
    return Refused(Reason.SCORES_CHANGED, f"{what} go through `{operator_of(node) or node.name}`", node)


def _product_above(node: Node, steps: int = _NEAR) -> bool:
    """Whether a product of two batches of matrices is among what a value is made of, a few steps back."""
    if product_of(node) is not None:
        return True
    if steps == 0 or not node.op.startswith("call") or len(shape_of(node)) not in (3, 4):
        return False
    return any(_product_above(part, steps - 1) for part in node.all_input_nodes)


def _is_near_miss(softmax: Node) -> bool:
    """Whether a softmax is that of an attention with a mask, as far as can be told, although not of a known one."""
    waiting, masked = [(softmax.args[0], 0)], False
    while waiting:
        node, steps = waiting.pop()
        if not isinstance(node, Node) or steps > _NEAR:
            continue
        if product_of(node) is not None:
            return masked
        name = operator_of(node)
        masked = masked or (name in (_ADDS | _FILLS | {"where"}) and len(node.all_input_nodes) > 1)
        waiting += [(part, steps + 1) for part in node.all_input_nodes if len(shape_of(part)) in (3, 4)]
    return False
