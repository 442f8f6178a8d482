"""What a tensor may be known to say of a router's choice; `graph/routing.py` finds it out.

A router chooses experts for tokens: integers, the *ids*, often [tokens, slots]. A *pair* is a (token, slot); it is of
expert e if its id is e. Each fact holds as long as the memory of its *evidence* holds what the nodes there made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node


def is_integer(node: Node) -> bool:
    """Whether a node is a tensor of integers or truths."""
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and not example.dtype.is_floating_point and not example.dtype.is_complex


@dataclass(frozen=True, kw_only=True)
class Fact:
    """evidence: the nodes that the fact rests on, from the ids (exclusive) to the tensor that it is about."""

    evidence: frozenset[Node] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class Nothing(Fact):
    """Nothing is known. text: why, for a person; node: where that shows."""

    text: str
    node: Node | None = None


@dataclass(frozen=True)
class Choice(Fact):
    """The tensor holds ids: integers from 0 to below `choices`, if that is not None.

    distinct: whether those along the last axis differ from each other. slots: of one-dimensional ids, how many in a
    row (from a multiple of it on) differ from each other. top: the k of the `torch.topk` that they come from.
    """

    choices: int | None
    distinct: bool = False
    slots: int = 1
    top: int | None = None


@dataclass(frozen=True)
class OneHot(Fact):
    """0 and 1: the element at (pair, e) is 1 if the pair is of expert e.

    axes: the axis of the ids that each axis is, None for the experts' own. The slots' axis may be missing, where no
    token has an expert twice: the element at (token, e) is then 1 if the token has a pair of expert e.
    """

    ids: Node
    axes: tuple[int | None, ...]


@dataclass(frozen=True)
class Scattered(Fact):
    """A matrix [tokens, experts] of zeros but for one number for each pair, in the row of its token."""

    ids: Node


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
class Mask(Fact):
    """Not zero where one expert has a pair. ids: the router's choice, or the columns that the mask is one of.

    axes: the axes of the ids, in the order of the mask's own dimensions; for a mask over tokens alone (`any` over the
    slots) the slots' axis comes last. dims: how many dimensions the mask has. flat: whether those were laid flat, into
    one. spread: whether one more dimension comes last that says nothing, to be broadcast over a token's features.
    A mask of ids holds nothing but 0 and 1.
    """

    ids: Node | Columns
    axes: tuple[int, ...]
    dims: int
    expert: int
    flat: bool = False
    spread: bool = False


@dataclass(frozen=True)
class Presence(Fact):
    """No element is negative, and one is not zero if and only if there are pairs of the expert.

    present: False for the opposite, of a tensor of one element. text: why the tensor is no mask, for a person.
    """

    ids: Node
    expert: int
    present: bool = True
    text: str = field(default="", compare=False)


@dataclass(frozen=True)
class Counts(Fact):
    """A vector, perhaps with dimensions of size 1, whose element e is how many pairs expert e has.

    exact: else it is only known to be above zero if there are pairs, and zero if there are none.
    """

    ids: Node
    exact: bool


@dataclass(frozen=True)
class Sorted(Fact):
    """A vector of all ids in ascending order."""

    ids: Node


@dataclass(frozen=True)
class Ends(Fact):
    """A vector of integers whose element e is how many pairs the experts up to e have; exact: see `Counts`."""

    ids: Node
    exact: bool


@dataclass(frozen=True)
class Hits(Fact):
    """The different ids, ascending, with dimensions of size 1 perhaps. in_tuple: the result of `torch.where`."""

    ids: Node
    in_tuple: bool = False
