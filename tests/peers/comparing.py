"""A peer's program in three ways: eager mode, stock `torch.compile`, and this backend; what each computed and captured.

A program that is one graph here, with eager mode's numbers bit for bit, is as good as can be. For the others stock
decides what is asked of this backend: what fails under stock is not compared, where stock equals eager mode bit for bit
this backend has to, and it may have no more graphs and breaks than stock has.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.config
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import fxpasses
from fxpasses.dynamo import flags

LOWERING = "aot_eager"
Function = Callable[..., Any]
Way = Callable[[Function], Function]


@dataclass(frozen=True)
class Program:
    """What a peer's sample runs; `build` gives the same function and equal inputs, new each time.

    function: takes `arguments` and `keywords`, any nest of tensors and Python values. finish: applied to what the
    function returned, uncompiled, before a gradient is taken: it takes out what is not unique, such as signs of
    eigenvectors.
    """

    name: str
    build: Callable[[], tuple[Function, tuple[Any, ...], dict[str, Any]]]
    finish: Function = lambda output: output


@dataclass
class Run:
    """numbers: outputs, gradients, and what the inputs and the module's buffers have become, of each call."""

    numbers: Any
    graphs: int
    breaks: int


@dataclass
class Tally:
    """compared: programs in which this backend was held to something; whole: those of them that it ran as one graph,
    equal to eager mode bit for bit. not_compared: why, for the others. worse: where it did worse than stock, and how.
    """

    compared: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    not_compared: dict[str, str] = field(default_factory=dict)
    worse: dict[str, str] = field(default_factory=dict)


def fastpack(function: Function) -> Function:
    return fxpasses.compile(function, options={"fastpack.lowering": LOWERING})


def stock(function: Function) -> Function:
    return torch.compile(function, backend=LOWERING)


def compare(programs: Iterable[Program], ours: Way = fastpack) -> Tally:
    tally = Tally()
    for program in programs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operators that are beta, deprecated, slow ...
            _compare(program, ours, tally)
    return tally


def _compare(program: Program, ours: Way, tally: Tally) -> None:
    expected, repeated = (_attempt(program, lambda function: function) for _ in range(2))
    if isinstance(expected, Exception):
        tally.not_compared[program.name] = f"eager mode: {first_line(expected)}"
        return
    if isinstance(repeated, Exception) or not equal(repeated.numbers, expected.numbers):
        tally.not_compared[program.name] = "eager mode: other numbers each time"
        return
    found = _attempt(program, ours)
    if isinstance(found, Run) and found.graphs <= 1 and not found.breaks and equal(found.numbers, expected.numbers):
        tally.compared.append(program.name)
        if found.graphs:
            tally.whole.append(program.name)
        return
    with torch._dynamo.config.patch(dict.fromkeys(flags.FLAGS, False)):
        asked = _attempt(program, stock)
    if isinstance(asked, Exception):
        tally.not_compared[program.name] = f"stock: {first_line(asked)}"
        return
    exact = equal(asked.numbers, expected.numbers)
    if not exact and not close(asked.numbers, expected.numbers):
        tally.not_compared[program.name] = "stock: other numbers"
        return
    tally.compared.append(program.name)
    if isinstance(found, Exception):
        tally.worse[program.name] = first_line(found)
    elif not (equal if exact else close)(found.numbers, expected.numbers):
        tally.worse[program.name] = "other numbers"
    elif found.graphs > max(asked.graphs, 1) or found.breaks > asked.breaks:
        tally.worse[program.name] = f"graphs {found.graphs} > {asked.graphs} or breaks {found.breaks} > {asked.breaks}"


def _attempt(program: Program, way: Way) -> Run | Exception:
    try:
        return run(program, way)
    except Exception as error:
        return error


def run(program: Program, way: Way) -> Run:
    """Two calls on equal inputs: the second meets the guards of what the first compiled; the numbers are of both."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    function, arguments, keywords = program.build()
    compiled = way(function)
    numbers = []
    for _ in range(2):
        torch.manual_seed(0)
        numbers.append(step(function, compiled, program.finish, *copies((arguments, keywords))))
    return Run(numbers, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def step(
    function: Function, compiled: Function, finish: Function, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """One call and its gradients; returns outputs, gradients, and what inputs and buffers have become."""
    outputs = compiled(*arguments, **keywords)
    differentiable = [each for each in tensors(finish(outputs)) if each.requires_grad]
    state = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    leaves = [each for each in (*tensors((arguments, keywords)), *state) if each.requires_grad and each.is_leaf]
    gradients: Any = ()
    if differentiable and leaves:
        gradients = torch.autograd.grad(
            differentiable, leaves, [_cotangent(e) for e in differentiable], allow_unused=True
        )
    buffers = [each.clone() for each in function.buffers()] if isinstance(function, torch.nn.Module) else []
    return pytree.tree_map(_plain, (outputs, gradients, (arguments, keywords), buffers))


def copies(given: Any) -> Any:
    """Equal inputs, those that share memory sharing it again; tensors with a history become leaves."""
    histories = {id(each) for each in tensors(given) if each.requires_grad and not each.is_leaf}
    if not histories:
        return copy.deepcopy(given)
    return pytree.tree_map(
        lambda each: each.detach().clone().requires_grad_() if id(each) in histories else copy.deepcopy(each), given
    )


def _cotangent(output: torch.Tensor) -> torch.Tensor:
    """Another number for each element, so that a gradient in the wrong place is seen."""
    return torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape).to(output.dtype)


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]


def equal(actual: Any, expected: Any) -> bool:
    return _same(actual, expected, rtol=0.0, atol=0.0)


def close(actual: Any, expected: Any) -> bool:
    """Within the tolerance that `torch.testing` has for the dtype."""
    return _same(actual, expected, rtol=None, atol=None)


def _same(actual: Any, expected: Any, rtol: float | None, atol: float | None) -> bool:
    ours, ours_shape = pytree.tree_flatten(actual)
    wanted, wanted_shape = pytree.tree_flatten(expected)
    if ours_shape != wanted_shape:
        return False
    for mine, theirs in zip(ours, wanted, strict=True):
        if type(mine) is not type(theirs):
            return False
        if isinstance(theirs, torch.Tensor):
            try:
                torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError:
                return False
        elif isinstance(theirs, (int, float, str, torch.Size, torch.dtype)) and mine != theirs:
            if not (theirs != theirs and mine != mine):  # nan
                return False
    return True


def first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200]
