"""Operators that stand for a part of unknown size while a loop's body is traced. No graph that runs has any of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

_NEVER = "fxpasses: an operator that stands for a part of a batch was run. Please report this."


@custom_op("fxpasses::part_size", mutates_args=())
def part_size(lengths: Tensor) -> int:
    """The size of a part, one of `lengths`."""
    raise AssertionError(_NEVER)


@part_size.register_fake
def _size(lengths: Tensor) -> torch.SymInt:
    return torch.library.get_ctx().new_dynamic_size()


@custom_op("fxpasses::part", mutates_args=())
def part(x: Tensor, dim: int, size: int) -> Tensor:
    """A part of x along a dimension, of a size as above."""
    raise AssertionError(_NEVER)


@part.register_fake
def _part(x: Tensor, dim: int, size: int) -> Tensor:
    sizes = [*x.shape]
    sizes[dim] = size
    return x.new_empty_strided(sizes, x.stride())


@custom_op("fxpasses::element", mutates_args=())
def element(x: Tensor) -> Tensor:
    """What x, [n, ...], has of one part: [...]."""
    raise AssertionError(_NEVER)


@element.register_fake
def _element(x: Tensor) -> Tensor:
    return x.new_empty_strided(x.shape[1:], x.stride()[1:])


@custom_op("fxpasses::ragged", mutates_args=())
def ragged(x: Tensor, lengths: Tensor, sizes: Sequence[int]) -> Tensor:
    """What x, flat, has of one part: as many elements as `lengths` says, which have several sizes."""
    raise AssertionError(_NEVER)


@ragged.register_fake
def _ragged(x: Tensor, lengths: Tensor, sizes: Sequence[int]) -> Tensor:
    return x.new_empty(sizes)


def _no_gradient(ctx: object, *grads: Tensor) -> tuple[None, ...]:
    raise AssertionError(_NEVER)


for _operator in (part, element, ragged):
    _operator.register_autograd(_no_gradient)
