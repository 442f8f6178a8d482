"""Case 4c: a step that has to fit into a share of what eager mode allocates for it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from bench.case import Case, Parameters, Program, scale
from bench.cases.compilers import EAGER, OURS, STOCK, Compiler, contender, eager, inductor, ours

CHECKPOINTS, RATIO = "eager, checkpoints", "Inductor, activation_memory_budget"
BUDGET, FREE = "fastpack, budget", "fastpack, budget, checkpoints undone"
_RATIOS = (0.8, 0.6, 0.4, 0.2, 0.05)


class TooMuch(RuntimeError):
    """A contender takes more than the budget."""


def build(compiler: Compiler, parameters: Parameters, device: str, checkpoints: bool = False) -> Program:
    """The step; it fails if it allocates more than the group's share of what eager mode allocates."""
    from bench.counting import allocated_bytes

    plain, most = _program(eager, parameters, device), 0
    plain.values()
    most = round(parameters["budget"] * allocated_bytes(plain.step))
    if compiler is by_ratio:
        return _first_that_fits(parameters, device, most)
    if isinstance(compiler, functools.partial) and "memory" in compiler.keywords:
        compiler = functools.partial(compiler, memory=_bytes(most))
    program = _program(compiler, parameters, device, checkpoints)

    def values() -> Mapping[str, float]:
        found = program.values()
        taken = allocated_bytes(program.step)
        if taken > most and compiler is not eager:
            raise TooMuch(f"{taken / 2**20:.0f} MiB of {most / 2**20:.0f}")
        return found

    return Program(program.step, program.values if compiler is eager and not checkpoints else values, program.batches)


def _bytes(most: int) -> int:
    """The budget. It is for the process; here what a step allocates counts, so that contenders can be compared."""
    from fxpasses.memory import limits

    limits.in_use = lambda device: 0
    return most


def _program(compiler: Compiler, parameters: Parameters, device: str, checkpoints: bool = False) -> Program:
    import torch

    from bench.cases.decoders import new_decoder, packed_batches
    from bench.cases.training import training_program

    torch.manual_seed(0)  # a process makes several models
    model = new_decoder({**parameters, "checkpointed": checkpoints}, device, "sdpa")
    compiled = compiler(model)
    batches = packed_batches(parameters["tokens"], device, with_lengths=False)
    return training_program(model, lambda batch: compiled(**batch).loss, batches)


def by_ratio(model: Any) -> Any:
    """Stock Inductor with PyTorch's own setting, a ratio of what a graph saves."""
    return inductor(model)


def _first_that_fits(parameters: Parameters, device: str, most: int) -> Program:
    """The largest ratio whose step fits, as a user would search it; PyTorch's setting knows no bytes."""
    import torch
    from torch._functorch import config

    from bench.counting import allocated_bytes

    taken = []
    for ratio in _RATIOS:
        torch._dynamo.reset()
        config.activation_memory_budget = ratio
        program = _program(inductor, parameters, device)
        program.values()
        taken.append(allocated_bytes(program.step))
        if taken[-1] <= most:
            return program
    raise TooMuch(f"{min(taken) / 2**20:.0f} MiB of {most / 2**20:.0f}, at the best of the ratios {_RATIOS}")


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    sizes = scale(device)
    if quick:
        return [{"model": "llama", "layers": 4, "tokens": 1024, "budget": 0.5, **sizes}]
    shares = (1.0, 0.7, 0.5, 0.35, 0.25, 0.1)
    found = [{"model": "llama", "layers": 8, "tokens": 4096, "budget": share, **sizes} for share in shares]
    found += [{"model": "llama", "layers": 28, "tokens": 2048, "budget": share, **sizes} for share in (0.5, 0.25)]
    found += [{"model": "llama", "layers": 8, "tokens": 16384, "budget": share, **sizes} for share in (0.5, 0.25)]
    return found + [{"model": "qwen3", "layers": 8, "tokens": 4096, "budget": share, **sizes} for share in (0.5, 0.25)]


CASE = Case(
    name="memory",
    title="Fit: a step in a share of eager mode's memory",
    groups=groups,
    contenders=[
        contender(EAGER, build, eager),
        contender(CHECKPOINTS, functools.partial(build, checkpoints=True), eager),
        contender(STOCK, build, inductor),
        contender(RATIO, build, by_ratio),
        ours(OURS, build),
        ours(BUDGET, build, memory=1),
        ours(FREE, functools.partial(build, checkpoints=True), memory=1, memory__checkpoints="free"),
    ],
    baseline=EAGER,
    shows=("time", "allocated_bytes", "compile"),
    x="budget",
    expected=(
        "A step fits into half of eager mode's memory with little or no recomputation, since a compiler saves less to "
        "begin with; checkpoints on all layers recompute everything, whatever there is room for. The less there is, "
        "the more layers recompute, up to the time of a forward."
    ),
    notes=(
        "The budget is a share of what eager mode's step allocates beyond what is held between steps. Eager mode has "
        "none. A contender whose step allocates more fails: it has run out of memory. "
        "PyTorch's setting is tried from 0.8 down to 0.05, and the first that fits is taken."
    ),
)
