"""Functions that a loop's body calls for each part, and that Dynamo does not trace.

    def crop(image, size):                       # branches on the numbers of one image
        height, width = size.tolist()
        if width / height > image.shape[2] / image.shape[1]:
            return image[:, : round(...)]
        return image[:, :, : round(...)]

    crop = torch.ops.fxpasses.part_function(name, [image, size], [])   # while the body is traced
    image, size -> [crop(image, size)]                                 # in the body that runs part by part

The function runs in eager mode, as the program wrote it, in forward and again in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils._pytree import TreeSpec, tree_unflatten


@dataclass(frozen=True)
class Slot:
    """An argument that is a tensor, or a number, of the part: the first, second, ... of its kind."""

    kind: str
    at: int


@dataclass(frozen=True)
class PartFunction:
    """A function, and its arguments: `Slot`s and constants, flat, which `structure` makes positional and named ones."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    structure: TreeSpec

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Any:
        """What the function returns for one part."""
        of_kind = {"tensor": tensors, "number": numbers}
        flat = [of_kind[given.kind][given.at] if isinstance(given, Slot) else given for given in self.arguments]
        args, kwargs = tree_unflatten(flat, self.structure)
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Integers:
    """What a function returns: one integer, or a tuple of some. count: how many; 0 for one that is in no tuple."""

    count: int

    def flat(self, returned: Any) -> list[Tensor]:
        return [torch.tensor(number) for number in (returned if self.count else [returned])]

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.empty((), dtype=torch.int64) for _ in range(max(self.count, 1))]


@dataclass(frozen=True)
class Slice:
    """What a function returns: a part of a tensor, in some dimensions. at: the tensor's position."""

    at: int
    dims: frozenset[int]

    def flat(self, returned: Any) -> list[Tensor]:
        return [returned]

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Not the tensor's own memory, as an operator's result may not be."""
        whole, context = tensors[self.at], torch.library.get_ctx()
        sizes = [context.new_dynamic_size() if dim in self.dims else size for dim, size in enumerate(whole.shape)]
        return [whole.new_empty_strided(sizes, whole.stride())]


Results = Integers | Slice


_calls: dict[str, tuple[Results, Callable[..., list[Tensor]]]] = {}  # an operator cannot take a function, only a name
_names: dict[Any, str] = {}


def register(called: PartFunction, results: Results) -> str:
    """A name for a call. Equal calls have one name, so that a model that is compiled again has the same bodies."""
    key = called.function, repr((called.structure, called.arguments, results))  # 1, 1.0 and True are equal

    def part_function(tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        return results.flat(called(tensors, numbers))

    if key not in _names:
        _names[key] = str(len(_names))
        _calls[_names[key]] = results, part_function
    return _names[key]


def call_of(name: str) -> Callable[..., list[Tensor]]:
    """The function of a name: from tensors and numbers to tensors."""
    return _calls[name][1]


@custom_op("fxpasses::part_function", mutates_args=())
def part_function(name: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    """A call while a loop's body is traced. No graph that runs has it."""
    raise AssertionError("fxpasses: a call that stands for a function of a part was run. Please report this.")


@part_function.register_fake
def _fakes(name: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    return _calls[name][0].fake(tensors)


def _no_gradient(ctx: object, *grads: Tensor) -> tuple[None, ...]:
    raise AssertionError("fxpasses: the gradient of a call that stands for a function of a part. Please report this.")


part_function.register_autograd(_no_gradient)
