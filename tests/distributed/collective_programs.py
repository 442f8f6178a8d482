"""Programs with collectives, each with a hazard: what a compiler that takes them for pure would change.

Each takes activations [4] and lengths [2], and returns a tensor, or several of which the first is trained on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Program = Callable[[Tensor, Tensor], Any]
# By the names of torch 2.13, or else of torch 2.11.
_GATHER: Any = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
_SCATTER: Any = getattr(functional, "reduce_scatter_single_autograd", None) or functional.reduce_scatter_tensor_autograd
_GATHER_INTO: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def reduced(tensor: Tensor) -> Tensor:
    result = tensor.clone()
    dist.all_reduce(result)
    return result


def gathered(tensor: Tensor) -> Tensor:
    return _GATHER(tensor, 0, dist.group.WORLD)


def scattered(tensor: Tensor) -> Tensor:
    return _SCATTER(tensor, "sum", 0, dist.group.WORLD)


def exchanged(tensor: Tensor, to: Any = (2, 2), from_: Any = (2, 2)) -> Tensor:
    return functional.all_to_all_single_autograd(tensor, list(to), list(from_), dist.group.WORLD)


def twice(body: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> Tensor:
    for _ in range(2):
        x = checkpoint(body, x, use_reentrant=False, **options)
    return x


class ReducedGradient(torch.autograd.Function):
    """Saves what it reduced, and reduces again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(reduced(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return reduced(gradient * ctx.saved_tensors[0])


class Announced(torch.autograd.Function):
    """Reduces in backward what depends on no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        reduced(torch.ones(3))
        return gradient * 2


class OfANumber(torch.autograd.Function):
    """Reduces in backward what no tensor has computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * reduced(torch.tensor(3.0))


@program
def equal_in_each_layer(x: Tensor, lengths: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x * reduced(lengths.max()))
    return x


@program
def equal_without_gradients(x: Tensor, lengths: Tensor) -> Tensor:
    with torch.no_grad():
        first, second = reduced(x.sum()), reduced(x.sum())
    return x * first * second


@program
def gathered_twice(x: Tensor, lengths: Tensor) -> Tensor:
    both = []
    for _ in range(2):
        both.append(torch.zeros(8))
        _GATHER_INTO(both[-1], x.detach())
    return x * both[0][:4] * both[1][4:]


@program
def result_is_not_used(x: Tensor, lengths: Tensor) -> Tensor:
    reduced(lengths.float())
    functional.all_reduce(x, "sum", dist.group.WORLD)
    y = x.sin()
    functional.all_reduce(x.detach(), "sum", dist.group.WORLD)
    y = y.sin()
    reduced(lengths.float())
    return y


@program
def of_constants(x: Tensor, lengths: Tensor) -> Tensor:
    return x * reduced(torch.ones(4)) + reduced(torch.full((4,), 2.0)) * reduced(torch.zeros(()))


def of_numbers(x: Tensor, lengths: Tensor) -> Tensor:
    sizes = [lengths.shape[0], 2 * lengths.shape[0]]
    largest, number = torch.tensor(sizes[0]), lengths.new_tensor(sizes[1])
    dist.all_reduce(largest)
    dist.broadcast(number, 1)
    every = functional.all_gather_tensor(torch.tensor([sizes[0]]), 0, dist.group.WORLD)
    part = functional.reduce_scatter_tensor(torch.tensor(sizes), "sum", 0, dist.group.WORLD)
    swapped = functional.all_to_all_single(torch.tensor(sizes), None, None, dist.group.WORLD)
    return x * int(largest) + number.item() * every[1].item() + part.item() * int(swapped[1])


@program
def of_a_number_in_backward(x: Tensor, lengths: Tensor) -> Tensor:
    return OfANumber.apply(x.sin()) * 2


@program
def sent_by_activations(x: Tensor, lengths: Tensor) -> Tensor:
    chosen = x[: lengths.max()].sum() < x
    counts = torch.stack([chosen.sum(), (~chosen).sum()]).tolist()
    return exchanged(exchanged(x, counts, counts).sin(), counts, counts) * x  # of as many rows


@program
def input_is_written(x: Tensor, lengths: Tensor) -> Tensor:
    dist.all_reduce(lengths)
    y = x * lengths.sum()
    dist.all_reduce(lengths)
    return y * lengths.sum()


@program
def answered_by_other_ranks(x: Tensor, lengths: Tensor) -> Tensor:
    for _ in range(3):
        for _ in range(reduced(lengths.max()).item() % 3):
            x = x.sin()
    return x


@program
def gradients_of_branches(x: Tensor, lengths: Tensor) -> Tensor:
    a = exchanged(x.cos())
    b = gathered(x.sin())
    c = exchanged(x.cos())
    return (b[:4] * 2 + c).sin() + a.exp()


@program
def gradients_of_branches_across_breaks(x: Tensor, lengths: Tensor) -> Tensor:
    a = exchanged(x.cos())
    torch._dynamo.graph_break()
    b = gathered(x.sin())
    torch._dynamo.graph_break()
    c = exchanged(x.cos())
    return (b[:4] * 2 + c).sin() + a.exp()


@program
def output_that_is_not_trained_on(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    return x.cos(), gathered(x.sin())


@program
def use_that_is_not_trained_on(x: Tensor, lengths: Tensor) -> Tensor:
    a, b = gathered(x.sin()), x.cos()
    torch._dynamo.graph_break()
    return b * a.detach().sum()


@program
def functions_of_the_user(x: Tensor, lengths: Tensor) -> Tensor:
    return ReducedGradient.apply(ReducedGradient.apply(x).sin()) * 2


@program
def backward_that_needs_no_gradient(x: Tensor, lengths: Tensor) -> Tensor:
    return Announced.apply(Announced.apply(x).sin()) * 2


@program
def expert_that_may_have_no_tokens(x: Tensor, lengths: Tensor) -> Tensor:
    ids = (x.detach() > 0).long() * 2
    out = torch.zeros_like(x)
    for expert in range(4):
        tokens = torch.where(ids == expert)[0]
        if tokens.numel() == 0:
            continue
        rows = x[tokens] * (expert + 1)
        reduced(rows.detach().sum())
        out = out.index_add(0, tokens, rows)
    return out


@program
def checkpoint_of_metadata(x: Tensor, lengths: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        mask = torch.zeros(4)
        mask[: lengths.max().item()] = 1
        return (x * mask + reduced(lengths.max())).sin()

    return twice(body, x)


@program
def checkpoint_behind_its_last_saved_tensor(x: Tensor, lengths: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        y = x.sin()
        y = (y * reduced(y.detach().sum())).cos()
        return y + reduced(y.detach().mean())

    return twice(body, x)


@program
def checkpoint_with_gradients(x: Tensor, lengths: Tensor) -> Tensor:
    return twice(lambda x: scattered(gathered(x.sin()).cos()), x)


@program
def checkpoint_with_a_result_that_is_not_used(x: Tensor, lengths: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        y = x.sin()
        reduced(y.detach().sum())
        return (y * 2).cos()

    return twice(body, x)


@program
def checkpoint_with_exchanged_splits(x: Tensor, lengths: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        splits = functional.all_to_all_single(lengths, None, None, dist.group.WORLD)
        sizes = (splits * 0 + 2).tolist()
        return exchanged(exchanged(x.sin(), sizes, (2, 2)).cos(), (2, 2), sizes).sin() * x

    return twice(body, x)


@program
def checkpoint_with_independent_branches(x: Tensor, lengths: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        a, b, c = gathered(x * 2).sin(), gathered(x * 3).cos(), gathered(x * 5)
        return (a * c)[:4] + b[:4]

    return twice(body, x)


@program
def checkpoint_that_saves_its_result(x: Tensor, lengths: Tensor) -> Tensor:
    return twice(lambda x: torch.tanh(gathered(x.sin())[:4]), x)


@program
def checkpoint_that_saves_nothing(x: Tensor, lengths: Tensor) -> Tensor:
    return twice(lambda x: exchanged(x * 2) + 1, x).sin()


@program
def checkpoint_that_recomputes_to_the_end(x: Tensor, lengths: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        y = x.sin()
        total = reduced(y.detach().sum())
        return y.cos() + reduced(total)

    return twice(body, x, early_stop=False)


@program
def checkpoint_that_selects(x: Tensor, lengths: Tensor) -> Tensor:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = (torch.ops._c10d_functional.all_gather_into_tensor.default, torch.ops.aten.sin.default)
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def body(x: Tensor) -> Tensor:
        y = gathered(x.sin())[2:6].sin()
        return (y * reduced(y.detach().sum())).cos()

    return twice(body, x, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))


@program
def checkpoint_with_functions_of_the_user(x: Tensor, lengths: Tensor) -> Tensor:
    return twice(functions_of_the_user_in_a_body, x)


def functions_of_the_user_in_a_body(x: Tensor) -> Tensor:
    return ReducedGradient.apply(ReducedGradient.apply(x).sin()) * 2


@program
def checkpoint_of_the_older_kind(x: Tensor, lengths: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        y = gathered(x.sin())[2:6].sin()
        return (y * reduced(y.detach().sum())).cos() + reduced(y.detach())

    return checkpoint(body, checkpoint(body, x, use_reentrant=True), use_reentrant=True)


@program
def checkpoint_with_a_break(x: Tensor, lengths: Tensor) -> Tensor:
    def body(x: Tensor) -> Tensor:
        y = gathered(x.sin())
        torch._dynamo.graph_break()
        return scattered(y.cos())

    return twice(body, x)


@program
def checkpoint_behind_a_break(x: Tensor, lengths: Tensor) -> Tensor:
    x = x * 2
    torch._dynamo.graph_break()
    return twice(lambda x: scattered(gathered(x.sin()).cos()), x).sin()
