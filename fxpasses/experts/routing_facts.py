"""The lattice of the routing analysis (`experts/routing.py`): what a tensor may say about a router's choice.

A router chooses experts for tokens by integers, the *ids*, often [tokens, slots]. A *pair* is a (token, slot); it
belongs to expert e if its id is e. A fact holds as long as nobody writes to the memory of the nodes in its *evidence*.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node


@dataclass(frozen=True, kw_only=True)
class Fact:
    """evidence: the nodes that the fact rests on, from the ids (exclusive) to its own tensor."""

    evidence: frozenset[Node] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class Nothing(Fact):
    """Nothing is known. text: why, for a report; node: where."""

    text: str
    node: Node | None = None


@dataclass(frozen=True)
class Choice(Fact):
    """The tensor holds ids: integers in [0, choices), if `choices` is not None.

    distinct: whether the ids along the last axis differ from each other. slots: for one-dimensional ids, the length of
    the aligned groups within which ids differ from each other. top: the k of the `torch.topk` that gave the ids.
    """

    choices: int | None
    distinct: bool = False
    slots: int = 1
    top: int | None = None


@dataclass(frozen=True)
class OneHot(Fact):
    """The element at (pair, e) is 1 if the pair belongs to expert e, else 0.

    axes: for each axis, the corresponding axis of the ids, or None for the experts' axis. The slots' axis may be absent
    if no token chooses an expert twice: the element at (token, e) is then 1 if the token has a pair of expert e.
    """

    ids: Node
    axes: tuple[int | None, ...]


@dataclass(frozen=True)
class Scattered(Fact):
    """A matrix [tokens, experts] that is zero except for one number per pair, in the row of its token."""

    ids: Node


@dataclass(frozen=True)
class Columns:
    """Expert e has the tokens at which column e of a matrix passes the tests.

    matrix: of any dtype, with the experts along `dim`. tests: comparisons (operator, number), each applied to the
    previous one's result; without any, the element must not be zero.
    """

    matrix: Node
    dim: int
    tests: tuple[tuple[Any, Any], ...] = ()


@dataclass(frozen=True)
class Mask(Fact):
    """Nonzero where one expert has a pair. ids: the router's choice, or the matrix of which the mask is a column.

    axes: the axes of the ids, in the order of the mask's dimensions; for a mask over tokens alone (`any` over the
    slots) the slots' axis comes last. dims: the number of dimensions. flat: whether they were flattened into one.
    spread: whether a trailing dimension of size 1 follows, for broadcasting over a token's features.
    A mask of ids holds only 0 and 1.
    """

    ids: Node | Columns
    axes: tuple[int, ...]
    dims: int
    expert: int
    flat: bool = False
    spread: bool = False


@dataclass(frozen=True)
class Presence(Fact):
    """No element is negative, and some element is nonzero if and only if the expert has pairs.

    present: False for the negation, in a tensor of one element. text: why the tensor is not a mask, for a report.
    """

    ids: Node
    expert: int
    present: bool = True
    text: str = field(default="", compare=False)


@dataclass(frozen=True)
class Counts(Fact):
    """A vector, perhaps with dimensions of size 1, whose element e is the number of expert e's pairs.

    exact_to: with more pairs than this, an element is only known to be positive if its expert has pairs, and zero if it
    has none.
    """

    ids: Node
    exact_to: float


@dataclass(frozen=True)
class Sorted(Fact):
    """A vector of all ids, ascending."""

    ids: Node


@dataclass(frozen=True)
class Ends(Fact):
    """A vector of integers whose element e is the number of pairs of experts 0 to e; exact_to: see `Counts`."""

    ids: Node
    exact_to: float


@dataclass(frozen=True)
class Hits(Fact):
    """The distinct ids, ascending, perhaps with dimensions of size 1. in_tuple: as returned by `torch.where`."""

    ids: Node
    in_tuple: bool = False
