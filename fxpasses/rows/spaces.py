"""Spaces of rows: the tokens of a batch [B, T], of an encoder or a decoder, or a part of them.

x = embedding(ids, table)          space [B, T]
x[:, :-1]                          a part of it, [B, T - 1], whose row (b, t) is the row (b, t) of the whole
y = embedding(target, table)       another space [B, U]
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import sympy
from torch.fx import Node

from fxpasses.rows.nodes import shape_of

# What the elements of a dimension are: sequences of the batch; k groups of features of each sequence, b * k + g; tokens
# of a sequence; or rows, b * T + t. In a mixture (`routing.py`): the k experts that each row has chosen, row * k + i;
# these choices in the order of the experts; or experts. None: none of these.
BATCH, GROUPS, TOKENS, ROWS = "batch", "groups", "tokens", "rows"
CHOICES, SORTED, EXPERTS = "choices", "sorted", "experts"
Tags = tuple[str | None, ...]


@dataclass(frozen=True, eq=False)
class Space:
    """sizes: [B, T], as expressions. ids: metadata of these sizes, such as an embedding's input, or [T] where B is 1;
    None in a part of another space.

    whole: the space of which this is a part. starts: the sequence and the token of `whole` at which it starts.
    """

    sizes: tuple[Any, Any]
    ids: Node | None = None
    whole: Space | None = None
    starts: tuple[Any, Any] = (0, 0)

    @property
    def root(self) -> Space:
        return self if self.whole is None else self.whole.root


class Spaces:
    """The spaces of a graph: one for each size of an embedding's input or of given rows, and one for each part.

    lengths: T of the inputs with more than one text. For such a T, [1, T] holds positions that all texts share.
    """

    def __init__(self, lengths: Set[Any]) -> None:
        self._lengths = lengths
        self._known: dict[Any, Space] = {}

    def of_ids(self, ids: Node) -> Space | None:
        """The space of an embedding's input [B, T]; None for a size of 1 that would be broadcast."""
        sizes = shape_of(ids)
        if sizes[1] == 1 or (sizes[0] == 1 and sizes[1] in self._lengths):
            return None
        return self._known.setdefault(sizes, Space((sizes[0], sizes[1]), ids))

    def of_given(self, ids: Node) -> Space:
        """The space of rows that the graph is given. ids: metadata with an element for each, [B, T] or [N]."""
        sizes = shape_of(ids)
        sizes = sizes if len(sizes) == 2 else (sympy.Integer(1), *sizes)
        return self._known.setdefault(sizes, Space((sizes[0], sizes[1]), ids))

    def part(self, whole: Space, cuts: tuple[Any, Any], sizes: tuple[Any, Any]) -> Space | None:
        """The space of `x[cuts]`, two slices, of the sizes `sizes`; None if the slices are not known, or leave at most
        one element."""
        starts = []
        for cut, size, all_of_it in zip(cuts, sizes, whole.sizes, strict=True):
            is_short = size in (0, 1) and size != all_of_it
            if cut.step not in (None, 1) or not (size - all_of_it).is_Integer or is_short:
                return None
            start = 0 if cut.start is None else cut.start
            if type(start) is not int or (start < 0 and cut.stop is not None):
                return None
            starts.append(all_of_it - size if cut.stop is None else sympy.Integer(start))
        key = (whole, *starts, *sizes)
        return self._known.setdefault(key, Space(sizes, None, whole, (starts[0], starts[1])))
