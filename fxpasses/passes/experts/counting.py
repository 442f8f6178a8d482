"""What a tensor of counts adds up to: as many as there are ids, where it counts each of them once.

Every id is counted if all are below the number of counts; the index of `torch.topk` is known to be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fxpasses.graph.families import operator_of
from fxpasses.graph.routing import chooses_among, is_integer
from fxpasses.graph.symbols import expression
from fxpasses.passes.experts.selection import Masks, Unknown

_KEEPS = frozenset({"contiguous", "detach", "cpu", "cuda", "to", "long", "int", "type"})
_WIDE = (torch.int32, torch.int64)
_EXACT_FLOATS = {torch.float32: 1 << 24, torch.float64: 1 << 53}  # and up to where they count


def total_of(counts: Node, running: bool, is_constant: Callable[[Node], bool]) -> Any:
    """What all counts add up to, an expression; None where that is not known, or a count could be below zero.

    counts: integers [experts]; running: whether they are counts, or where the rows of each expert end. is_constant:
    whether nobody writes to a tensor once it is made.
    """
    ids = _counted(counts, is_constant) if running else _searched(counts, is_constant)
    if ids is None:
        return None
    choices = chooses_among(ids, is_constant)
    if choices is None or choices > expression(counts.meta["example_value"].shape[0]):
        return None
    return expression(ids.meta["example_value"].numel())


def _counted(counts: Node, is_constant: Callable[[Node], bool]) -> Node | None:
    """The ids of which element e of a tensor is the number of those that are e."""
    name, source = operator_of(counts), counts.args[0] if counts.args else None
    if not isinstance(source, Node) or not is_constant(counts) or counts.meta["example_value"].dtype not in _WIDE:
        return None
    if name in _KEEPS and source.meta["example_value"].dtype in _EXACT_FLOATS:
        return _histogram(source, is_constant)
    if name in _KEEPS:
        return _counted(source, is_constant)
    if name == "histc":
        return _histogram(counts, is_constant)
    if name == "bincount" and len(counts.args) == 1 and not set(counts.kwargs) - {"minlength"}:
        return source
    if name == "scatter_add" and len(counts.args) == 4:
        return _ones_added(counts, is_constant)
    if name == "sum" and not set(counts.kwargs) - {"dim"} and len(counts.args) <= 2:
        dims = counts.kwargs.get("dim", counts.args[1] if len(counts.args) > 1 else None)
        dims = dims if isinstance(dims, (tuple, list)) else (dims,)
        try:
            ids, axes = Masks(is_constant).one_hot(source)
        except Unknown:
            return None
        if all(isinstance(dim, int) for dim in dims):
            dropped = {dim % len(axes) for dim in dims}
            if [axis for place, axis in enumerate(axes) if place not in dropped] == [None]:
                return ids
    return None


def _ones_added(counts: Node, is_constant: Callable[[Node], bool]) -> Node | None:
    """`zeros.scatter_add(0, ids, ones)`."""
    zeros, dim, ids, ones = counts.args
    made = [operator_of(part) if isinstance(part, Node) and is_constant(part) else "" for part in (zeros, ones)]
    if dim != 0 or made[0] not in ("zeros", "new_zeros") or made[1] not in ("ones_like", "ones", "new_ones"):
        return None
    return ids if isinstance(ids, Node) and ids.meta["example_value"].ndim == 1 else None


def _histogram(counts: Node, is_constant: Callable[[Node], bool]) -> Node | None:
    """The ids of `torch.histc(ids, bins=E, min=0, max=E)`; on the CPU it takes floats, on CUDA devices integers too."""
    if operator_of(counts) != "histc" or not is_constant(counts):
        return None
    named = dict(zip(("self", "bins", "min", "max"), counts.args, strict=False)) | counts.kwargs
    values = named.get("self", named.get("input"))
    bins = named.get("bins", 100)
    if not isinstance(values, Node) or not is_constant(values) or (named.get("min"), named.get("max")) != (0, bins):
        return None
    dtype = values.meta["example_value"].dtype
    if dtype in _WIDE:
        return values
    number = expression(values.meta["example_value"].numel())
    if dtype not in _EXACT_FLOATS or not isinstance(number, int) or number > _EXACT_FLOATS[dtype]:
        return None
    ids = values.args[0] if operator_of(values) in ("float", "double", "to", "type") else None
    return ids if isinstance(ids, Node) and ids.meta["example_value"].dtype in _WIDE else None


def _searched(ends: Node, is_constant: Callable[[Node], bool]) -> Node | None:
    """The ids of which element e of a tensor is the number of those that are not above e."""
    name, source = operator_of(ends), ends.args[0] if ends.args else None
    if not isinstance(source, Node) or not is_constant(ends) or ends.meta["example_value"].dtype not in _WIDE:
        return None
    if name in _KEEPS:
        return _searched(source, is_constant)
    if name == "cumsum" and ends.args[1:] in ((0,), (-1,)) and not ends.kwargs:
        return _counted(source, is_constant)
    if name == "cumsum" and len(ends.args) == 1 and ends.kwargs in ({"dim": 0}, {"dim": -1}):
        return _counted(source, is_constant)
    if name != "searchsorted" or len(ends.args) != 2 or ends.kwargs.get("right") is not True:
        return None
    wanted = ends.args[1]
    if set(ends.kwargs) - {"right", "out_int32"} or not isinstance(wanted, Node) or not is_constant(wanted):
        return None
    if operator_of(wanted) != "arange" or len(wanted.args) != 1 or set(wanted.kwargs) - {"device", "dtype"}:
        return None
    return _sorted(source, is_constant) if is_integer(wanted) else None


def _sorted(values: Node, is_constant: Callable[[Node], bool]) -> Node | None:
    """What a tensor holds the sorted elements of, in ascending order."""
    sort = values.args[0] if operator_of(values) == "getitem" and values.args[1] == 0 else None
    if not isinstance(sort, Node) or operator_of(sort) != "sort" or not is_constant(values):
        return None
    ids = sort.args[0]
    flat = isinstance(ids, Node) and ids.meta["example_value"].ndim == 1
    if not flat or len(sort.args) > 1 or set(sort.kwargs) - {"stable", "dim"}:
        return None
    return ids  # type: ignore[return-value]
