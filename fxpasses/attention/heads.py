"""Matches heads of keys and values that are repeated for groups of query heads: the spelling, and its source.

key[:, :, None].expand(b, h, g, t, d).reshape(b, h * g, t, d)        key
key.repeat_interleave(g, dim=1)                                     key
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from fxpasses.attention.spelling import same, shape_of
from fxpasses.graph.calls import argument, operator_of
from fxpasses.graph.traits import COPIES

_MERGES = frozenset({"reshape", "view", "flatten"})


def unrepeated(node: Node, axis: int) -> Node | None:
    """The tensor whose heads, along `axis`, a tensor of four dimensions repeats for each group; None without repeat."""
    *_, last = _without_copies(node)
    if operator_of(last) == "repeat_interleave":
        return _repeated_at_once(last, axis)
    if operator_of(last) not in _MERGES or len(shape_of(last)) != 4:
        return None
    *_, expanded = _without_copies(last.args[0])
    if operator_of(expanded) != "expand" or not isinstance(expanded.args[0], Node):
        return None
    source = _source_of_groups(expanded.args[0], axis)
    if source is None or len(shape_of(expanded)) != 5:
        return None
    sizes, groups = list(shape_of(source)), shape_of(expanded)[axis + 1]
    grouped = (*sizes[: axis + 1], groups, *sizes[axis + 1 :])
    sizes[axis] *= groups
    return source if same(shape_of(expanded), grouped) and same(shape_of(last), tuple(sizes)) else None


def _without_copies(node: Any) -> Iterator[Node]:
    while isinstance(node, Node):
        yield node
        node = node.args[0] if operator_of(node) in COPIES else None


def _repeated_at_once(node: Node, axis: int) -> Node | None:
    source, times, dim = node.args[0], argument(node, "repeats"), argument(node, "dim")
    fits = type(times) is int and dim in (axis, axis - 4) and len(shape_of(source)) == 4
    return source if fits and isinstance(source, Node) else None


def _source_of_groups(node: Node, axis: int) -> Node | None:
    """`x` of `x[:, :, None]` and `x.unsqueeze(2)`, where the heads are axis 1."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or len(shape_of(source)) != 4:
        return None
    if operator_of(node) == "unsqueeze":
        return source if argument(node, "dim") in (axis + 1, axis - 4) else None
    if operator_of(node) != "getitem" or not isinstance(node.args[1], tuple) or Ellipsis in node.args[1][: axis + 2]:
        return None
    index = [part for part in node.args[1] if part is not Ellipsis]
    new = [position for position, part in enumerate(index) if part is None]
    whole = all(part is None or part == slice(None) for part in index)
    return source if whole and new == [axis + 1] else None
