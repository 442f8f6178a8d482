"""transformers' `get_rope_index` as an operator: positions of text and images, from the types of tokens and grids."""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


@dataclass(frozen=True)
class Call:
    """A method of a model, the names of its tensor arguments, `input_ids` first, and the dtypes of its two results.

    constants: the other arguments, by name.
    """

    model: weakref.ReferenceType[torch.nn.Module]
    function: Callable[..., Any]
    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    dtypes: tuple[torch.dtype, torch.dtype]

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        given = dict(zip(self.names, tensors, strict=True))
        positions, deltas = self.function(self.model(), **given, **dict(self.constants))
        return positions, deltas


_calls: dict[str, Call] = {}  # an operator cannot take a function, so it takes a name that stands for it here
_numbers = itertools.count()
_process = uuid.uuid4().hex  # part of each name, so that no cache on disk gives the graph to another process


def register(call: Call) -> str:
    """The name of a call, valid until its model is gone."""
    for name, known in _calls.items():
        if known == call and repr(known.constants) == repr(call.constants):  # 1, 1.0 and True are equal
            return name
    name = f"{_process}:{next(_numbers)}"
    _calls[name] = call
    weakref.finalize(call.model(), _calls.pop, name, None)
    return name


@custom_op("fxpasses::rope_index", mutates_args=())
def rope_index(name: str, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """[3, B, T] and [B, 1] for `input_ids` of [B, T], integers. name: the result of `register`."""
    positions, deltas = _calls[name](tensors)
    return positions.clone(), deltas.clone()


@rope_index.register_fake
def _index(name: str, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    first, second = _calls[name].dtypes
    rows, columns = tensors[0].shape
    return tensors[0].new_empty(3, rows, columns, dtype=first), tensors[0].new_empty(rows, 1, dtype=second)
