"""Batching rules of products of rows with a weight of each expert, and of views of these weights."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpasses.experts.anti_unification import Constants, Template
from fxpasses.experts.batched_values import Rows, Weights, is_tensor
from fxpasses.experts.lifting import Lifting
from fxpasses.experts.selection import progression
from fxpasses.graph.refusals import NotProved

ops = torch.ops.fxpasses


def product(lifting: Lifting, template: Template, rows: Any) -> Rows:
    node, is_linear = template.nodes[0], template.name == "linear"
    weights = template.args[1] if len(template.args) > 1 else None
    if weights is None:
        raise NotProved(f"`{template.name}` with keyword arguments", node)
    bias = template.call.argument("bias") if is_linear else None
    if not isinstance(rows, Rows):
        raise NotProved("a product in which the rows come second", node)
    if not isinstance(weights, Template):
        if isinstance(bias, Template):
            raise NotProved("a shared weight with a bias of each expert", node)
        return lifting.apply(template)  # a product with a shared weight is row-wise
    if rows.ndim != 2 or rows.row != 0:
        raise NotProved("a product of rows of several dimensions", node)
    lifted = lifting.lift(weights)
    if not isinstance(lifted, Weights) or _rank(weights) != 2:
        raise NotProved("a product of two tensors of rows", node)
    biases = lifting.lift(bias)
    if biases is not None and not isinstance(biases, Weights):
        raise NotProved("a bias that all experts share", node)
    stacked_biases = lifting.stacked(biases) if biases is not None else None
    offsets = lifting.offsets(template.example, rows.node.meta["example_value"].shape[1], template.example.shape[1])
    transposed = lifted.transposed != is_linear
    if lifted.stacked is None:
        args = (rows.node, list(lifted.listed), offsets, stacked_biases, transposed, *lifting.skips)
        return Rows(lifting.filled(lifting.emit(ops.grouped_mm_list.default, args)))
    if lifting.covers and biases is None and _has_decomposition(template.example):
        return Rows(lifting.emit(ops.grouped_mm_covering.default, (rows.node, lifted.stacked, offsets, transposed)))
    args = (rows.node, lifted.stacked, offsets, stacked_biases, transposed)
    return Rows(lifting.filled(lifting.emit(ops.grouped_mm.default, args)))


def _has_decomposition(product: torch.Tensor) -> bool:
    """Whether a compiler may call the product from C++: see `runtime/grouped_decompositions.py`."""
    return product.device.type == "cpu" and product.dtype is torch.bfloat16


def of_each_expert(lifting: Lifting, template: Template) -> Weights:
    """Each expert's weight: a slice of a stack, or the transpose of a weight; otherwise the branches' own nodes."""
    if template.name == "getitem" and isinstance(template.args[0], Node) and isinstance(template.args[1], Constants):
        first, step = progression(template.args[1])
        source, count = template.args[0], len(template.nodes)
        if step == 1 and is_tensor(source) and first >= 0 and _has(source.meta["example_value"].shape, first + count):
            whole = first == 0 and source.meta["example_value"].shape[0] == count
            stacked = source if whole else lifting.emit(operator.getitem, (source, slice(first, first + count)))
            return Weights(stacked, ())
    if template.name in ("t", "transpose", "mT", "numpy_T", "getattr") and isinstance(template.args[0], Template):
        dims = template.args[1:]
        rank = _rank(template.args[0])
        swaps = template.name in ("t", "mT", "numpy_T") or (template.name == "getattr" and dims in (("mT",), ("T",)))
        swaps = swaps or (len(dims) == 2 and {d % rank for d in dims if isinstance(d, int)} == {rank - 1, rank - 2})
        inner = lifting.lift(template.args[0])
        if swaps and rank == 2 and isinstance(inner, Weights):
            return Weights(inner.stacked, inner.listed, not inner.transposed)
    return Weights(None, template.nodes)


def _has(shape: torch.Size, count: int) -> bool:
    return bool(shape) and statically_known_true(shape[0] >= count)


def _rank(template: Template) -> int:
    return int(template.example.ndim) if isinstance(template.example, torch.Tensor) else -1
