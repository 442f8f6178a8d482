"""Batches of parts, and the comparison of a program with eager mode on each of them: results, gradients and errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fxpasses.inspect
from fxpasses.inspect import Record
from tests.support import compiled

WIDTH = 6
Program = Callable[..., Any]


class Batch(NamedTuple):
    """x, y: [T, WIDTH]. w: [WIDTH, WIDTH]. lengths: [n], which sum to T. targets: [T], of 0 ... WIDTH - 1."""

    x: Tensor
    y: Tensor
    w: Tensor
    lengths: Tensor
    targets: Tensor


SEVERAL = ([3, 4, 2], [2, 5, 1, 3], [4, 0, 3, 1, 2], [1, 1, 1], [3, 6, 2, 2, 2, 5])
FEW = ([3, 4, 2], [2, 1, 3, 2], [2, 0, 4])


def batches(sizes: Iterable[list[int]] = SEVERAL, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    made = []
    for lengths in sizes:
        rows = sum(lengths)
        x, y, w = values(rows, WIDTH), values(rows, WIDTH), values(WIDTH, WIDTH)
        targets = torch.randint(0, WIDTH, (rows,), generator=generator)
        made.append(Batch(x, y, w, torch.tensor(lengths), targets))
    return made


def results(program: Program, batch: Sequence[Tensor]) -> dict[str, Any]:
    """What a program returns, its gradients, the batch as the program leaves it; or that it raises.

    The numbers of rows and parts are marked as dynamic, so that the first batch gives a graph for all. Gradients are
    zeros where there are none.
    """
    batch = copy.deepcopy(list(batch))
    for tensor in batch:
        if tensor.shape[0] > 1 and tensor.shape != (WIDTH, WIDTH):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    leaves = [tensor for tensor in batch if tensor.requires_grad]
    torch.manual_seed(0)
    try:
        returned = pytree.tree_leaves(program(*batch))
    except Exception as error:
        while not type(error).__module__.startswith("builtins") and error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        assert not isinstance(error, (AssertionError, AttributeError, TypeError, ZeroDivisionError)), error
        return {"raises": True}
    differentiable = [value for value in returned if isinstance(value, Tensor) and value.requires_grad]
    gradients: Sequence[Any] = [None] * len(leaves)
    if differentiable:
        loss = sum((1.3 * value).sin().sum() for value in differentiable)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    gradients = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]
    return {"returned": returned, "gradients": gradients, "batch": batch, "differentiable": len(differentiable)}


def assert_eager_modes(
    program: Program,
    given: Iterable[Sequence[Tensor]] | None = None,
    lowering: str = "eager",
    program_compiled: Program | None = None,
    **options: Any,
) -> Record:
    """Compare a program with eager mode on each batch; returns the record of what was compiled."""
    torch._dynamo.reset()
    with fxpasses.inspect.record() as record:
        ours = program_compiled or compiled(program, lowering, **options)
        for batch in batches() if given is None else given:
            expected, actual = results(program, batch), results(ours, batch)
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    return record
