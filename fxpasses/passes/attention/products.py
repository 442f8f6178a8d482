"""Products of two batches of matrices, in the letters of `einsum`: `matmul`, `@`, `bmm`, `einsum`.

scores = torch.matmul(query, key.transpose(2, 3))        "abij,abjk->abik", the key's axes swapped
scores = torch.einsum("bqhd,bkhd->bhqk", query, key)     "bqhd,bkhd->bhqk"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxpasses.graph.calls import OperatorCall, argument, operator_of
from fxpasses.passes.attention.found import Operand
from fxpasses.passes.attention.spelling import tensor_of

_PRODUCTS = frozenset({"matmul", "bmm", "einsum"})


@dataclass(frozen=True)
class Product:
    """`left` and `right` are multiplied; the axes of each, and of the result, in letters."""

    node: Node
    left: Node
    right: Node
    left_axes: str
    right_axes: str
    axes: str


def product_of(node: Any) -> Product | None:
    """The product that a node is, of two tensors of three or four dimensions; None where it is not one."""
    if not isinstance(node, Node) or operator_of(node) not in _PRODUCTS:
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
    """The query and key of a product whose last two axes are queries and keys; None where it is none of scores."""
    *batch, queries, keys = list(product.axes)
    sides = [(product.left, product.left_axes), (product.right, product.right_axes)]
    if queries not in sides[0][1]:
        sides.reverse()
    (query, query_axes), (key, key_axes) = sides
    shared = [axis for axis in query_axes if axis in key_axes and axis not in product.axes]
    if len(shared) != 1 or sorted(query_axes) != sorted([*batch, queries, *shared]):
        return None
    if sorted(key_axes) != sorted([*batch, keys, *shared]):
        return None
    return _operand(query, query_axes, [*batch, queries, *shared]), _operand(key, key_axes, [*batch, keys, *shared])


def as_output(product: Product, weights: Node) -> tuple[Operand, tuple[int, ...]] | None:
    """The value that weights [..., queries, keys] are multiplied with, and the order of the result's axes."""
    sides = [(product.left, product.left_axes), (product.right, product.right_axes)]
    if product.left is not weights:
        sides.reverse()
    (_, axes), (value, value_axes) = sides
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
    """The same operand, looked at before its axes were swapped."""
    while True:
        order = _permutation(operand.node)
        if order is None:
            return operand
        source = operand.node.args[0]
        assert isinstance(source, Node)
        operand = Operand(source, tuple(order[axis] for axis in operand.order))


def _permutation(node: Node) -> tuple[int, ...] | None:
    """For a view that only swaps axes: which axis of its argument each of its own is."""
    name, found = operator_of(node), tensor_of(node)
    source = tensor_of(node.args[0]) if node.args else None
    if found is None or source is None or source.ndim != found.ndim:
        return None
    rank = found.ndim
    order = list(range(rank))
    axes = (
        (argument(node, "dim0"), argument(node, "dim1"))
        if name == "transpose"
        else OperatorCall.of(node).sequence("dims")
    )
    if name in ("transpose", "permute") and not all(type(axis) is int for axis in axes):
        return None
    if name == "transpose":
        first, second = (axis % rank for axis in axes)
        order[first], order[second] = order[second], order[first]
    elif name == "permute":
        order = [axis % rank for axis in axes]
    elif name == "getattr" and node.args[1:] == ("mT",):
        order[-2:] = order[:-3:-1]
    else:
        return None
    return tuple(order) if sorted(order) == list(range(rank)) else None
