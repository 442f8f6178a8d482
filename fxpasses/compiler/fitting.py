"""Compiles a graph so that its step fits into the bytes that the user gives, and looks whether it still does.

A step begins with what the process holds: parameters, the optimizer's state, other models. At the first step an
optimizer has no state yet, and compiling a graph takes memory on the CPU. So the first calls look again, and Dynamo
forgets the graph if its step would not fit any more and a smaller one is possible: it is planned anew, for what there
is then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

from fxpasses.base.containment import contained
from fxpasses.base.once import warn_once
from fxpasses.base.units import size
from fxpasses.compiler import progress
from fxpasses.compiler.eager_start import is_repeated
from fxpasses.dynamo import cache_entries
from fxpasses.errors import MemoryBudgetError
from fxpasses.graph.collectives import spans_ranks
from fxpasses.memory import limits
from fxpasses.memory.step import Step
from fxpasses.options import Memory

Compiled = Callable[..., Any]

_LOOKS = 64  # calls that look at the memory in use, which then has its final size
_MOST_REPLANS = 2
_TOLERANCE = 1.05  # a prediction may be wrong by so much before a program is refused


def fitted(
    options: Memory, example_inputs: Sequence[Any], code: CodeType | None, compile: Callable[[Step | None], Compiled]
) -> Compiled:
    """What `compile` returns for a step with this budget, or for none.

    Raises `MemoryBudgetError` if it does not fit, and the frame has no graph yet; later there is a warning.
    """
    if options.budget == "off":
        return compile(None)
    if spans_ranks():
        warn_once(("memory", "ranks"), "fastpack.memory does not plan for several ranks. The step has no budget.")
        return compile(None)
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    budget = _bytes(options.budget, device)
    has_gradients = any(tensor.is_leaf and tensor.grad is not None for tensor in tensors)
    step = Step(budget, limits.in_use(device), has_gradients)
    run = compile(step)
    if not step.footprints:  # nothing was partitioned: the graph has no backward
        return run
    replans = _replans.pop(code, 0) if code else 0
    if step.peak() > _TOLERANCE * budget:
        text = (
            f"fastpack.memory is {size(budget)}, and a step of this batch is predicted to take {size(step.peak())}, "
            f"with as much computed again as can be: {size(step.before)} are in use before it, and {step.needs()}. "
            f"Give it more, a smaller batch, or fastpack.offload"
        )
        if not replans and (code is None or not cache_entries.has_any(code)):
            raise MemoryBudgetError(text)
        warn_once(("memory", "does not fit", code), text)
    if code is None or replans == _MOST_REPLANS:
        return run
    return _Looking(run, step, device, code, replans)


_replans: dict[CodeType, int] = {}  # frames whose graph was forgotten, with how often


def _bytes(budget: int | str, device: torch.device) -> int:
    if isinstance(budget, int):
        return budget
    available = limits.available(device)
    if available is None:
        raise MemoryBudgetError(f"fastpack.memory is {budget!r}, and {device} does not say how much it has; give bytes")
    return available * int(budget.removesuffix("%")) // 100


class _Looking:
    """Runs a graph, and looks at the first calls whether its step still fits."""

    def __init__(self, run: Compiled, step: Step, device: torch.device, code: CodeType, replans: int) -> None:
        self.step = step
        self._run, self._device, self._code, self._replans = run, device, code, replans
        self._entry = cache_entries.running()
        self._calls = 0

    def __call__(self, *inputs: Any) -> Any:
        if self._calls < _LOOKS:
            self._calls += 1
            if self._calls > 1:
                with contained("looking at the memory in use", "The step keeps its plan."):
                    self._look()
        return self._run(*inputs)

    def _look(self) -> None:
        grown = limits.in_use(self._device) - self.step.before
        peak = self.step.peak()
        if not (self.step.may_shrink and peak <= self.step.budget < peak + grown):
            return
        if is_repeated() or cache_entries.may_not_recompile():
            return
        self._calls = _LOOKS
        _replans[self._code] = self._replans + 1
        cache_entries.forget(self._code, {self._entry})
        name = getattr(self._code, "co_qualname", self._code.co_name)
        progress.say(f"{name} is planned again at its next call: {size(grown)} more are in use")
