"""Batching rules of products of rows with a weight of each expert, and of what leads to these weights."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from fxpasses.graph.anti_unification import Constants, Template
from fxpasses.graph.refusals import NotProved
from fxpasses.passes.experts.batched_values import Rows, Weights, is_tensor
from fxpasses.passes.experts.lifting import Lifting
from fxpasses.passes.experts.selection import progression

ops = torch.ops.fxpasses


def product(lifting: Lifting, family: Template, rows: Any) -> Rows:
    node = family.nodes[0]
    weights, bias = family.args[1], None
    if family.name == "linear":
        bias = family.call.argument("bias")
    if not isinstance(rows, Rows):
        raise NotProved("a product in which the rows come second", node)
    if not isinstance(weights, Template):
        if bias is not None and isinstance(bias, Template):
            raise NotProved("a shared weight with a bias of each expert", node)
        return lifting.apply(family)  # the same weight for all: row by row
    if rows.ndim != 2 or rows.row != 0:
        raise NotProved("a product of rows of several dimensions", node)
    lifted = lifting.lift(weights)
    if not isinstance(lifted, Weights) or _rank(lifting, weights) != 2:
        raise NotProved("a product of two tensors of rows", node)
    transposed = lifted.transposed != (family.name == "linear")
    stacked_bias = None
    if bias is not None:
        lifted_bias = lifting.lift(bias)
        if not isinstance(lifted_bias, Weights):
            raise NotProved("a bias that all experts share", node)
        stacked_bias = lifting.stacked(lifted_bias)
    assert lifting.order is not None
    if lifted.stacked is not None:
        args = (rows.node, lifted.stacked, lifting.order.offsets, stacked_bias, transposed)
        return Rows(lifting.emit(ops.grouped_mm.default, args))
    args = (rows.node, list(lifted.listed), lifting.order.offsets, stacked_bias, transposed)  # type: ignore[assignment]
    return Rows(lifting.emit(ops.grouped_mm_list.default, args))


def of_each_expert(lifting: Lifting, family: Template) -> Weights:
    """A weight of each expert: one slice of a stack, or the transpose of such; else the branches' own nodes."""
    if family.name == "getitem" and isinstance(family.args[0], Node) and isinstance(family.args[1], Constants):
        first, step = progression(family.args[1])
        source, count = family.args[0], len(family.nodes)
        if step == 1 and is_tensor(source):
            whole = first == 0 and source.meta["example_value"].shape[0] == count
            stacked = source if whole else lifting.emit(operator.getitem, (source, slice(first, first + count)))
            return Weights(stacked, ())
    if family.name in ("t", "transpose", "mT", "T", "getattr") and isinstance(family.args[0], Template):
        dims = family.args[1:]
        rank = _rank(lifting, family.args[0])
        swaps = family.name == "t" or (family.name == "getattr" and dims in (("mT",), ("T",)))
        swaps = swaps or (len(dims) == 2 and {d % rank for d in dims if isinstance(d, int)} == {rank - 1, rank - 2})
        inner = lifting.lift(family.args[0])
        if swaps and rank == 2 and isinstance(inner, Weights):
            return Weights(inner.stacked, inner.listed, not inner.transposed)
    return Weights(None, family.nodes)


def _rank(lifting: Lifting, family: Template) -> int:
    return int(family.example.ndim) if isinstance(family.example, torch.Tensor) else -1
