"""What all branches' values are together, and how their examples on fake tensors show where the rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxpasses.graph.anti_unification import Template
from fxpasses.graph.symbols import expression, is_unbacked


@dataclass(frozen=True)
class Rows:
    """A tensor of all rows, which lie along one dimension of it (`row`)."""

    node: Node
    row: int = 0

    @property
    def ndim(self) -> int:
        return int(self.node.meta["example_value"].ndim)


@dataclass(frozen=True)
class Flat:
    """Rows [N, width] laid end to end, as `masked_select` gives them."""

    rows: Rows


@dataclass(frozen=True)
class Places:
    """The result of `nonzero`: a matrix with a column for each coordinate."""

    coordinates: tuple[Rows, ...]


@dataclass(frozen=True)
class Weights:
    """A tensor of one size for each expert: one tensor [E, ...], or E of them. transposed: their `.mT` is meant."""

    stacked: Node | None
    listed: tuple[Node, ...]
    transposed: bool = False


@dataclass(frozen=True)
class Order:
    """The rows. places: int64 [N], the pair of each, and ids: int [N], its expert, where pairs were sorted.

    offsets: int32 [E], where each expert's rows end. rows: N. valid: bool [N], the rows of experts; None where
    all are.
    """

    places: Node | None
    ids: Node | None
    offsets: Node
    rows: Any
    valid: Node | None


def parts_of(example: Any) -> list[Any]:
    return list(example) if isinstance(example, (tuple, list)) else [example]


def row_of(example: Any) -> int | None:
    """The dimension along which a branch's tensor has its rows: the one whose size only the batch knows."""
    if not isinstance(example, torch.Tensor):
        return None
    found = [d for d, size in enumerate(example.shape) if _is_data(size)]
    return found[0] if len(found) == 1 else None


def _is_data(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and is_unbacked(size) and not isinstance(expression(size), int)


def example_of(value: Node | Template) -> Any:
    """The value on fake tensors; of a family, that of the first branch."""
    return value.example if isinstance(value, Template) else value.meta["example_value"]


def same_size(first: Node | Template, second: Node | Template) -> bool:
    one, other = ([expression(size) for size in example_of(value).shape] for value in (first, second))
    return one == other


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def dimensions_of(index: Sequence[Any]) -> list[Any]:
    """The index parts that make a dimension of the result: adjacent index tensors make one together."""
    found: list[Any] = []
    for part in index:
        if isinstance(part, Rows) and any(isinstance(other, Rows) for other in found):
            continue
        if not isinstance(part, int):
            found.append(part)
    return found
