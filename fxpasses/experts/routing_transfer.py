"""Transfer functions of the routing analysis: the fact of an operator's result from those of its operands.

Each returns a fact, whose evidence lists the other nodes that must not be written to; a text that says why there is no
fact; or None if there is nothing to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.fx import Node

from fxpasses.experts.routing_facts import (
    Choice,
    Columns,
    Counts,
    Ends,
    Fact,
    Hits,
    Mask,
    Nothing,
    OneHot,
    Presence,
    Scattered,
    Sorted,
)
from fxpasses.graph.calls import OperatorCall, argument, operator_of
from fxpasses.graph.symbols import constant, expression
from fxpasses.graph.traits import is_integer

Result = Fact | str | None


class Routing(Protocol):
    """What a transfer function may ask (`experts/routing.py`)."""

    def of(self, node: Node) -> Fact: ...

    def choice(self, ids: Node) -> Choice: ...

    def presence(self, node: Node) -> Presence | None: ...

    def canonical(self, node: Node) -> Node: ...


CASTS = ("bool", "contiguous", "cpu", "cuda", "detach", "double", "float", "int", "long", "to", "type")
RESHAPES = ("flatten", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view")
ZEROS, _ONES = ("new_zeros", "zeros", "zeros_like"), ("new_ones", "ones", "ones_like")
WIDE = (torch.int32, torch.int64)
_NARROW = (torch.int8, torch.uint8, torch.int16)  # where a count of 256 may wrap to 0
_EXACT_FLOATS = {torch.float32: 1 << 24, torch.float64: 1 << 53}  # every integer up to this is represented exactly
# Comparisons that hold for a non-negative number if and only if it is not 0, and their negations.
_SOME, _NONE = {("gt", 0), ("ge", 1), ("ne", 0)}, {("eq", 0), ("lt", 1), ("le", 0)}


def example_of(node: Any) -> torch.Tensor | None:
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    return example if isinstance(example, torch.Tensor) else None


def dtype_of(node: Any) -> torch.dtype | None:
    return getattr(example_of(node), "dtype", None)


def pairs_of(ids: Node) -> Any:
    """The number of pairs, an expression."""
    example = example_of(ids)
    return expression(example.numel()) if example is not None else None


def reads_bits(node: Node) -> bool:
    """Whether a node reinterprets its operand's bits, as `x.view(dtype)` does."""
    return operator_of(node) == "view" and dtype_of(node) is not dtype_of(node.args[0])


def _sizes(node: Any) -> list[Any]:
    """A tensor's sizes, each a number, or an expression if the number is not known."""
    example = example_of(node)
    found = [(constant(size), expression(size)) for size in example.shape] if example is not None else []
    return [known if known is not None else size for known, size in found]


def _ndim(node: Any) -> int:
    return len(_sizes(node))


def _exact_to(dtype: torch.dtype | None) -> float:
    """The number up to which a dtype represents all integers exactly."""
    return math.inf if dtype in WIDE else _EXACT_FLOATS.get(dtype, 0)  # type: ignore[arg-type]


def _counts_up(node: Node) -> bool:
    """Whether a sum of ones in a tensor's dtype never wraps to zero."""
    return dtype_of(node) not in (None, *_NARROW)


# The router's choice


def _choice(routing: Routing, node: Node) -> Result:
    """`scores.argmax(-1)`, and the index in `scores.max(-1)` and `scores.topk(k)`."""
    best: Any = node if operator_of(node) == "argmax" else node.args[0]
    is_topk, sizes = operator_of(best) == "topk", _sizes(best.args[0])
    if not sizes or argument(best, "dim", -1 if is_topk else None) not in (-1, len(sizes) - 1):
        return None
    top = _number(_sizes(node)[-1]) if is_topk else None
    return Choice(_number(sizes[-1]), distinct=is_topk, top=top)


def _number(size: Any) -> int | None:
    return size if isinstance(size, int) else None


# One-hot tensors


def _one_hot(routing: Routing, node: Node) -> Result:
    ids: Any = node.args[0] if node.args else None
    return OneHot(routing.canonical(ids), (*range(_ndim(ids)), None)) if isinstance(ids, Node) else None


def _scatter(routing: Routing, node: Node) -> Result:
    """`zeros.scatter(1, ids, value)`, [T, E]. No pair overwrites another: ids [T, k] come from a `topk`."""
    if len(node.args) != 4 or node.kwargs:
        return None
    zeros, dim, ids, value = node.args
    in_place = operator_of(node) == "scatter_"
    if not isinstance(zeros, Node) or operator_of(zeros) not in ZEROS or not isinstance(ids, Node):
        return None
    choice, shape, of_ids = routing.choice(ids), _sizes(zeros), _sizes(ids)
    fits = len(shape) == len(of_ids) == 2 and shape[0] == of_ids[0] and dim in (1, -1)
    if not fits or not choice.distinct or (in_place and node is not min(zeros.users)):
        return None
    evidence, ids = choice.evidence | ({zeros} if not in_place else set()), routing.canonical(ids)
    is_one = type(value) in (int, float) and value == 1
    return OneHot(ids, (0, None), evidence=evidence) if is_one else Scattered(ids, evidence=evidence)


def _zeros(routing: Routing, node: Node) -> Result:
    """Zeros whose first user scatters numbers into them: the other users read these numbers."""
    first = min(node.users, default=node)
    return _scatter(routing, first) if operator_of(first) == "scatter_" and first.args[0] is node else None


# Counts, and what is computed from them


def _bincount(routing: Routing, node: Node) -> Result:
    ids: Any = node.args[0] if node.args else None
    is_plain = isinstance(ids, Node) and OperatorCall.of(node).has_only("input", "minlength")
    return Counts(ids, math.inf) if is_plain else None


def _scatter_add(routing: Routing, node: Node) -> Result:
    """`zeros.scatter_add(0, ids, ones)`."""
    zeros, dim, ids, ones = (argument(node, name) for name in ("input", "dim", "index", "src"))
    if dim != 0 or _ndim(ids) != 1 or not _counts_up(node):
        return None
    if not all(isinstance(part, Node) and operator_of(part) in made for part, made in ((zeros, ZEROS), (ones, _ONES))):
        return None
    return Counts(ids, _exact_to(dtype_of(node)), evidence=frozenset((zeros, ones)))


def _histc(routing: Routing, node: Node) -> Result:
    """`torch.histc(ids, bins=E, min=0, max=E)`, or `max=E - 1`: of floats on the CPU, of integers too on CUDA devices.

    An id e is counted in the bin e * E / max, rounded down, and an id of `max` in the last bin, E - 1. If max is E - 1,
    e * E / max is above e by e / max, and below e + 1 by at least 1 / max, so rounding must not reach e + 1.
    """
    values, bins = argument(node, "input"), argument(node, "bins", 100)
    if not isinstance(values, Node) or type(bins) is not int or argument(node, "min") != 0:
        return None
    if argument(node, "max") not in (bins, bins - 1) or bins < 2:
        return None
    is_cast = operator_of(values) in CASTS and dtype_of(values) not in WIDE
    ids: Any = values.args[0] if is_cast else values
    if dtype_of(ids) not in WIDE or _exact_to(dtype_of(values)) < 4 * bins * bins:
        return None
    choice = routing.choice(ids)
    if choice.choices is None or choice.choices > bins:
        return None
    return Counts(ids, _exact_to(dtype_of(node)), evidence=choice.evidence | {values})


def _cumsum(routing: Routing, node: Node) -> Result:
    counts: Any = node.args[0]
    fact, is_plain = routing.of(counts), OperatorCall.of(node).has_only("input", "dim")
    if not isinstance(fact, Counts) or not is_plain or argument(node, "dim") not in (0, -1) or _ndim(counts) != 1:
        return None
    return Ends(fact.ids, fact.exact_to, evidence=fact.evidence) if dtype_of(node) in WIDE else None


def _sorted(routing: Routing, node: Node) -> Result:
    """`torch.sort(ids)[0]`."""
    sort: Any = node.args[0]
    ids = sort.args[0]
    is_plain = _ndim(ids) == 1 and len(sort.args) == 1 and not set(sort.kwargs) - {"stable", "dim"}
    return Sorted(ids) if is_plain else None


def _searchsorted(routing: Routing, node: Node) -> Result:
    """`torch.searchsorted(sorted, torch.arange(E), right=True)`."""
    if len(node.args) != 2 or set(node.kwargs) - {"right", "out_int32"} or node.kwargs.get("right") is not True:
        return None
    values, wanted = node.args
    if not isinstance(values, Node) or not isinstance(wanted, Node) or operator_of(wanted) != "arange":
        return None
    fact, counts_up = routing.of(values), len(wanted.args) == 1 and not set(wanted.kwargs) - {"device", "dtype"}
    if not isinstance(fact, Sorted) or not counts_up or not is_integer(wanted):
        return None
    return Ends(fact.ids, exact_to=math.inf, evidence=fact.evidence | {wanted})


def _places(routing: Routing, node: Node) -> Result:
    """`(counts > 0).nonzero()`, `torch.where(counts)`."""
    counts: Any = node.args[0]
    fact, is_where = routing.of(counts) if isinstance(counts, Node) else None, operator_of(node) == "where"
    if not isinstance(fact, Counts) or _ndim(counts) != 1 or (is_where and len(node.args) + len(node.kwargs) != 1):
        return None
    return Hits(fact.ids, is_where or bool(argument(node, "as_tuple")), evidence=fact.evidence)


def _unique(routing: Routing, node: Node) -> Result:
    ids: Any = node.args[0]
    is_plain = len(node.args) == 1 and not node.kwargs and isinstance(ids, Node) and is_integer(ids)
    return Hits(ids) if is_plain else None


# Comparisons with a number


def _compare(routing: Routing, node: Node) -> Result:
    source, number = argument(node, "input"), argument(node, "other")
    if isinstance(number, Node) and operator_of(node) == "eq":
        source, number = number, source
    if not isinstance(source, Node) or not isinstance(number, (int, float)):
        return None
    asked, fact = (operator_of(node), number), routing.of(source)
    if isinstance(fact, Mask) and isinstance(fact.ids, Columns) and asked[0] != "eq":
        return replace(fact, ids=replace(fact.ids, tests=(*fact.ids.tests, (node.target, number))))
    if asked in _SOME and isinstance(fact, Counts):
        return replace(fact, exact_to=0)
    if asked in _SOME and isinstance(fact, (Mask, Presence)):
        return fact
    if asked in _NONE and isinstance(fact, Presence) and example_of(source) is not None and {*_sizes(source)} <= {1}:
        return replace(fact, present=not fact.present)
    if asked[0] != "eq" or type(number) is not int or not is_integer(source):
        return None
    axes = tuple(range(_ndim(source)))
    return Mask(routing.canonical(source), axes, len(axes), number)


# Reductions


def _reduce(routing: Routing, node: Node) -> Result:
    source: Any = node.args[0]
    if not isinstance(source, Node) or (operator_of(node) == "max" and len(node.args) + len(node.kwargs) > 1):
        return None  # `max` along a dimension returns a pair
    fact, dims = routing.of(source), argument(node, "dim")
    dims = dims if isinstance(dims, (tuple, list)) else (dims,)
    if isinstance(fact, OneHot):
        return _reduced_one_hot(routing, node, fact, dims)
    found = _without_slots(routing, node, fact, dims) if isinstance(fact, Mask) else None
    return found if isinstance(found, Mask) else _still_present(routing, node, found)


def _reduced_one_hot(routing: Routing, node: Node, fact: OneHot, dims: Any) -> Result:
    if all(type(dim) is int for dim in dims) and not argument(node, "keepdim", False):
        dropped = {dim % len(fact.axes) for dim in dims}
        axes = tuple(axis for place, axis in enumerate(fact.axes) if place not in dropped)
        if axes == (None,) and _counts_up(node):
            exact_to = _exact_to(dtype_of(node)) if operator_of(node) in ("count_nonzero", "sum") else 0
            return Counts(fact.ids, exact_to, evidence=fact.evidence)
        slots, choice = _ndim(fact.ids) - 1, routing.choice(fact.ids)
        if len(dropped) == 1 and slots in fact.axes and slots not in axes and choice.distinct:
            return OneHot(fact.ids, axes, evidence=fact.evidence | choice.evidence)
    return "a sum of one-hot masks"


def _without_slots(routing: Routing, node: Node, mask: Mask, dims: Any) -> Mask | str:
    """`(idx == e).any(-1)`: the tokens that have e in some slot."""
    name, ids, keeps = operator_of(node), mask.ids, argument(node, "keepdim", False)
    if isinstance(ids, Columns) or mask.dims < 2 or mask.flat or mask.spread or [type(dim) for dim in dims] != [int]:
        return f"`{name}` of a mask"
    place, evidence = dims[0] % mask.dims, mask.evidence
    if keeps and place != mask.dims - 1:
        return f"`{name}` of a mask"
    if name == "squeeze":
        size = _number(_sizes(ids)[mask.axes[place]])
        if size is None:
            return "`squeeze` of a mask with several slots"
        if size != 1:
            return mask  # unchanged: Qwen2-MoE squeezes the slots in vain
    else:
        choice = routing.choice(ids)
        if len(mask.axes) != mask.dims or mask.axes[place] != mask.dims - 1 or not choice.distinct:
            return "the graph does not show that a token chooses an expert at most once"
        evidence |= choice.evidence
    axes = (*mask.axes[:place], *mask.axes[place + 1 :], mask.axes[place])
    return Mask(ids, axes, mask.dims - 1, mask.expert, spread=bool(keeps), evidence=evidence)


def _still_present(routing: Routing, node: Node, text: str | None = None) -> Result:
    """The result says, like its operand, whether an expert has pairs. text: why the result is not a mask."""
    presence = routing.presence(node.args[0])  # type: ignore[arg-type]
    if presence is None or not _counts_up(node):
        return text
    return replace(presence, text=text or presence.text or f"`{operator_of(node)}` of a mask")


# Other dtypes, memory and shapes


def _cast(routing: Routing, node: Node) -> Result:
    source: Any = node.args[0] if node.args else None
    before, after = dtype_of(source), dtype_of(node)
    if before is None or after is None:
        return None
    fact = routing.of(source)
    if before is torch.float16 and not after.is_floating_point and after is not torch.bool:
        return None  # infinity, the count of more pairs than float16 represents, is a negative integer
    match fact:
        case Presence():
            return _still_present(routing, node)
        case Counts():
            return replace(fact, exact_to=min(fact.exact_to, _exact_to(after))) if _counts_up(node) else None
        case Choice(choices) if after is not before and after not in WIDE:
            is_index = is_integer(node) and after is not torch.bool
            kept = is_index and choices is not None and choices - 1 <= torch.iinfo(after).max
        case Ends():
            kept = after in WIDE
        case Mask(Columns()):
            kept = after is before or torch.bool in (before, after)  # a score of 0.5 would become the integer 0
        case _:
            kept = not isinstance(fact, (Nothing, Scattered, Sorted))
    return fact if kept else None


def _reshape(routing: Routing, node: Node) -> Result:
    source: Any = node.args[0]
    if not isinstance(source, Node) or reads_bits(node):
        return None
    fact = routing.of(source)
    match fact:
        case Choice():
            slots = fact.slots if _ndim(source) == _ndim(node) == 1 else 1
            if fact.distinct and (_ndim(source), _ndim(node)) == (2, 1) and operator_of(node) != "squeeze":
                slots = _number(_sizes(source)[1]) or 1
            return replace(fact, distinct=False, slots=slots)
        case OneHot():
            axes = _moved(node, fact.axes)
            return replace(fact, axes=axes) if axes else f"`{operator_of(node)}` of a one-hot mask"
        case Mask():
            return _reshaped_mask(routing, node, fact)
        case Counts() if sum(size != 1 for size in _sizes(node)) <= 1:
            return fact
        case Hits(in_tuple=False):
            return fact
        case Presence():
            return _still_present(routing, node)
    return None


def _moved(node: Node, axes: tuple[int | None, ...]) -> tuple[int | None, ...] | None:
    """The axes after `permute` or `transpose`; None for other operators."""
    order = list(range(len(axes)))
    if operator_of(node) == "transpose":
        one, other = (argument(node, name) % len(axes) for name in ("dim0", "dim1"))
        order[one], order[other] = other, one
    elif operator_of(node) == "permute":
        order = list(OperatorCall.of(node).sequence("dims"))
    else:
        return None
    return tuple(axes[place] for place in order) if len(order) == len(axes) else None


def _reshaped_mask(routing: Routing, node: Node, mask: Mask) -> Result:
    name = operator_of(node)
    if name == "unsqueeze" and argument(node, "dim") in (-1, _ndim(node) - 1) and not mask.spread:
        return replace(mask, spread=True)
    if name == "squeeze":
        found = _without_slots(routing, node, mask, (argument(node, "dim"),))
        return found if isinstance(found, Mask) else _still_present(routing, node, found)
    is_plain = isinstance(mask.ids, Node) and not mask.flat and not mask.spread
    if name in ("flatten", "reshape", "view") and is_plain and _ndim(node) == 1 and dtype_of(node) is torch.bool:
        return replace(mask, flat=mask.dims > 1)
    return _still_present(routing, node)


def _expand(routing: Routing, node: Node) -> Result:
    """A mask of tokens, broadcast over the features."""
    source: Any = node.args[0]
    fact = routing.of(source)
    is_spread = isinstance(fact, Mask) and fact.spread and _sizes(source) == [*_sizes(node)[:-1], 1]
    return fact if is_spread else "a mask over features"


# Indices


def _index(routing: Routing, node: Node) -> Result:
    """`x[...]` and `x.select(dim, index)`."""
    source: Any = node.args[0]
    if not isinstance(source, Node):
        return None
    index = node.args[1] if operator_of(node) == "getitem" else None
    if isinstance(source.meta.get("example_value"), (tuple, list)) and type(index) is int:
        part = _PARTS.get((operator_of(source), index))
        return part(routing, node) if part is not None else None
    fact, (place, expert) = routing.of(source), _element(node)
    if isinstance(fact, Choice):
        return replace(fact, distinct=False, slots=1)
    spreading = (Ellipsis, None), (*[slice(None)] * (_ndim(node) - 1), None)
    if isinstance(fact, Mask) and not fact.spread and index in spreading:
        return replace(fact, spread=True)
    if place is None or expert is None or expert < 0:
        return "an index of a mask"
    match fact:
        case OneHot() if fact.axes[place] is not None:
            return "an index of a one-hot mask"
        case OneHot():
            rest = [axis for axis in fact.axes if axis is not None]
            missing = [axis for axis in range(_ndim(fact.ids)) if axis not in rest]  # summed over the slots
            return Mask(fact.ids, (*rest, *missing), len(rest), expert, evidence=fact.evidence)
        case Counts() | Ends() if _ndim(source) == 1:  # the first expert's end is its count
            is_count = isinstance(fact, Counts) or expert == 0
            return Presence(fact.ids, expert, evidence=fact.evidence) if is_count else None
    size = _number(_sizes(source)[place])
    if _ndim(source) < 2 or size is None or expert >= size:
        return None
    others = tuple(axis for axis in range(_ndim(source)) if axis != place)
    columns = Columns(routing.canonical(source), place)
    return Mask(columns, (*others, place), len(others), expert, evidence=fact.evidence)


def _hits(routing: Routing, node: Node) -> Result:
    fact = routing.of(node.args[0])  # type: ignore[arg-type]
    return replace(fact, in_tuple=False) if isinstance(fact, Hits) else None


def _element(node: Node) -> tuple[int | None, int | None]:
    """(dimension, place) of an index that is one number along one dimension."""
    ndim, index = _ndim(node.args[0]), node.args[1] if len(node.args) > 1 else None
    if operator_of(node) == "select":
        place, number = argument(node, "dim"), argument(node, "index")
        place = place % ndim if type(place) is int and ndim else None
    else:
        parts: Any = index if isinstance(index, tuple) else (index,)
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            parts = (*parts[:at], *[slice(None)] * (ndim - len(parts) + 1), *parts[at + 1 :])
        places = [at for at, part in enumerate(parts) if part != slice(None)]
        place, number = (places[0], parts[places[0]]) if len(places) == 1 else (None, None)
    return (place, number) if type(place) is int and type(number) is int and place < ndim else (None, None)


_Transfer = Callable[[Routing, Node], Result]
_PARTS: dict[tuple[str, int], _Transfer] = {
    ("max", 1): _choice,
    ("nonzero", 0): _hits,
    ("sort", 0): _sorted,
    ("topk", 1): _choice,
    ("where", 0): _hits,
}
TRANSFER: dict[str, _Transfer] = {
    "argmax": _choice,
    "bincount": _bincount,
    "cumsum": _cumsum,
    "expand": _expand,
    "expand_as": _expand,
    "getitem": _index,
    "histc": _histc,
    "nonzero": _places,
    "one_hot": _one_hot,
    "scatter": _scatter,
    "scatter_": _scatter,
    "scatter_add": _scatter_add,
    "searchsorted": _searchsorted,
    "select": _index,
    "unique": _unique,
    "where": _places,
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys(("eq", "ge", "gt", "le", "lt", "ne"), _compare),
    **dict.fromkeys(("amax", "any", "count_nonzero", "max", "sum"), _reduce),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(ZEROS, _zeros),
}
