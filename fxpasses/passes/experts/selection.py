"""What the mask of an expert means: which (token, slot) pairs of the router's choice are its own, and in which order.

A loop asks for the tokens of expert e with a mask: `idx == e`, `one_hot(idx, E).permute(2, 1, 0)[e]`, either of them
`.any(-1)` over the slots, or column e of a matrix. A `Mask` says the same of one expert; a `Selection` of all experts
of a loop at once: the expert id of every pair, in the order in which `torch.where(mask)` finds pairs, and how to get
from a pair's place to the mask's coordinates. Sorted stably by expert, the places are the queries' results one after
the other.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from fxpasses.graph.families import REPEATED, Constants, Family, operator_of
from fxpasses.graph.refusals import NotProved as Unknown
from fxpasses.graph.routing import KEEP_VALUES, chooses_among, is_integer, is_topk_index
from fxpasses.graph.symbols import constant, expression


@dataclass(frozen=True)
class Columns:
    """Expert e has the tokens at which column e of a matrix passes the tests.

    matrix: any dtype; its dimension `dim` is the experts'. tests: comparisons with a number, (operator, number), each
    of the result of the one before; without any, it is whether the element is not zero.
    """

    matrix: Node
    dim: int
    tests: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True)
class Mask:
    """One expert's mask. ids: the router's choice, or the columns that it is one of. The others: see `Selection`."""

    ids: Node | Columns
    axes: tuple[int, ...]
    dims: int
    expert: int
    flat: bool = False


@dataclass(frozen=True)
class Selection:
    """ids: an integer tensor; its axes in the order `axes`, flattened, are the expert ids of all pairs.

    axes: the axes of `ids`, in the order of the mask's own dimensions; for a mask over tokens alone (`any` over the
    slots) the slots' axis comes last, and `dims` is 1. dims: how many dimensions the mask has. first, step, count: the
    branches' expert ids are first + step * branch, with step 1 or -1. choices: how many experts there are to choose
    from, if the ids are known to be below that. distinct: whether the ids along the last axis differ from each other.
    slots: of one-dimensional ids, how many in a row (from a multiple of it on) differ from each other. flat: whether
    the mask's `dims` dimensions were laid flat, into one. scores: a matrix [T, E] made by scattering the pairs' scores;
    those alone are pairs whose score passes the tests.
    """

    ids: Node
    axes: tuple[int, ...]
    dims: int
    first: int
    step: int
    count: int
    choices: int | None
    distinct: bool
    slots: int = 1
    flat: bool = False
    scores: Columns | None = None

    @property
    def covers(self) -> bool:
        """Whether each pair is known to be of one of the experts."""
        lowest = min(self.first, self.first + self.step * (self.count - 1))
        return self.choices == self.count and lowest == 0


def is_query(family: Family) -> bool:
    """Whether the branches ask for their tokens here."""
    if family.name == "masked_select":
        return len(family.args) == 2 and isinstance(family.args[1], Family)
    if family.name == "where":
        return len(family.args) == 1 and not family.kwargs
    if family.name == "nonzero":
        return bool(family.args)
    if family.name != "getitem" or not isinstance(family.args[1], Family):
        return False
    index = family.args[1].example
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


class Masks:
    """Reads masks. is_constant: whether a node keeps the value it was made with; one that does not tells nothing."""

    def __init__(self, is_constant: Callable[[Node], bool]) -> None:
        self.is_constant = is_constant
        self._first: dict[Any, Node] = {}
        self._canonical: dict[Node, Node] = {}

    def selection_of(self, masks: Any, spread: bool = False) -> Selection:
        """What the masks of all branches mean; spread: see `read`. Raises `Unknown`."""
        if not isinstance(masks, Family):
            raise Unknown("the experts ask the same question")
        read = [self.read(mask, spread) for mask in masks.nodes]
        ids, axes, dims, flat = read[0].ids, read[0].axes, read[0].dims, read[0].flat
        if any((mask.ids, mask.axes, mask.dims, mask.flat) != (ids, axes, dims, flat) for mask in read):
            raise Unknown("the routing differs between the experts", masks.nodes[0])
        first, step = progression(Constants(tuple(mask.expert for mask in read)))
        if isinstance(ids, Columns):
            chosen = self._scattered_scores(ids)
            if chosen is None or axes != (0, 1):
                text = "how many tokens the experts have together is not known, nor bounded by a number of slots"
                raise Unknown(text, ids.matrix)
            return Selection(chosen, axes, dims, first, step, len(read), None, distinct=True, scores=ids)
        choices, distinct = self.chooses_among(ids), self.is_topk_index(ids)
        return Selection(ids, axes, dims, first, step, len(read), choices, distinct, self._slots_laid_flat(ids), flat)

    def read(self, mask: Node, spread: bool = False) -> Mask:
        """The meaning of a mask, or of numbers that are not zero where the mask is true; raises `Unknown`.

        spread: the mask's last dimension says nothing; it is broadcast, or to be broadcast, over a token's features.
        """
        name = operator_of(mask)
        if not mask.args or not self.is_constant(mask):
            raise Unknown("a mask that is written to" if mask.args else "a mask that is not known", mask)
        source = mask.args[0]
        if name in ("eq", "__eq__") and len(mask.args) == 2:
            ids, expert = mask.args
            if isinstance(expert, Node):
                ids, expert = expert, ids
            if isinstance(ids, Node) and is_integer(ids) and type(expert) is int:
                return self._pairs(self.canonical(ids), expert)
        if not isinstance(source, Node):
            raise Unknown("a mask that is not known", mask)
        if spread:
            return self._spread(mask, source)
        if name in ("getitem", "select"):
            return self._slice(mask, source)
        if name in ("bool", "to", "type", "long", "int", "contiguous", "detach"):
            return self.read(source)
        if name in ("view", "reshape", "flatten") and mask.meta["example_value"].ndim == 1:
            return self._laid_flat(mask, self.read(source))
        if name in ("any", "squeeze", "sum", "amax"):
            return self._without_slots(mask, self.read(source))
        if name in ("ne", "gt", "ge", "lt", "le") and len(mask.args) == 2 and isinstance(mask.args[1], (int, float)):
            inner = self.read(source)
            if isinstance(inner.ids, Columns):
                tested = Columns(inner.ids.matrix, inner.ids.dim, (*inner.ids.tests, (mask.target, mask.args[1])))
                return Mask(tested, inner.axes, inner.dims, inner.expert)
        raise Unknown(f"`{name}` as a mask of an expert's tokens is not known", mask)

    def canonical(self, node: Node) -> Node:
        """The first of the nodes that compute the same value anew, such as `idx.flatten()` in every round of a loop."""
        if node not in self._canonical:
            self._canonical[node] = node
            if operator_of(node) in REPEATED and all(map(self.is_constant, (node, *node.all_input_nodes))):
                arguments = torch.fx.map_arg((node.args, node.kwargs), self.canonical)
                self._canonical[node] = self._first.setdefault((node.op, node.target, str(arguments)), node)
        return self._canonical[node]

    def is_topk_index(self, ids: Node) -> bool:
        """See `graph/routing.py`."""
        return is_topk_index(ids, self.is_constant)

    def chooses_among(self, ids: Node) -> int | None:
        """See `graph/routing.py`."""
        return chooses_among(ids, self.is_constant)

    def _slots_laid_flat(self, ids: Node) -> int:
        """k where ids are the index of `torch.topk` [T, k], laid flat."""
        while operator_of(ids) in KEEP_VALUES and self.is_constant(ids):
            source, ndim = ids.args[0], ids.meta["example_value"].ndim
            if ndim != 1 or not isinstance(source, Node) or not is_integer(source):
                break
            if operator_of(ids) in ("flatten", "view", "reshape") and source.meta["example_value"].ndim == 2:
                slots = source.meta["example_value"].shape[1]
                return slots if isinstance(slots, int) and self.is_topk_index(source) else 1
            if operator_of(ids) not in ("to", "long", "int", "contiguous", "detach"):
                break
            ids = source
        return 1

    def slots(self, ids: Node) -> int | None:
        """How many experts each token goes to, where `ids` is made of the index of `torch.topk`; for a report."""
        while operator_of(ids) in (*KEEP_VALUES, "getitem") and isinstance(ids.args[0], Node):
            source = ids.args[0]
            if operator_of(source) == "topk":
                size = ids.meta["example_value"].shape[-1]
                return size if isinstance(size, int) else None
            ids = source
        return None

    def _pairs(self, ids: Node, expert: int) -> Mask:
        axes = tuple(range(ids.meta["example_value"].ndim))
        return Mask(ids, axes, len(axes), expert)

    def _spread(self, mask: Node, source: Node) -> Mask:
        """The mask behind `mask.unsqueeze(-1)`, `mask[:, None]`, `(idx == e).any(-1, keepdim=True)` and `expand`."""
        name, ndim = operator_of(mask), mask.meta["example_value"].ndim
        if name in ("expand", "expand_as") and source.meta["example_value"].ndim == ndim:
            if source.meta["example_value"].shape[-1] == 1:
                return self.read(source, True)
        if name == "unsqueeze" and mask.args[1:] in ((-1,), (ndim - 1,)):
            return self.read(source)
        if name == "getitem" and mask.args[1] in ((Ellipsis, None), (*[slice(None)] * (ndim - 1), None)):
            return self.read(source)
        if name in ("bool", "contiguous", "detach"):
            return self.read(source, True)
        if name == "any":
            return self._without_slots(mask, self.read(source), keeps=True)
        raise Unknown("a mask over features", mask)

    def _laid_flat(self, mask: Node, inner: Mask) -> Mask:
        """`(idx == e).any(-1).view(-1)`, of ids [B, T, k]."""
        if isinstance(inner.ids, Columns) or mask.meta["example_value"].dtype is not torch.bool or inner.flat:
            raise Unknown(f"`{operator_of(mask)}` of a mask", mask)
        return Mask(inner.ids, inner.axes, inner.dims, inner.expert, flat=inner.dims > 1)

    def _without_slots(self, mask: Node, inner: Mask, keeps: bool = False) -> Mask:
        """`(idx == e).any(-1)`: the tokens that have e in some slot."""
        name = operator_of(mask)
        dim = mask.kwargs.get("dim", mask.args[1] if len(mask.args) > 1 else None)
        kept = mask.kwargs.get("keepdim", mask.args[2] if len(mask.args) > 2 else False)
        if isinstance(inner.ids, Columns) or inner.dims < 2 or inner.flat or type(dim) is not int or kept is not keeps:
            raise Unknown(f"`{name}` of a mask", mask)
        dropped = dim % inner.dims
        if name == "squeeze":
            size = constant(inner.ids.meta["example_value"].shape[inner.axes[dropped]])
            if size is not None and size != 1:
                return inner  # which `squeeze` leaves as it is: Qwen2-MoE squeezes the slots in vain
            if size is None:
                raise Unknown("`squeeze` of a mask with several slots", mask)
        elif (
            len(inner.axes) != inner.dims or inner.axes[dropped] != inner.dims - 1 or not self.is_topk_index(inner.ids)
        ):
            raise Unknown("a token may be twice in one expert, as far as the graph shows", mask)
        axes = (*inner.axes[:dropped], *inner.axes[dropped + 1 :], inner.axes[dropped])
        return Mask(inner.ids, axes, inner.dims - 1, inner.expert)

    def _slice(self, mask: Node, source: Node) -> Mask:
        """`one_hot(idx, E).permute(2, 1, 0)[e]`, the same along any axis, and a slice of any other tensor."""
        ndim = source.meta["example_value"].ndim if isinstance(source.meta.get("example_value"), torch.Tensor) else 0
        if operator_of(mask) == "select":
            position, expert = mask.args[1], mask.args[2]
            position = position % ndim if type(position) is int and ndim else None
        else:
            index = mask.args[1] if isinstance(mask.args[1], tuple) else (mask.args[1],)
            if Ellipsis in index:
                at = index.index(Ellipsis)
                index = (*index[:at], *[slice(None)] * (ndim - len(index) + 1), *index[at + 1 :])
            places = [i for i, part in enumerate(index) if part != slice(None)]
            position, expert = (places[0], index[places[0]]) if len(places) == 1 else (None, None)
        if type(position) is not int or type(expert) is not int:
            raise Unknown("an index of a mask", mask)
        try:
            ids, axes = self.one_hot(source)
        except Unknown:
            if ndim < 2 or not 0 <= expert < source.meta["example_value"].shape[position]:
                raise
            others = tuple(axis for axis in range(ndim) if axis != position)
            return Mask(Columns(self.canonical(source), position, ()), (*others, position), ndim - 1, expert)
        if axes[position] is not None:
            raise Unknown("an index of a one-hot mask", mask)
        rest = tuple(axis for axis in axes if axis is not None)
        dims = len(axes) - 1
        if dims < ids.meta["example_value"].ndim:  # summed over the slots
            rest = (*rest, *(a for a in range(ids.meta["example_value"].ndim) if a not in rest))
        return Mask(ids, rest, dims, expert)

    def _scattered_scores(self, columns: Columns) -> Node | None:
        """The ids [T, k] of `zeros.scatter(1, ids, scores)`, where a pair with a score of zero fails the tests."""
        value: Any = 0.0
        for test, number in columns.tests:
            value = getattr(operator, getattr(test, "__name__", test).strip("_"))(value, number)
        scattered = self._scattered(columns.matrix) if columns.dim == 1 and not value else None
        return self.canonical(scattered[0]) if scattered is not None else None

    def _scattered(self, node: Node) -> tuple[Node, Any] | None:
        """(ids, value) of `zeros.scatter(1, ids, value)`, [T, E], or of zeros that only `scatter_` is done to.

        No pair writes over another one: ids [T, k] are of a `topk`.
        """
        scatter: Any = node if operator_of(node) in ("scatter", "scatter_") else min(node.users, default=node)
        is_filled = operator_of(scatter) in ("scatter", "scatter_") and len(scatter.args) == 4 and not scatter.kwargs
        if not is_filled or (operator_of(scatter) == "scatter_" and node not in (scatter, scatter.args[0])):
            return None
        zeros, dim, ids, value = scatter.args
        makes_zeros = isinstance(zeros, Node) and operator_of(zeros) in ("zeros", "new_zeros", "zeros_like")
        if not makes_zeros or not isinstance(ids, Node) or not self.is_constant(scatter):
            return None
        if not (self.is_constant(zeros) if operator_of(scatter) == "scatter" else scatter is min(zeros.users)):
            return None
        shapes = [[expression(size) for size in part.meta["example_value"].shape] for part in (zeros, ids)]
        fits = len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][0] == shapes[1][0]
        return (ids, value) if fits and dim in (1, -1) and self.is_topk_index(ids) else None

    def one_hot(self, node: Node) -> tuple[Node, list[int | None]]:
        """The ids that a one-hot tensor was made of, and what its axes are: axes of the ids, None for the experts'."""
        name = operator_of(node)
        source = node.args[0] if node.args else None
        scattered = self._scattered(node)
        if scattered is not None and type(scattered[1]) in (int, float) and scattered[1] == 1:
            return self.canonical(scattered[0]), [0, None]
        if not isinstance(source, Node) or not self.is_constant(node):
            raise Unknown("a mask that is no `one_hot`, or one that is written to", node)
        if node.target is F.one_hot or name == "one_hot":
            return self.canonical(source), [*range(source.meta["example_value"].ndim), None]
        if name == "permute":
            ids, axes = self.one_hot(source)
            order = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
            return ids, [axes[int(i)] for i in order]  # type: ignore[arg-type]
        if name == "transpose":
            ids, axes = self.one_hot(source)
            one, other = (int(i) % len(axes) for i in node.args[1:3])  # type: ignore[arg-type]
            axes[one], axes[other] = axes[other], axes[one]
            return ids, axes
        if name in ("bool", "to", "long", "int", "contiguous"):
            return self.one_hot(source)
        if name in ("sum", "any", "amax") and len(node.args) == 2 and isinstance(node.args[1], int) and not node.kwargs:
            ids, axes = self.one_hot(source)
            dropped = axes[node.args[1] % len(axes)]
            if dropped is None or dropped != len(axes) - 2 or not self.is_topk_index(ids):
                raise Unknown("a sum of one-hot masks", node)
            return ids, [axis for axis in axes if axis != dropped]
        raise Unknown(f"`{name}` of a one-hot mask", node)


def asked_by(query: Family) -> tuple[Any, bool]:
    """The mask of a query, or of an assignment by a mask, and whether it is spread over features: see `Masks.read`."""
    if query.name == "masked_select":
        source = query.args[0].nodes[0] if isinstance(query.args[0], Family) else query.args[0]
        return query.args[1], is_spread(source, query.args[1].nodes[0])
    return query.args[1] if query.name == "getitem" else query.args[0], False


def is_spread(source: Node, mask: Node) -> bool:
    """Whether a mask of as many dimensions says the same of all features of a token, its last dimension of a source."""
    example, wanted = mask.meta["example_value"], source.meta["example_value"]
    if example.ndim != wanted.ndim or example.ndim < 2:
        return False
    sizes, others = ([expression(size) for size in tensor.shape] for tensor in (example, wanted))
    if operator_of(mask) in ("expand", "expand_as") and isinstance(mask.args[0], Node):
        before = mask.args[0].meta["example_value"].shape
        return len(before) == len(sizes) and [*sizes[:-1], 1] == [expression(size) for size in before]
    return sizes != others and sizes == [*others[:-1], 1]


def progression(constants: Constants) -> tuple[int, int]:
    """(first, step) of ids that follow one another, up or down; raises `Unknown`."""
    values = constants.values
    if len(values) < 2 or any(not isinstance(value, int) or isinstance(value, bool) for value in values):
        raise Unknown("the experts are not told apart by integers")
    step = values[1] - values[0]
    if step not in (1, -1) or any(b - a != step for a, b in itertools.pairwise(values)):
        raise Unknown(f"the experts {values} do not follow one another")
    return values[0], step
