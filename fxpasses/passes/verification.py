"""Compares a graph before and after a pass, by running both on the example inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxpasses.graph.collectives import communicates
from fxpasses.metadata.program import Program
from fxpasses.metadata.runtime.batch_cache import BatchCache
from fxpasses.metadata.runtime.prologue import Prologue


def compare(
    before: GraphModule,
    program_before: Program | None,
    after: GraphModule,
    program_after: Program | None,
    inputs: Sequence[Any],
    exact: bool = True,
) -> str:
    """A text for the first difference in outputs, written inputs or gradients; "" if there is none.

    exact: whether the last bit counts; otherwise only a difference beyond rounding does, relative to the largest value.

    inputs: those of the captured graph, with real values. Nothing runs or is compared if they are fake (in a graph that
    was split after capture) or if the graph issues collectives, which the other ranks would not answer. Both runs draw
    the same random numbers.
    """
    if communicates(before) or any(isinstance(value, torch._subclasses.FakeTensor) for value in inputs):
        return ""
    expected = _run(before, program_before, inputs)
    actual = _run(after, program_after, inputs)
    for what in expected:
        try:
            for found, wanted in zip(actual[what], expected[what], strict=True):
                tolerance = 0.0 if exact else _rounding(wanted)
                torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            return f"{what}: {str(error).splitlines()[0]}"
    return ""


def _rounding(tensor: torch.Tensor) -> float:
    """A bound on the difference between sums of some thousand terms in different orders."""
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return 0.0
    return 64 * torch.finfo(tensor.dtype).eps * tensor.abs().nan_to_num(0, 0, 0).max().item()


def _run(gm: GraphModule, program: Program | None, inputs: Sequence[Any]) -> dict[str, list[Any]]:
    copies = [_copy(value) for value in inputs]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        extra = Prologue(program, cache=BatchCache())(copies) if program is not None else ()
        with torch.enable_grad():
            results = gm(*copies, *extra)
            outputs = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
            differentiable = [t for t in outputs if t.requires_grad]
            leaves = [t for t in copies if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad]
            gradients: list[Any] = []
            if differentiable and leaves:
                ones = [torch.ones_like(t) for t in differentiable]
                found = torch.autograd.grad(differentiable, leaves, ones, allow_unused=True)
                gradients = [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]
    written = [t.detach() for t in copies if isinstance(t, torch.Tensor)]
    return {"outputs": [t.detach() for t in outputs], "inputs after the run": written, "gradients": gradients}


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone(memory_format=torch.preserve_format)
    return copy.requires_grad_(value.requires_grad)
