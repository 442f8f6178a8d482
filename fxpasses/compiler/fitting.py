"""Compiles a graph so that its step fits into the bytes that the user gives, and guards that it still does.

A step begins with what the process holds: parameters, the optimizer's state, other models. At the first step an
optimizer has no state yet, and compiling a graph takes memory on the CPU. A graph for any size is planned for the batch
that it is compiled for. And a prediction may be wrong, as the allocator then shows. So Dynamo guards that the step
still fits, for what there is and for the batch at hand; if it does not, and a smaller step is possible, the frame is
compiled and planned anew before the step runs.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from fxpasses.base.containment import contained
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
from fxpasses.graph.collectives import communicates
from fxpasses.graph.provenance import input_sources
from fxpasses.memory import limits
from fxpasses.memory.footprint import bytes_in_batch
from fxpasses.memory.measured import Peaks
from fxpasses.memory.step import TOLERANCE, Step, TooLarge
from fxpasses.options import Memory
from fxpasses.passes.pipeline import ComputedRows

Compiled = Callable[..., Any]

_LOOKS = 64  # calls that look at the memory in use, which then has its final size
_TILES = (2, 4, 8, 16)  # graphs grow with them
_WORTH_IT = 0.97  # of the peak with half as many
_HEADROOM = 1.5  # for batches larger than the one at hand, once there was a larger one
_FOR_COMPILING = 0.04  # of the budget: what compiling the graph once more will leave in the process
_LEAST = 1  # byte: a target for which every layer saves as little as it can
_MOST_PLANS = 5  # of a frame; Dynamo gives up at eight graphs


def fitted(
    options: Memory,
    gm: GraphModule,
    example_inputs: Sequence[Any],
    code: CodeType | None,
    compile: Callable[[Step | None], Compiled],
    rows: ComputedRows | None = None,
    strict: bool = False,
) -> Compiled:
    """What `compile` returns for a step with this budget, or for none. gm: the graph that Dynamo captured.

    Raises `MemoryBudgetError` if it does not fit; there is a warning instead if a step of the model did fit.
    """
    if options.budget == "off":
        return compile(None)
    if communicates(gm):
        text = "fastpack.memory does not plan for graphs that communicate, as with tensor parallelism"
        warn_once(("memory", "ranks"), f"{text}. The step has no budget.")
        return compile(None)
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    leaves = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    # A batch may be a leaf as well, and another one each time; and which parameters are trained may change.
    first = next((tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)), next(iter(leaves), None))
    program = code, 0 if first is None else id(first)
    before = given = None
    with contained("asking for the memory in use", "The step has no budget.", strict):
        made = [each for each in example_inputs[len(input_sources(gm)) :] if isinstance(each, torch.Tensor)]
        given = sum(bytes_in_batch(each) or 0 for each in made if each.device == device)
        before = limits.in_use(device)
    if before is None or given is None:
        return compile(None)
    step = Step(_bytes(options.budget, device), before, any(leaf.grad is not None for leaf in leaves), given)
    outgrown = _outgrown.pop((code, threading.get_ident(), step.budget), "")
    if outgrown == _LARGER:
        step.headroom = _HEADROOM
    elif outgrown and device.type == "cpu":
        step.before += round(_FOR_COMPILING * step.budget)
    step.before += _unpredicted.get(program, 0)
    run, step = _with_fewest_tiles(step, compile)
    if not step.footprints or step.has_failed:  # a graph without backward is not partitioned
        return run
    over = None
    with contained("planning memory", "The step has no budget.", strict):
        over = step.peak() - step.budget
    if over is None:
        return run
    if over > 0:  # of other kinds of layers, or of compiled code, too little was known
        run, step = _mended(run, step, compile)
    with contained("drawing a plan of memory", "Its report has no drawing."):
        step.describe()
    text = ""
    with contained("planning memory", "The step has no budget.", strict):
        if step.is_too_large():
            text = (
                f"fastpack.memory is {size(step.budget)}, and a step of this batch is predicted to take "
                f"{size(step.peak())}: {size(step.before)} are in use before it, and {step.in_words()}. Give it more, "
                "a smaller batch, or fastpack.offload"
            )
    did_fit = any(first is not None and of() is first and known == step.budget for of, known in _planned)
    if text:
        if not outgrown and not did_fit:
            raise MemoryBudgetError(text)
        warn_once(("memory", "does not fit", program, step.budget), text)
        return run
    _planned[:] = [each for each in _planned if each[0]() is not None]
    if first is not None and not did_fit:
        _planned.append((weakref.ref(first), step.budget))
    if code is None or step.peak() > step.budget:
        return run
    if outgrown:
        progress.say(f"{getattr(code, 'co_qualname', code.co_name)} is planned again: {outgrown}")
    with contained("guarding how much memory a step takes", "Its plan stays as it is.", strict):
        return _guarded(run, step, gm, _StillFits(step, device, program, first, leaves, rows))
    return run


def _with_fewest_tiles(step: Step, compile: Callable[[Step], Compiled]) -> tuple[Compiled, Step]:
    """What `compile` returns for a step that fits with the fewest tiles of rows, and that step; if none fits, with as
    many as make it much smaller."""
    tried = [step]
    step.more_tiles = True
    try:
        return compile(step), step
    except TooLarge:
        pass
    if step.could_move:
        step = step.again(all_move=True, could_move=False, compiled={})
        tried = [step]
        try:
            return compile(step), step
        except TooLarge:
            pass
    for tiles in _TILES:
        step = step.again(tiles=tiles, more_tiles=tiles < _TILES[-1])
        try:
            return compile(step), step
        except TooLarge:
            if not (step.tiled and step.peak() < _WORTH_IT * tried[-1].peak()):
                break
            tried.append(step)
    step = tried[-1].again(more_tiles=False)
    return compile(step), step


def _mended(run: Compiled, step: Step, compile: Callable[[Step], Compiled]) -> tuple[Compiled, Step]:
    """What `compile` returns for a step that fits, where the one that was planned to turns out not to."""
    if step.may_shrink:
        step = step.again(target=_less(step), more_tiles=False)
        run = compile(step)
    if step.may_shrink and step.peak() > step.budget:  # the first kinds still leave the last too little
        step = step.again(target=_LEAST, more_tiles=False)
        run = compile(step)
    for tiles in _TILES:
        if not ((step.planned or step.peak()) <= step.budget < step.peak() and step.could_tile):
            break
        if tiles > step.tiles:
            tried = step.again(target=_less(step), tiles=tiles, more_tiles=False)
            found = compile(tried)
            if not (tried.tiled and tried.peak() < _WORTH_IT * step.peak()):
                step = step.again()  # the last try is what runs, and what reports tell of
                return compile(step), step
            run, step = found, tried
    return run, step


def _less(step: Step) -> int:
    """What to plan a step for that takes so much more than was planned."""
    return max(_LEAST, min(step.budget, step.planned or step.budget) - (step.peak() - step.budget))


_LARGER = "the batch is larger"
_Program = tuple[CodeType | None, int]  # a frame's code, and the identity of a model's first parameter
# Frames that are to be compiled anew, by the thread that calls them and the budget, with why. Of models that share a
# graph, such as blocks compiled one by one, any may be the one that does not fit any more.
_outgrown: dict[tuple[CodeType | None, int, int], str] = {}
_unpredicted: dict[_Program, int] = {}  # bytes that a step has taken beyond its prediction; plans are mended once
_planned: list[tuple[weakref.ref[torch.Tensor], int]] = []  # the first parameters of models that fit a budget


def _bytes(budget: int | str, device: torch.device) -> int:
    if isinstance(budget, int):
        return budget
    available = limits.available(device)
    if available is None:
        raise MemoryBudgetError(f"fastpack.memory is {budget!r}, and {device} does not say how much it has; give bytes")
    return available * int(budget.removesuffix("%")) // 100


def _guarded(run: Compiled, step: Step, gm: GraphModule, fits: _StillFits) -> Compiled:
    """Called while Dynamo compiles a graph: guard it by whether its step still fits, once it has run."""
    compilation = current_compilation()
    if (
        not ((step.may_shrink or step.could_tile or step.tiled) and can_guard())
        or compilation is None
        or compilation.frame_compile_id >= _MOST_PLANS
    ):
        return run
    inputs = gm.graph.find_nodes(op="placeholder")
    named = [(node, name) for node, name in zip(inputs, input_sources(gm), strict=True) if name]
    sources = [name for node, name in named if _has_symbols(node.meta.get("example_value"))]
    if fits.rows is not None:
        sources = list(fits.rows.sources)
    check = Check(fits, None, fits.program[0], "how much memory a step takes")
    guard_compiled_graph(check, sources or [name for _, name in named[:1]], f"a step takes {size(step.budget)} or less")

    @functools.wraps(run)
    def running(*inputs: Any) -> Any:
        with contained("measuring the memory of a step", "Its plan stays as it is."):
            fits.begin()
        return run(*inputs)

    return running


def _has_symbols(example: Any) -> bool:
    return isinstance(example, torch.Tensor) and not all(isinstance(n, int) for n in example.shape)


class _StillFits:
    """Whether the step of a graph fits, with what is in use now, for a batch. The first is that of the plan."""

    def __init__(
        self,
        step: Step,
        device: torch.device,
        program: _Program,
        first: torch.Tensor | None,
        parameters: Sequence[torch.Tensor],
        rows: ComputedRows | None,
    ) -> None:
        self.program, self.rows = program, rows
        self._outlook, self._device, self._reports = step.outlook(), device, step.reports
        self._first = None if first is None else weakref.ref(first)
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._planned: tuple[float, ...] = ()  # elements of the batch, or its computed rows, by set
        self._looks = 0
        self._in_use = self._outlook.before
        self._has_gradients = False
        self._peaks: Peaks | None = None  # None until it has run: before, what a compiler needs is in use
        self._predicted = 0  # the peak of the step before

    def begin(self) -> None:
        """Called when the step of the graph begins."""
        if self._peaks is None:
            self._peaks = Peaks(self._device)
            self._predicted = self._outlook.peak(self._in_use, 1.0, self._has_gradients)

    def __call__(self, *batch: Any) -> bool:
        if self.rows is None:
            sizes: tuple[float, ...] = (sum(value.numel() for value in batch if isinstance(value, torch.Tensor)),)
        else:
            sizes = self.rows.computed(*batch)
        if not sizes:
            return True  # another guard refuses the batch
        if self._peaks is None:
            self._planned = sizes
            return True
        beyond = 0
        if self._looks < _LOOKS:
            self._looks += 1
            beyond = self._beyond_prediction(self._peaks)
            self._in_use = limits.in_use(self._device)
            self._has_gradients = any(p is not None and p.grad is not None for p in (ref() for ref in self._parameters))
        larger = max(size / max(planned, 1.0) for size, planned in zip(sizes, self._planned, strict=True))
        self._predicted = self._outlook.peak(self._in_use, larger, self._has_gradients)
        fits = self._predicted <= self._outlook.budget
        if (fits and not beyond) or is_repeated() or cache_entries.may_not_recompile():
            return True
        if beyond:
            self._forget_with_the_model()
            _unpredicted[self.program] = beyond
            why = f"a step took {size(beyond)} more than predicted"
        elif self._outlook.peak(self._in_use, 1.0, self._has_gradients) <= self._outlook.budget:
            why = _LARGER
        else:
            why = f"{size(max(0, self._in_use - self._outlook.before))} more are in use"
        _outgrown[self.program[0], threading.get_ident(), self._outlook.budget] = why
        return False

    def _forget_with_the_model(self) -> None:
        """Another model's first parameter may get the identity of this one's."""
        if (first := self._first() if self._first is not None else None) is not None:
            weakref.finalize(first, _unpredicted.pop, self.program, None)

    def _beyond_prediction(self, peaks: Peaks) -> int:
        """By how many bytes the last step has exceeded its prediction, if it has not fit and no plan was mended yet."""
        measured = peaks.new()
        if measured is None:
            return 0
        for report in self._reports:
            report.figures["peak_bytes_measured"] = measured
        is_wrong = measured > TOLERANCE * self._outlook.budget and self.program not in _unpredicted
        return max(0, measured - self._predicted) if is_wrong else 0
