"""The table of batching rules, like vmap's, with the rows of all experts as the batch.

A rule takes the lifting, the template and its lifted first operand; it returns a batched value, or raises `NotProved`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch

from fxpasses.experts import gathering, products
from fxpasses.experts import rowwise_rules as rowwise
from fxpasses.experts.anti_unification import Template
from fxpasses.experts.batched_values import Flat, Places, Rows, Weights, parts_of, row_of
from fxpasses.experts.lifting import Lifting
from fxpasses.experts.row_partition import cut_of
from fxpasses.experts.selection import is_query
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.symbols import is_unbacked

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
    "repeat": rowwise.repeat, "reshape": rowwise.reshape, "rms_norm": rowwise.norm, "type_as": rowwise.type_as,
    "unsqueeze": rowwise.unsqueeze, "view": rowwise.reshape,
}  # fmt: skip


def lift(lifting: Lifting, template: Template) -> Any:
    """The batched value of a template; raises `NotProved`."""
    _check_types(template)
    if template.is_input:
        return Weights(None, template.nodes)
    if is_query(template):
        return gathering.query(lifting, template)
    if (cut := cut_of(template)) is not None:
        return lifting.parts(cut)
    if not _has_rows(template):
        return products.of_each_expert(lifting, template)
    if not template.args:
        raise NotProved(f"`{template.name}` with keyword arguments alone", template.nodes[0])
    first = lifting.lift(template.args[0])
    return _rule(template, first)(lifting, template, first)


def _check_types(template: Template) -> None:
    """Raise `NotProved` unless the branches' tensors differ only in their rows: a rule sees only the first branch's."""
    first, *others = (_types(node.meta.get("example_value")) for node in template.nodes)
    for other, node in zip(others, template.nodes[1:], strict=True):
        if other != first:
            one, another = next(pair for pair in zip_longest(first, other) if pair[0] != pair[1])
            raise NotProved(f"`{template.name or node.name}` is {one} in one branch and {another} in another", node)


def _types(example: Any) -> list[Any]:
    """The dtype, device and shape of each tensor; a size that depends on the batch's values is None."""
    return [
        f"{part.dtype} {[None if is_unbacked(size) else size for size in part.shape]} on {part.device}"
        for part in parts_of(example)
        if isinstance(part, torch.Tensor)
    ]


def _rule(template: Template, first: Any) -> Rule:
    rule = _BY_OPERAND.get(type(first)) or _BY_OPERATOR.get(template.name)
    if rule is None and rowwise.is_elementwise(template.name):
        rule = rowwise.elementwise
    if rule is None and not isinstance(first, Rows):
        raise NotProved(f"`{template.name}` of what is no row", template.nodes[0])
    rule = rule or _OF_ROWS.get(template.name)
    if rule is None:
        raise NotProved(f"`{template.name}` is not known to work row by row", template.nodes[0])
    return rule


def _has_rows(template: Template) -> bool:
    """Whether a template's tensors hold rows: their size depends on the batch's values."""
    return any(row_of(part) is not None or isinstance(part, torch.SymInt) for part in parts_of(template.example))
