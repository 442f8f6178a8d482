"""The operator that runs a loop's body part by part, where no rule computes it for all parts at once (`batching.py`).

    torch.cat([mlp(part.view(h, w, -1)) for part, (h, w) in zip(x.split(sizes), grid.tolist())])

    loop_over_parts = torch.ops.fxpasses.loop_over_parts(name, [sizes, x, grid, weight], [])     # any number of parts
    y = loop_over_parts[0]

The body is a graph, traced for a part of unknown size; it runs with eager mode's kernels, so results are eager mode's.
Backward runs it again for each part, as a checkpoint does, and keeps nothing but the operator's inputs.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fxpasses.base.containment import contained
from fxpasses.dynamo.dispatch_state import as_in_new_thread
from fxpasses.dynamo.runtime.host_functions import Look
from fxpasses.metadata.runtime.prologue import AutocastState


@dataclass(frozen=True)
class Input:
    """What the body of one part takes: of the operand at a position, or of the numbers.

    kind: "size" (an element of the operand, [n], as a number), "part" (`length` rows in dimension `dim`, where `length`
    is the position of the operand with the parts' sizes), "element" (`operand[i]`), "whole" or "number".
    """

    kind: str
    at: int
    dim: int = 0
    length: int = 0


@dataclass(frozen=True)
class Result(Look):
    """A result of all parts: concatenated in dimension `dim`, or stacked if that is None. sizes: after that."""

    dim: int | None

    @property
    def is_differentiable(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    def joined(self, values: list[Tensor]) -> Tensor:
        """Contiguous, as `fake` has it: `cat` keeps the strides of channels that lie last."""
        joined = torch.stack(values) if self.dim is None else torch.cat(values, self.dim)
        return joined.contiguous()

    def cut(self, whole: Tensor, part: int, start: int, value: Tensor) -> Tensor:
        """What `whole` has of the value of a part. start: where that begins."""
        return whole[part] if self.dim is None else whole.narrow(self.dim, start, value.shape[self.dim])


@dataclass(frozen=True, eq=False)
class Body:
    """A loop's body. function: takes the inputs of one part, returns its results as a tuple.

    The first operand has an element for each part. is_of_numbers: whether the operands are the batch's numbers alone,
    which guards read as well as prologues. written: the positions of operands to which the body writes, and
    from which it does not read; the operator writes to copies, which are its last results.
    """

    function: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Input, ...]
    results: tuple[Result, ...]
    autocast: AutocastState
    written: tuple[int, ...] = ()
    is_of_numbers: bool = False

    def with_copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.clone() if at in self.written else tensor for at, tensor in enumerate(tensors)]

    def calls(self, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Iterator[list[Any]]:
        """The inputs of each part."""
        read = {given.at for given in self.inputs if given.kind == "size"}
        read |= {given.length for given in self.inputs if given.kind == "part"}
        sizes = {at: tensors[at].tolist() for at in read}
        starts = {at: [*itertools.accumulate(found, initial=0)] for at, found in sizes.items()}

        def value(given: Input, i: int) -> Any:
            if given.kind == "number":
                return numbers[given.at]
            if given.kind == "size":
                return sizes[given.at][i]
            whole = tensors[given.at]
            if given.kind == "part":
                return whole.narrow(given.dim, starts[given.length][i], sizes[given.length][i])
            return whole[i] if given.kind == "element" else whole

        for i in range(tensors[0].shape[0]):
            yield [value(given, i) for given in self.inputs]


_bodies: dict[str, Body] = {}  # an operator cannot take a graph, so it takes a name that stands for it here
_names: dict[Any, str] = {}
_found: dict[Any, list[Tensor]] = {}  # by body and operands, results that one program of a step has found
_MOST_FOUND = 64
_process = uuid.uuid4().hex  # part of each name, so that no cache on disk gives the graph to another process


def register(body: Body, key: Any = None) -> str:
    """The name of a body. key: equal for bodies that compute the same, which share a name; None for one like no other.

    A model that is compiled again makes the same bodies again.
    """
    key = object() if key is None else (key, *(getattr(body, f.name) for f in fields(body) if f.name != "function"))
    if key not in _names:
        _names[key] = f"{_process}:{len(_names)}"
        _bodies[_names[key]] = body
    return _names[key]


@custom_op("fxpasses::loop_over_parts", mutates_args=())
def loop_over_parts(name: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    """The results of all parts. name: that of the body. tensors, numbers: the operands."""
    body = _bodies[name]
    if body.is_of_numbers:
        return [result.clone() for result in _once(name, body, tensors, numbers)]
    return _run(body, tensors, numbers)


def _once(name: str, body: Body, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    """As below, for two programs of one step: the first computes, and the second takes what it has found."""
    given = None
    with contained("taking numbers from another program of a step", "They are computed once more."):
        given = name, tuple(numbers), *((tensor.dtype, tensor.shape, _bytes_of(tensor)) for tensor in tensors)
    found = _found.pop(given, None)
    if found is None:
        found = _run(body, tensors, numbers)
        for oldest in list(_found)[: len(_found) - _MOST_FOUND]:
            _found.pop(oldest, None)
        if given is not None:
            _found[given] = found
    return found


def _bytes_of(tensor: Tensor) -> bytes:
    """Also of dtypes that NumPy lacks, such as bfloat16."""
    return tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes()


def _run(body: Body, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    tensors = body.with_copies(tensors)
    with as_in_new_thread(body.autocast), torch.no_grad():
        results = [body.function(*given) for given in body.calls(tensors, numbers)]
        columns = zip(*results, strict=True) if results else [()] * len(body.results)
        made = [result.joined([*values]) for result, values in zip(body.results, columns, strict=True)]
    for result, value in zip(body.results, made, strict=True):
        if not result.fits(value, tensors, numbers):
            raise RuntimeError(f"a loop over parts of the batch made {value.dtype} {[*value.shape]}, not {result}")
    return [*made, *(tensors[at] for at in body.written)]


@loop_over_parts.register_fake
def _fake(name: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
    body = _bodies[name]
    return [
        *(result.fake(tensors, numbers) for result in body.results),
        *(torch.empty_like(tensors[at]) for at in body.written),
    ]


@custom_op("fxpasses::loop_over_parts_backward", mutates_args=())
def loop_over_parts_backward(
    name: str, grads: Sequence[Tensor], tensors: Sequence[Tensor], numbers: Sequence[int], needed: Sequence[int]
) -> list[Tensor]:
    """The gradients of the operands at the positions `needed`. grads: those of the differentiable results."""
    body = _bodies[name]
    tensors = body.with_copies(tensors)
    sums = {at: torch.zeros_like(tensors[at], memory_format=torch.contiguous_format) for at in needed}
    into = [sums.get(at, tensor) for at, tensor in enumerate(tensors)]
    kept = [result for result in body.results if result.is_differentiable]
    starts = [0] * len(kept)
    calls = zip(body.calls(tensors, numbers), body.calls(into, numbers), strict=True)
    with as_in_new_thread(body.autocast), torch.enable_grad():
        for number, (given, own) in enumerate(calls):
            part = _Part(body, given, own, sums.keys())
            cut = zip(kept, grads, starts, part.values, strict=True)
            part.add_gradients([result.cut(grad, number, start, value) for result, grad, start, value in cut])
            for place, (result, value) in enumerate(zip(kept, part.values, strict=True)):
                starts[place] += 0 if result.dim is None else value.shape[result.dim]
    return [sums[at] for at in needed]


class _Part:
    """The forward of one part, for its backward. into: as `given`, with sums of gradients in place of the operands."""

    def __init__(self, body: Body, given: list[Any], into: list[Any], needed: Collection[int]) -> None:
        self.leaves: list[Tensor] = []
        self.sums: list[Tensor] = []
        for at, known in enumerate(body.inputs):
            if isinstance(given[at], Tensor):
                given[at] = given[at].detach()
            if known.kind in ("part", "element", "whole") and known.at in needed:
                self.leaves.append(given[at].requires_grad_())
                self.sums.append(into[at])
        found = zip(body.results, body.function(*given), strict=True)
        self.values = [value for result, value in found if result.is_differentiable]

    def add_gradients(self, grads: Sequence[Tensor]) -> None:
        chosen = [(value, grad) for value, grad in zip(self.values, grads, strict=True) if value.requires_grad]
        if not chosen:
            return
        outputs, own = zip(*chosen, strict=True)
        found = torch.autograd.grad(outputs, self.leaves, own, allow_unused=True)
        with torch.no_grad():
            for total, grad in zip(self.sums, found, strict=True):
                if grad is not None:
                    total.add_(grad)


@loop_over_parts_backward.register_fake
def _backward_fake(
    name: str, grads: Sequence[Tensor], tensors: Sequence[Tensor], numbers: Sequence[int], needed: Sequence[int]
) -> list[Tensor]:
    return [torch.empty_like(tensors[at], memory_format=torch.contiguous_format) for at in needed]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.name, tensors, ctx.numbers = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: a checkpoint lets go of them
    needed = [at for at, is_needed in enumerate(ctx.needs_input_grad[1]) if is_needed]
    results = _bodies[ctx.name].results
    kept = [grad for grad, result in zip(grads, results, strict=False) if result.is_differentiable]
    found = loop_over_parts_backward(ctx.name, kept, saved, ctx.numbers, needed)
    by_place = dict(zip(needed, found, strict=True))
    return None, [by_place.get(at) for at in range(len(saved))], None if ctx.numbers else []


loop_over_parts.register_autograd(_gradients, setup_context=_keep)
