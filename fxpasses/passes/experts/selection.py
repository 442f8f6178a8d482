"""What the mask of an expert means: which (token, slot) pairs of the router's choice are its own, and in which order.

A loop asks for the tokens of expert e with a mask: `idx == e`, `one_hot(idx, E).permute(2, 1, 0)[e]`, either of them
`.any(-1)` over the slots. A `Selection` says the same for all experts at once: the expert id of every pair, in the
order in which `torch.where(mask)` finds pairs, and how to get from a pair's place to the mask's coordinates. Sorted
stably by expert, the places are the queries' results one after the other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from fxpasses.graph.families import Constants, Family, operator_of


class Unknown(Exception):
    """Not understood, or not known to be legal; the text is the reason for a person."""

    def __init__(self, text: str, node: Node | None = None) -> None:
        super().__init__(text)
        self.node = node


@dataclass(frozen=True)
class Selection:
    """ids: an integer tensor; its axes in the order `axes`, flattened, are the expert ids of all pairs.

    axes: the axes of `ids`, in the order of the mask's own dimensions; for a mask over tokens alone (`any` over the
    slots) the slots' axis comes last, and `dims` is 1. dims: how many dimensions the mask has. experts: the branches'
    expert ids, first + step * branch with step 1 or -1.
    """

    ids: Node
    axes: tuple[int, ...]
    dims: int
    first: int
    step: int
    count: int

    def has_distinct_tokens(self) -> bool:
        """Whether no token can be twice in one expert: each pair is a token, or the choice is one of `torch.topk`."""
        return len(self.axes) == 1 or is_topk_index(self.ids)


def is_query(family: Family) -> bool:
    """Whether the branches ask for their tokens here."""
    if family.name == "where":
        return len(family.args) == 1 and not family.kwargs
    if family.name == "nonzero":
        return bool(family.args)
    if family.name != "getitem" or not isinstance(family.args[1], Family):
        return False
    index = family.args[1].example
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


def selection_of(mask: Any) -> Selection:
    """The meaning of a family of masks, or of integers that are not zero where the mask is true; raises `Unknown`."""
    if not isinstance(mask, Family):
        raise Unknown("the experts ask the same question")
    name = mask.name
    if name in ("eq", "__eq__") and len(mask.args) == 2:
        ids, constants = mask.args
        if isinstance(ids, Constants):
            ids, constants = constants, ids
        if not isinstance(ids, Node) or not isinstance(constants, Constants):
            raise Unknown("the routing differs between the experts", mask.nodes[0])
        if not is_integer(ids):
            raise Unknown("the ids of the experts are no integers", ids)
        first, step = progression(constants)
        axes = tuple(range(ids.meta["example_value"].ndim))
        return Selection(ids, axes, len(axes), first, step, len(mask.nodes))
    if name in ("getitem", "select"):
        return _slice_of_one_hot(mask)
    if not mask.args:
        raise Unknown("a mask that is not known", mask.nodes[0])
    if name in ("bool", "to", "type", "long", "int") and isinstance(mask.args[0], Family):
        return selection_of(mask.args[0])
    if name in ("any", "squeeze", "sum", "amax", "max") and isinstance(mask.args[0], Family):
        return _without_slots(mask, selection_of(mask.args[0]))
    raise Unknown(f"`{name}` as a mask of an expert's tokens is not known", mask.nodes[0])


@dataclass(frozen=True)
class Cut:
    """Rows that lie sorted already, cut into parts: `rows.split(counts.tolist())`.

    rows: a tensor, the parts one after the other along its first dimension. counts: an integer tensor [experts], their
    sizes. nodes: the split and the reads of its sizes, which nobody else needs.
    """

    rows: Node
    counts: Node
    nodes: tuple[Node, ...]


def cut_of(family: Any) -> Cut | None:
    """The cut that a family of parts comes from, if it does; raises `Unknown` for one of another order."""
    if not isinstance(family, Family) or family.name != "getitem" or len(family.args) != 2:
        return None
    split, places = family.args
    if not isinstance(split, Node) or not isinstance(places, Constants):
        return None
    name = operator_of(split)
    sizes = split.args[1] if len(split.args) > 1 else split.kwargs.get("split_size_or_sections")
    if name not in ("split", "split_with_sizes") or not isinstance(sizes, (list, tuple)):
        return None
    rows = split.args[0]
    if split.kwargs.get("dim", split.args[2] if len(split.args) > 2 else 0) != 0 or not isinstance(rows, Node):
        raise Unknown("a split along another dimension", split)
    if progression(places) != (0, 1) or len(sizes) != len(places.values):
        raise Unknown("not all parts of a split, or in another order", split)
    reads = [_element(size) for size in sizes]
    counts = reads[0][0]
    if any(read[:2] != (counts, place) for place, read in enumerate(reads)):
        raise Unknown("sizes of a split that are not the elements of one tensor", split)
    if counts.meta["example_value"].shape[0] != len(sizes):
        raise Unknown("some of the counts alone", split)
    return Cut(rows, counts, (split, *(node for read in reads for node in read[2])))


def _element(size: Any) -> tuple[Node, int, tuple[Node, ...]]:
    """(counts, e, nodes) of `counts[e].item()`."""
    inner = size.args[0] if isinstance(size, Node) and operator_of(size) == "item" else None
    if isinstance(inner, Node) and getattr(inner.target, "__name__", "") == "getitem":
        source, place = inner.args
        if isinstance(source, Node) and isinstance(place, int):
            return source, place, (size, inner)
    raise Unknown("a part whose size is no element of a tensor", size if isinstance(size, Node) else None)


def _without_slots(mask: Family, inner: Selection) -> Selection:
    """`(idx == e).any(-1)`: the tokens that have e in some slot."""
    dim = _argument(mask, 1, "dim", None)
    if inner.dims != 2 or not isinstance(dim, int) or _argument(mask, 2, "keepdim", False):
        raise Unknown(f"`{mask.name}` of a mask", mask.nodes[0])
    dropped = dim % 2
    if mask.name == "squeeze":
        if inner.ids.meta["example_value"].shape[inner.axes[dropped]] != 1:
            raise Unknown("`squeeze` of a mask with several slots", mask.nodes[0])
    elif not inner.has_distinct_tokens():
        raise Unknown("a token may be twice in one expert, as far as the graph shows", mask.nodes[0])
    kept = inner.axes[1 - dropped]
    return Selection(inner.ids, (kept, inner.axes[dropped]), 1, inner.first, inner.step, inner.count)


def _slice_of_one_hot(mask: Family) -> Selection:
    """`one_hot(idx, E).permute(2, 1, 0)[e]`, and the same along any axis."""
    source, index = mask.args[0], mask.args[1]
    if not isinstance(source, Node):
        raise Unknown("the routing differs between the experts", mask.nodes[0])
    ids, axes = one_hot_of(source)
    if mask.name == "select":
        position, constants = mask.args[1] % len(axes), mask.args[2]
    else:
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            index = (slice(None),) * (len(axes) - len(index) + 1) + tuple(i for i in index if i is not Ellipsis)
        places = [i for i, part in enumerate(index) if part != slice(None)]
        if len(places) != 1:
            raise Unknown("an index of a one-hot mask", mask.nodes[0])
        position, constants = places[0], index[places[0]]
    if not isinstance(constants, Constants) or axes[position] is not None:
        raise Unknown("an index of a one-hot mask", mask.nodes[0])
    first, step = progression(constants)
    rest = tuple(axis for axis in axes if axis is not None)
    dims = len(axes) - 1
    if dims < ids.meta["example_value"].ndim:  # summed over the slots
        rest = (*rest, *(a for a in range(ids.meta["example_value"].ndim) if a not in rest))
    return Selection(ids, rest, dims, first, step, len(mask.nodes))


def one_hot_of(node: Node) -> tuple[Node, list[int | None]]:
    """The ids that a one-hot tensor was made of, and what its axes are: axes of the ids, None for the experts'."""
    name = operator_of(node)
    source = node.args[0] if node.args else None
    if node.target is F.one_hot or name == "one_hot":
        assert isinstance(source, Node)
        return source, [*range(source.meta["example_value"].ndim), None]
    if not isinstance(source, Node):
        raise Unknown("a mask that is no `one_hot`", node)
    if name == "permute":
        ids, axes = one_hot_of(source)
        order = node.args[1] if isinstance(node.args[1], (tuple, list)) else node.args[1:]
        return ids, [axes[int(i)] for i in order]  # type: ignore[arg-type]
    if name == "transpose":
        ids, axes = one_hot_of(source)
        one, other = (int(i) % len(axes) for i in node.args[1:3])  # type: ignore[arg-type]
        axes[one], axes[other] = axes[other], axes[one]
        return ids, axes
    if name in ("bool", "to", "long", "int", "contiguous"):
        return one_hot_of(source)
    if name in ("sum", "any", "amax") and len(node.args) == 2 and isinstance(node.args[1], int) and not node.kwargs:
        ids, axes = one_hot_of(source)
        dropped = axes[node.args[1] % len(axes)]
        if dropped is None or not is_topk_index(ids):
            raise Unknown("a sum of one-hot masks", node)
        return ids, [axis for axis in axes if axis != dropped]
    raise Unknown(f"`{name}` of a one-hot mask", node)


def progression(constants: Constants) -> tuple[int, int]:
    """(first, step) of ids that follow one another, up or down; raises `Unknown`."""
    values = constants.values
    if len(values) < 2 or any(not isinstance(value, int) or isinstance(value, bool) for value in values):
        raise Unknown("the experts are not told apart by integers")
    step = values[1] - values[0]
    if step not in (1, -1) or any(b - a != step for a, b in itertools.pairwise(values)):
        raise Unknown(f"the experts {values} do not follow one another")
    return values[0], step


def is_integer(node: Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and not example.dtype.is_floating_point and not example.dtype.is_complex


def is_topk_index(ids: Node) -> bool:
    """Whether the last axis holds different numbers: the index of `torch.topk`, as it is or cast."""
    name = operator_of(ids)
    source = ids.args[0] if ids.args else None
    if not isinstance(source, Node):
        return False
    if name == "getitem" and ids.args[1] == 1:
        inner = operator_of(source)
        dim = source.kwargs.get("dim", source.args[2] if len(source.args) > 2 else -1)
        last = ids.meta["example_value"].ndim - 1
        return inner == "topk" and dim in (-1, last)
    return name in ("to", "long", "int", "contiguous", "detach") and is_integer(source) and is_topk_index(source)


def _argument(family: Family, position: int, name: str, default: Any) -> Any:
    return family.kwargs.get(name, family.args[position] if len(family.args) > position else default)
