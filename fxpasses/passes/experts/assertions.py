"""Which assertions on the sizes of an expert's rows say nothing: those that Dynamo makes of every data-dependent size.

`u0 >= 0` and `u0 <= 48`, where 48 is the number of elements of the mask, are true whatever the router chose, and go
with the query. `torch._check(tok.numel() <= capacity)` looks the same, with a smaller number, and is the program's own.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fxpasses.graph.families import operator_of

_SHAPE_ONLY = ("getitem", "squeeze", "flatten", "view", "reshape", "unbind")


def is_implied(assertion: Node, most_rows: int | None) -> bool:
    """most_rows: how many rows an expert of the loop may have at most, if that is a number."""
    condition = assertion.args[0] if assertion.args else None
    if not isinstance(condition, Node) or len(condition.args) != 2:
        return False
    name, (left, right) = operator_of(condition), condition.args
    if name == "ge":
        return type(right) is int and right == 0
    if (
        name == "eq"
    ):  # sizes of operands that must fit, and parts that must cover; one size that must be a number is not
        return isinstance(right, Node) or operator_of(left) == "sym_sum" if isinstance(left, Node) else False
    if name != "le" or not isinstance(left, Node):
        return False
    if not isinstance(right, int):
        return isinstance(right, Node)
    bounds = [bound for bound in (_elements_of_mask(left), most_rows) if isinstance(bound, int)]
    return bool(bounds) and right >= min(bounds)


def _elements_of_mask(size: Node) -> Any:
    """How many elements the mask has, where a size is that of what a query found; None elsewhere."""
    node: Any = size.args[0] if operator_of(size).startswith("sym_size") else None
    while isinstance(node, Node):
        name, operands = operator_of(node), [arg for arg in node.args[:2] if isinstance(arg, Node)]
        if name in ("where", "nonzero", "unique") and operands:
            return operands[0].meta["example_value"].numel()
        if name in ("getitem", "masked_select") and len(operands) == 2:
            return operands[1].meta["example_value"].numel()
        node = (
            operands[0] if name in ("getitem", "squeeze", "flatten", "view", "reshape", "unbind") and operands else None
        )
    return None
