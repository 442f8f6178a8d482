"""Which batching rule lifts a family: vmap's idea, with the rows of all experts as the batch.

A rule takes the lifting, the family and its first operand, lifted; it gives a batched value, or raises `NotProved`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxpasses.graph.anti_unification import Template
from fxpasses.graph.refusals import NotProved
from fxpasses.passes.experts import gathering, products
from fxpasses.passes.experts import rowwise_rules as rowwise
from fxpasses.passes.experts.batched_values import Flat, Places, Rows, Weights, parts_of, row_of
from fxpasses.passes.experts.lifting import Lifting
from fxpasses.passes.experts.row_partition import cut_of
from fxpasses.passes.experts.selection import is_query

Rule = Callable[[Lifting, Template, Any], Any]

_BY_OPERAND: dict[type, Rule] = {
    Flat: gathering.unflattened, Places: gathering.coordinates, tuple: gathering.item,
}  # fmt: skip
_BY_OPERATOR: dict[str, Rule] = {
    "cat": rowwise.joined, "einsum": rowwise.einsum, "getitem": gathering.getitem,
    "index_select": gathering.index_select, "linear": products.product, "matmul": products.product,
    "mm": products.product, "stack": rowwise.joined,
}  # fmt: skip
_OF_ROWS: dict[str, Rule] = dict.fromkeys(rowwise.ALONG, rowwise.along) | {
    "dropout": rowwise.dropout, "expand": rowwise.expand, "flatten": rowwise.reshape, "layer_norm": rowwise.norm,
    "repeat": rowwise.repeat, "reshape": rowwise.reshape, "rms_norm": rowwise.norm, "unsqueeze": rowwise.unsqueeze,
    "view": rowwise.reshape,
}  # fmt: skip


def lift(lifting: Lifting, family: Template) -> Any:
    """The lifted value of a family; raises `NotProved`."""
    if family.is_input:
        return Weights(None, family.nodes)
    if is_query(family):
        return gathering.query(lifting, family)
    if (cut := cut_of(family)) is not None:
        return lifting.parts(cut)
    if not _has_rows(family):
        return products.of_each_expert(lifting, family)
    if not family.args:
        raise NotProved(f"`{family.name}` with keyword arguments alone", family.nodes[0])
    first = lifting.lift(family.args[0])
    return _rule(family, first)(lifting, family, first)


def _rule(family: Template, first: Any) -> Rule:
    rule = _BY_OPERAND.get(type(first)) or _BY_OPERATOR.get(family.name)
    if rule is None and rowwise.is_elementwise(family.name):
        rule = rowwise.elementwise
    if rule is None and not isinstance(first, Rows):
        raise NotProved(f"`{family.name}` of what is no row", family.nodes[0])
    rule = rule or _OF_ROWS.get(family.name)
    if rule is None:
        raise NotProved(f"`{family.name}` is not known to work row by row", family.nodes[0])
    return rule


def _has_rows(family: Template) -> bool:
    """Whether a family's tensors are made of rows: their size is known by the batch alone."""
    return any(row_of(part) is not None or isinstance(part, torch.SymInt) for part in parts_of(family.example))
