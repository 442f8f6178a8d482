"""The floating-point operations of a node at the traced sizes, two for each multiply-add.

The formulas for convolutions and attention are those of `torch.utils.flop_counter`. Backward and recomputation are not
counted; element-wise operators count as zero, as in PyTorch's own counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxpasses.graph.calls import operator_of
from fxpasses.graph.symbols import sizes_of

Shape = list[int]
SizesOf = Callable[[torch.Tensor], Shape | None]


def has_formula(node: Node) -> bool:
    """Whether a node computes matrix products, convolutions or attention."""
    return operator_of(node) in _FORMULAS


def flops_of(node: Node, results: Sequence[Any], sizes: SizesOf = sizes_of) -> int | None:
    """The estimate; None if there is no formula, or if `sizes` does not know a size."""
    if not has_formula(node):
        return None
    formula = _FORMULAS[operator_of(node)]
    taken: list[Node] = []  # with repetitions, as in attention of x with itself
    map_arg((node.args, node.kwargs), taken.append)
    tensors = [argument.meta.get("example_value", argument.meta.get("val")) for argument in taken]
    shapes = [sizes(value) for value in tensors if isinstance(value, torch.Tensor)]
    outputs = [sizes(value) for value in results if isinstance(value, torch.Tensor)]
    if None in shapes or None in outputs or not shapes or not outputs:
        return None
    try:
        return int(formula([s for s in shapes if s is not None], [s for s in outputs if s is not None], node))
    except (ArithmeticError, AssertionError, IndexError, TypeError, ValueError):  # the formula is not for these sizes
        return None


def _product(shapes: list[Shape], outputs: list[Shape], node: Node) -> int:
    """x @ w: each element of the result is a sum over x's last dimension."""
    return 2 * math.prod(outputs[0]) * shapes[0][-1]


def _grouped_product(shapes: list[Shape], outputs: list[Shape], node: Node) -> int:
    """Rows [N, K] by their group's weight, or groups of columns of [A, N] by rows of [N, B]: each row counts once."""
    if len(shapes[0]) == len(shapes[1]) == 2 and len(outputs[0]) == 3:
        return 2 * math.prod(shapes[0]) * shapes[1][-1]
    return _product(shapes, outputs, node)


def _grouped_outer(shapes: list[Shape], outputs: list[Shape], node: Node) -> int:
    """Rows [N, A] by rows [N, B]: each pair of rows counts once."""
    return 2 * math.prod(shapes[0]) * shapes[1][-1]


def _added_product(shapes: list[Shape], outputs: list[Shape], node: Node) -> int:
    return 2 * math.prod(outputs[0]) * shapes[1][-1]


def _attention(shapes: list[Shape], outputs: list[Shape], node: Node) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    query, key, value = (_four_dimensional(shape) for shape in shapes[:3])
    heads = query[1]  # with grouped queries, several heads share keys and values
    return sdpa_flop_count(query, [key[0], heads, *key[2:]], [value[0], heads, *value[2:]])


def _four_dimensional(shape: Shape) -> Shape:
    return [1] * (4 - len(shape)) + shape if len(shape) <= 4 else [math.prod(shape[:-3]), *shape[-3:]]


def _convolution(shapes: list[Shape], outputs: list[Shape], node: Node) -> int:
    from torch.utils.flop_counter import conv_flop_count

    return conv_flop_count(shapes[0], shapes[1], outputs[0])


def _einsum(shapes: list[Shape], outputs: list[Shape], node: Node) -> int:
    """Two operands: every combination of all letters is multiplied and added once."""
    equation = str(node.args[0]).replace(" ", "")
    terms = equation.split("->")[0].split(",")
    if len(terms) != 2 or "." in equation:
        raise ValueError(equation)
    sizes = {
        letter: size
        for term, shape in zip(terms, shapes, strict=True)
        for letter, size in zip(term, shape, strict=True)
    }
    return 2 * math.prod(sizes.values())


_FORMULAS: dict[str, Callable[[list[Shape], list[Shape], Node], int]] = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "mv", "dot"), _product),
    **dict.fromkeys(("_grouped_mm", "grouped_mm"), _grouped_product),
    **dict.fromkeys((f"fxpasses::grouped_mm{kind}" for kind in ("", "_covering", "_list")), _grouped_product),
    **dict.fromkeys((f"fxpasses::grouped_outer{kind}" for kind in ("", "_covering", "_list")), _grouped_outer),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm"), _added_product),
    **dict.fromkeys(
        ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", "fxpasses::sparse_attention"),
        _attention,  # counts all pairs: the batch determines which of them a plan omits
    ),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    "einsum": _einsum,
}
