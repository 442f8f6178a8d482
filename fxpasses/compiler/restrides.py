"""Copies the results of a compiled graph that have other strides than it was traced with (`output_strides.py`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxpasses.compiler.lowering_by_operator import Boxed

Strides = Callable[[Sequence[Any], Sequence[Any]], tuple[int, ...]]


@dataclass
class Restrides:
    """expected: positions of results, by the Python expression of a `Strides`, which takes the sizes of inputs (the
    values of those that are numbers) and the results.

    returned: the positions that the program returns; a tensor that is saved as well is another one then.
    """

    expected: dict[str, list[int]]
    returned: frozenset[int]

    def __call__(self, run: Boxed, arguments: list[Any]) -> list[Any]:
        """The results of `run`, which empties the list `arguments`."""
        sizes = [value.shape if isinstance(value, torch.Tensor) else value for value in arguments]
        outputs = list(run(arguments))
        copies: dict[tuple[int, bool], torch.Tensor] = {}  # a tensor that is returned twice stays one tensor
        for source, positions in self.expected.items():
            strides = _function(source)(sizes, outputs)
            for position in positions:
                found = outputs[position]
                key = id(found), position in self.returned
                if key not in copies and _differs(found, strides):
                    copies[key] = _copy(found, strides)
                outputs[position] = copies.get(key, found)
        return outputs


def _differs(found: torch.Tensor, strides: tuple[int, ...]) -> bool:
    own = found.stride()
    return own != strides and any(
        size > 1 and one != other for size, one, other in zip(found.shape, own, strides, strict=True)
    )


def _copy(found: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(found.shape, strides, dtype=found.dtype, device=found.device).copy_(found)


@functools.lru_cache(maxsize=1000)
def _function(source: str) -> Strides:
    computed: Strides = eval(source, {"math": math})
    return computed
