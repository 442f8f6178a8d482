"""Compiles a graph so that its step fits into the bytes that the user gives, and guards that it still does.

A step begins with what the process holds: parameters, the optimizer's state, other models. At the first step an
optimizer has no state yet, and compiling a graph takes memory on the CPU. And a graph for any size is planned for the
batch that it is compiled for. So Dynamo guards that the step still fits, for what there is and for the batch at hand;
if it does not, and a smaller step is possible, the frame is compiled and planned anew before the step runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from fxpasses.base.once import warn_once
from fxpasses.base.units import size
from fxpasses.compiler import progress
from fxpasses.compiler.eager_start import is_repeated
from fxpasses.dynamo import cache_entries
from fxpasses.dynamo.checks import Check
from fxpasses.dynamo.dynamo_names import guard_compiled_graph
from fxpasses.dynamo.guarding import can_guard
from fxpasses.dynamo.recompiles import current_compilation
from fxpasses.errors import MemoryBudgetError
from fxpasses.graph.collectives import spans_ranks
from fxpasses.graph.provenance import input_sources
from fxpasses.memory import limits
from fxpasses.memory.step import Step
from fxpasses.options import Memory

Compiled = Callable[..., Any]

_LOOKS = 64  # calls that look at the memory in use, which then has its final size
_TOLERANCE = 1.05  # a prediction may be wrong by so much before a program is refused
_HEADROOM = 1.5  # for batches larger than the one at hand, once there was a larger one
_FOR_COMPILING = 0.04  # of the budget: what compiling the graph once more will leave in the process
_MOST_PLANS = 5  # of a frame; Dynamo gives up at eight graphs


def fitted(
    options: Memory,
    gm: GraphModule,
    example_inputs: Sequence[Any],
    code: CodeType | None,
    compile: Callable[[Step | None], Compiled],
) -> Compiled:
    """What `compile` returns for a step with this budget, or for none. gm: the graph that Dynamo captured.

    Raises `MemoryBudgetError` if it does not fit, and the frame has no graph yet; later there is a warning.
    """
    if options.budget == "off":
        return compile(None)
    if spans_ranks():
        warn_once(("memory", "ranks"), "fastpack.memory does not plan for several ranks. The step has no budget.")
        return compile(None)
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    has_gradients = any(tensor.is_leaf and tensor.grad is not None for tensor in tensors)
    step = Step(_bytes(options.budget, device), limits.in_use(device), has_gradients)
    outgrown = _outgrown.pop(code, "") if code else ""
    if outgrown == _LARGER:
        step.headroom = _HEADROOM
    elif outgrown and device.type == "cpu":
        step.before += round(_FOR_COMPILING * step.budget)
    run = compile(step)
    if not step.footprints:  # nothing was partitioned: the graph has no backward
        return run
    if step.peak() > _TOLERANCE * step.budget:
        text = (
            f"fastpack.memory is {size(step.budget)}, and a step of this batch is predicted to take "
            f"{size(step.peak())}, with as much computed again as can be: {size(step.before)} are in use before it, "
            f"and {step.needs()}. Give it more, a smaller batch, or fastpack.offload"
        )
        if not outgrown and (code is None or not cache_entries.has_any(code)):
            raise MemoryBudgetError(text)
        warn_once(("memory", "does not fit", code), text)
    elif code is not None:
        if outgrown:
            progress.say(f"{getattr(code, 'co_qualname', code.co_name)} is planned again: {outgrown}")
        return _guarded(run, step, gm, device, code)
    return run


_LARGER = "the batch is larger"
_outgrown: dict[CodeType, str] = {}  # frames that do not fit any more, with why


def _bytes(budget: int | str, device: torch.device) -> int:
    if isinstance(budget, int):
        return budget
    available = limits.available(device)
    if available is None:
        raise MemoryBudgetError(f"fastpack.memory is {budget!r}, and {device} does not say how much it has; give bytes")
    return available * int(budget.removesuffix("%")) // 100


def _guarded(run: Compiled, step: Step, gm: GraphModule, device: torch.device, code: CodeType) -> Compiled:
    """Called while Dynamo compiles a graph: guard it by whether its step still fits, once it has run."""
    compilation = current_compilation()
    if not (step.may_shrink and can_guard()) or compilation is None or compilation.frame_compile_id >= _MOST_PLANS:
        return run
    inputs = gm.graph.find_nodes(op="placeholder")
    named = [(node, name) for node, name in zip(inputs, input_sources(gm), strict=True) if name]
    sources = [name for node, name in named if _has_symbols(node.meta.get("example_value"))]
    fits = _StillFits(step, device, code)
    check = Check(fits, None, code, "how much memory a step takes")
    guard_compiled_graph(check, sources or [name for _, name in named[:1]], f"a step takes {size(step.budget)} or less")

    @functools.wraps(run)
    def running(*inputs: Any) -> Any:
        fits.has_run = True
        return run(*inputs)

    return running


def _has_symbols(example: Any) -> bool:
    return isinstance(example, torch.Tensor) and not all(isinstance(n, int) for n in example.shape)


class _StillFits:
    """Whether the step of a graph fits, with what is in use now, for a batch. The first is that of the plan."""

    def __init__(self, step: Step, device: torch.device, code: CodeType) -> None:
        self._step, self._device, self._code = step, device, code
        self.has_run = False  # before, what a compiler needs for a while is in use
        self._planned = 1  # elements of the batch
        self._looks = 0
        self._grown = 0

    def __call__(self, *batch: Any) -> bool:
        elements = sum(value.numel() for value in batch if isinstance(value, torch.Tensor))
        if not self.has_run:
            self._planned = max(elements, 1)
            return True
        if self._looks < _LOOKS:
            self._looks += 1
            self._grown = limits.in_use(self._device) - self._step.before
        larger = elements / self._planned
        if self._step.peak_for(larger) + self._grown <= self._step.budget:
            return True
        if is_repeated() or cache_entries.may_not_recompile():
            return True
        is_larger = self._step.peak_for(1.0) + self._grown <= self._step.budget
        _outgrown[self._code] = _LARGER if is_larger else f"{size(self._grown)} more are in use"
        return False
