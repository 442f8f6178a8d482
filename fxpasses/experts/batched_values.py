"""Batched values: the values of all branches together. The branches' examples show which dimension has the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxpasses.experts.anti_unification import Template
from fxpasses.graph.symbols import expression, is_unbacked


@dataclass(frozen=True)
class Rows:
    """A tensor of all rows, along its dimension `row`."""

    node: Node
    row: int = 0

    @property
    def ndim(self) -> int:
        return int(self.node.meta["example_value"].ndim)


@dataclass(frozen=True)
class Flat:
    """Rows [N, width] laid end to end in one dimension, the result of `masked_select`."""

    rows: Rows


@dataclass(frozen=True)
class Places:
    """The result of `nonzero`: a matrix with a column for each coordinate."""

    coordinates: tuple[Rows, ...]


@dataclass(frozen=True)
class Weights:
    """A tensor of equal size for each expert: one tensor [E, ...], or E tensors. transposed: stands for their `.mT`."""

    stacked: Node | None
    listed: tuple[Node, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Rest:
    """The rows after those of the last expert: pairs of no expert.

    valid: bool [N], which rows belong to experts. last: int [1], the last valid row; 0 if there is none.
    """

    valid: Node
    last: Node


@dataclass(frozen=True)
class Order:
    """The order of the rows. If pairs were sorted: places: int64 [N], each row's pair; ids: int [N], its expert.

    offsets: int32 [E], where each expert's rows end. rows: N. rest: None if all rows belong to experts. covers: whether
    the offsets are known to rise to N.
    """

    places: Node | None
    ids: Node | None
    offsets: Node
    rows: Any
    rest: Rest | None
    covers: bool


def parts_of(example: Any) -> list[Any]:
    return list(example) if isinstance(example, (tuple, list)) else [example]


def row_of(example: Any) -> int | None:
    """The dimension of a branch's rows: the only one whose size depends on the batch's values; else None."""
    if not isinstance(example, torch.Tensor):
        return None
    found = [dimension for dimension, size in enumerate(example.shape) if is_unbacked(size)]
    return found[0] if len(found) == 1 else None


def example_of(value: Node | Template) -> Any:
    """The value on fake tensors; for a template, that of the first branch."""
    return value.example if isinstance(value, Template) else value.meta["example_value"]


def same_size(first: Node | Template, second: Node | Template) -> bool:
    one, other = ([expression(size) for size in example_of(value).shape] for value in (first, second))
    return one == other


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def dimensions_of(index: Sequence[Any]) -> list[Any]:
    """The index parts with a dimension in the result; adjacent index tensors share one."""
    first = next((place for place, part in enumerate(index) if isinstance(part, Rows)), None)
    parts = [part for place, part in enumerate(index) if not isinstance(part, Rows) or place == first]
    return [part for part in parts if not isinstance(part, int)]
