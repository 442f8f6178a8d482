"""Functions of the batch's metadata as operators, which call them unchanged: positions, windows, lengths of images."""

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

from fxpasses.metadata.runtime.batch_cache import State, batch_cache


@dataclass(frozen=True)
class Number:
    """A size that is a number given to the operator, at a position."""

    at: int


# A size of a result: a number; a size of a tensor argument, by the argument's position and the dimension; a number that
# is an argument; or None, which differs from batch to batch.
Size = int | tuple[int, int] | Number | None


@dataclass(frozen=True)
class Look:
    """What is known of a result before the call."""

    sizes: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device

    def fits(self, result: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int] = ()) -> bool:
        """Whether a result is as expected; its device is that of `tensors`, which may be copies on the host."""
        expected = [_size_of(size, tensors, numbers) for size in self.sizes]
        same = all(size in (None, found) for size, found in zip(expected, result.shape, strict=False))
        return same and result.ndim == len(expected) and result.dtype is self.dtype

    def fake(self, tensors: Sequence[Tensor], numbers: Sequence[int] = ()) -> Tensor:
        known = [_size_of(size, tensors, numbers) for size in self.sizes]
        sizes = [torch.library.get_ctx().new_dynamic_size() if size is None else size for size in known]
        return torch.empty(sizes, dtype=self.dtype, device=self.device)


def _size_of(size: Size, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Any:
    if isinstance(size, Number):
        return numbers[size.at]
    return tensors[size[0]].shape[size[1]] if isinstance(size, tuple) else size


@dataclass(frozen=True)
class Call:
    """A function, the names of its tensor arguments, its other arguments by name, and its results.

    model: the first argument of a method; None for a function. read: constants that a method reads of its model.
    """

    function: Callable[..., Any]
    model: weakref.ReferenceType[torch.nn.Module] | None
    names: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    looks: tuple[Look, ...] = ()
    read: tuple[Any, ...] = ()

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        owner = () if self.model is None else (self.model(),)
        return self.function(*owner, **dict(zip(self.names, tensors, strict=True)), **dict(self.constants))


_calls: dict[str, Call] = {}  # an operator cannot take a function, so it takes a name that stands for it here
_numbers = itertools.count()
_process = uuid.uuid4().hex  # part of each name, so that no cache on disk gives the graph to another process


def register(call: Call) -> str:
    """The name of a call, valid until its model is gone."""
    for name, known in _calls.items():
        if known == call and repr((known.constants, known.read)) == repr((call.constants, call.read)):
            return name  # not every equal call: 1, 1.0 and True are equal
    name = f"{_process}:{next(_numbers)}"
    _calls[name] = call
    if call.model is not None:
        weakref.finalize(call.model(), _calls.pop, name, None)
    return name


def as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


def _run(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    call = _calls[name]
    results = as_tuple(call(tensors))
    for result, look in zip(results, call.looks, strict=True):
        if not look.fits(result, tensors):
            expected = tuple("?" if size is None else size for size in look.sizes)
            raise RuntimeError(
                f"`{call.function.__name__}` returned {result.dtype} of size {tuple(result.shape)}, and for the batch "
                f"that was compiled {look.dtype} of size {expected}"
            )
    return [result.clone(memory_format=torch.contiguous_format) for result in results]  # an operator returns no views


def _fakes(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [look.fake(tensors) for look in _calls[name].looks]


@custom_op("fxpasses::host_function", mutates_args=())
def host_function(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of a function that depends on nothing but its arguments. name: the result of `register`.

    It runs once per batch, although guards and prologues are separate programs.
    """
    what = (name, torch.get_default_dtype())
    found = batch_cache.get(what, tensors)
    if found is None:
        state = State.of(tensors)
        found = tuple(_run(name, tensors))
        batch_cache.put(what, tensors, state, found)
    return [result.clone() for result in found]


@custom_op("fxpasses::host_method", mutates_args=())
def host_method(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of a method, which also depend on its model: they are not kept from one call to the next."""
    return _run(name, tensors)


host_function.register_fake(_fakes)
host_method.register_fake(_fakes)
