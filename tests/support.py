"""What the tests share: run a program in eager mode and compiled, compare all numbers, count host reads."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

import fxpasses.inspect
from bench.counting import HOST_READS, counted
from fxpasses import fastpack_backend
from fxpasses.inspect import Record
from fxpasses.report import Report

# `make test-slow THOROUGH=1`: all random programs and arrangements, which take much longer.
THOROUGH = os.environ.get("THOROUGH", "0") != "0"

# Torch 2.11 gives each slice between numbers of activations a size of its own. Stock PyTorch, with the same flags,
# breaks the graph too at `y[a:b] = f(x[a:b])`, which asks whether the sizes are equal.
ASSIGNS_SLICES = torch.__version__ >= "2.12"

# Inductor 2.11 sees that [2, u0, 4] is not [2, Min(8, u0), 4] and raises, so that the graph runs uncompiled.
slices_to_the_longest = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11's Inductor does not compile gradients of x[:, :longest]"
)

thorough = pytest.mark.skipif(not THOROUGH, reason="takes long; THOROUGH=1 runs it")


def captured(program: Any, *inputs: Any) -> GraphModule:
    """The graph that Dynamo makes of a program that it captures whole."""
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, fullgraph=True)(*inputs)
    return graphs[0]


def compiled(program: Any, lowering: str = "eager", **options: Any) -> Any:
    """`program` under the backend, with `strict` on; keyword arguments without a dot go to `torch.compile`."""
    arguments = {name: options.pop(name) for name in ("dynamic", "fullgraph", "mode") if name in options}
    given = {"fastpack.lowering": lowering, "fastpack.strict": True} | {f"fastpack.{k}": v for k, v in options.items()}
    return torch.compile(program, backend=fastpack_backend, options=given, **arguments)


def results(program: Callable[..., Any], inputs: Sequence[Any]) -> dict[str, Any]:
    """Outputs, gradients with respect to float inputs and parameters, and the inputs as the program left them."""
    inputs = copy.deepcopy(list(inputs))
    parameters = [p for p in program.parameters() if p.requires_grad] if isinstance(program, torch.nn.Module) else []
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    outputs = [leaf for leaf in pytree.tree_leaves(program(*inputs)) if isinstance(leaf, torch.Tensor)]
    differentiable = [output for output in outputs if output.requires_grad]
    gradients: Iterable[Any] = ()
    if differentiable:
        loss = sum(output.float().square().sum() for output in differentiable)
        gradients = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True)
    return {"outputs": outputs, "gradients": list(gradients), "inputs": inputs}


def assert_same(
    program: Any, batches: Iterable[Sequence[Any]], lowering: str = "eager", tolerance: float = 0.0, **options: Any
) -> Record:
    """Compare eager mode with the compiled program on every batch; returns the record of what was compiled."""
    with fxpasses.inspect.record() as record:
        program_compiled = compiled(program, lowering, **options)
        for batch in batches:
            expected, actual = results(program, batch), results(program_compiled, batch)
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return record


def reports_of(record: Record, pass_name: str = "hoist_metadata") -> list[Report]:
    """A pass's reports, one for each graph."""
    return [report for graph in record.graphs for report in graph.reports if report.pass_name == pass_name]


def instructions(program: Callable[..., Any], batches: Iterable[Sequence[Any]]) -> int:
    """How many instructions Dynamo traces for the batches: what compiling takes, on any machine."""
    traced: list[None] = []
    step = InstructionTranslatorBase.step
    with mock.patch.object(InstructionTranslatorBase, "step", lambda self: (traced.append(None), step(self))[1]):
        for batch in batches:
            program(*batch)
    return len(traced)


def instructions_of_stock(program: Any, batches: Iterable[Sequence[Any]]) -> int:
    """The same under stock PyTorch, whose capture flags are off."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=False, capture_dynamic_output_shape_ops=False):
        return instructions(torch.compile(program, backend="eager"), batches)


def events(step: Callable[[], Any]) -> Counter[str]:
    """How often each operator runs in `step`, forward and backward. A dispatch mode would switch compilation off."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return counted(profile)


def host_reads(step: Callable[[], Any]) -> int:
    return sum(count for name, count in events(step).items() if name in HOST_READS)
