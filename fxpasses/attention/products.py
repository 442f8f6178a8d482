"""Matches products of two batches of matrices (`matmul`, `@`, `bmm`, `einsum`), with axes as `einsum`'s letters.

scores = torch.matmul(query, key.transpose(2, 3))        "abij,abjk->abik", the key's axes swapped
scores = torch.einsum("bqhd,bkhd->bhqk", query, key)     "bqhd,bkhd->bhqk"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxpasses.attention.match import Operand
from fxpasses.attention.spelling import shape_of, tensor_of
from fxpasses.graph.calls import OperatorCall, argument, operator_of, swaps_last_dimensions
from fxpasses.graph.traits import BATCHED_PRODUCTS


@dataclass(frozen=True)
class Product:
    """The product of `left` and `right`; the axes of each, and of the result, as letters."""

    node: Node
    left: Node
    right: Node
    left_axes: str
    right_axes: str
    axes: str

    def sides(self, first_is_left: bool) -> tuple[tuple[Node, str], tuple[Node, str]]:
        """Both operands with their axes; the left one first, or last."""
        left, right = (self.left, self.left_axes), (self.right, self.right_axes)
        return (left, right) if first_is_left else (right, left)


def product_of(node: Any) -> Product | None:
    """The product of two tensors of three or four dimensions that a node computes; None if it does not."""
    if not isinstance(node, Node) or operator_of(node) not in BATCHED_PRODUCTS:
        return None
    if operator_of(node) == "einsum":
        return _einsum(node)
    left, right = argument(node, "input"), argument(node, "other")
    found, other = tensor_of(left), tensor_of(right)
    if found is None or other is None or found.ndim != other.ndim or found.ndim not in (3, 4):
        return None
    batch = "ab"[4 - found.ndim :]
    return Product(node, left, right, f"{batch}ij", f"{batch}jk", f"{batch}ik")


def _einsum(node: Node) -> Product | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation:
        return None
    terms, arrow, axes = equation.replace(" ", "").partition("->")
    left, _, right = terms.partition(",")
    if not arrow or any(len(set(term)) != len(term) or len(term) not in (3, 4) for term in (left, right, axes)):
        return None
    first, second = operands
    if not isinstance(first, Node) or not isinstance(second, Node):
        return None
    return Product(node, first, second, left, right, axes)


def as_scores(product: Product) -> tuple[Operand, Operand] | None:
    """Query and key of a product of scores [..., queries, keys]; None if the product does not give scores."""
    *batch, queries, keys = list(product.axes)
    (query, query_axes), (key, key_axes) = product.sides(first_is_left=queries in product.left_axes)
    shared = [axis for axis in query_axes if axis in key_axes and axis not in product.axes]
    if len(shared) != 1 or sorted(query_axes) != sorted([*batch, queries, *shared]):
        return None
    if sorted(key_axes) != sorted([*batch, keys, *shared]):
        return None
    return _operand(query, query_axes, [*batch, queries, *shared]), _operand(key, key_axes, [*batch, keys, *shared])


def as_output(product: Product, weights: Node) -> tuple[Operand, tuple[int, ...]] | None:
    """The value by which weights [..., queries, keys] are multiplied, and the order of the result's axes."""
    (_, axes), (value, value_axes) = product.sides(first_is_left=product.left is weights)
    *batch, queries, keys = list(axes)
    width = [axis for axis in value_axes if axis not in axes]
    if product.left is product.right or len(width) != 1 or sorted(value_axes) != sorted([*batch, keys, *width]):
        return None
    usual = [*batch, queries, *width]
    if sorted(product.axes) != sorted(usual):
        return None
    return _operand(value, value_axes, [*batch, keys, *width]), tuple(usual.index(axis) for axis in product.axes)


def _operand(node: Node, axes: str, wanted: list[str]) -> Operand:
    return without_permutations(Operand(node, tuple(axes.index(axis) for axis in wanted)))


def without_permutations(operand: Operand) -> Operand:
    """The same operand, read before its axes were permuted."""
    while (order := _permutation(operand.node)) is not None:
        source: Any = operand.node.args[0]
        operand = Operand(source, tuple(order[axis] for axis in operand.order))
    return operand


def _permutation(node: Node) -> tuple[int, ...] | None:
    """For a view that only permutes axes, the source's axis of each of its axes; None for any other node."""
    name, rank, call = operator_of(node), len(shape_of(node)), OperatorCall.of(node)
    if not rank or not node.args or len(shape_of(node.args[0])) != rank:
        return None
    order = list(range(rank))
    axes = call.sequence("dims") if name == "permute" else (call.argument("dim0"), call.argument("dim1"))
    if swaps_last_dimensions(node):
        axes = (-2, -1)
    elif name not in ("transpose", "permute") or not all(type(axis) is int for axis in axes):
        return None
    if name == "permute":
        order = [axis % rank for axis in axes]
    else:
        first, second = (axis % rank for axis in axes)
        order[first], order[second] = order[second], order[first]
    return tuple(order) if sorted(order) == list(range(rank)) else None
