"""Case 4c: a step that has to fit into a share of what eager mode allocates for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from bench.case import Case, Parameters, Program, TooMuch, scale
from bench.cases.compilers import EAGER, OURS, STOCK, Compiler, contender, eager, inductor, ours
from bench.cases.offload import to_disk

CHECKPOINTS, RATIO = "eager, checkpoints", "Inductor, activation_memory_budget"
BUDGET, FREE = "fastpack, budget", "fastpack, budget, checkpoints undone"
TO_DISK, BUDGET_TO_DISK = "fastpack, to disk", "fastpack, budget and to disk"
_RATIOS = (0.8, 0.6, 0.4, 0.2, 0.05)


def build(compiler: Compiler, parameters: Parameters, device: str, checkpoints: bool = False) -> Program:
    """The step; it fails if it allocates more than the group's share of what eager mode allocates."""
    from bench.counting import allocated_bytes

    plain = _program(eager, parameters, device)
    most = round(parameters["budget"] * allocated_bytes(plain.step))
    if compiler is by_ratio:
        return _first_that_fits(parameters, device, most)
    if isinstance(compiler, functools.partial) and "memory" in compiler.keywords:
        compiler = functools.partial(compiler, memory=_bytes(most))
    program = _program(compiler, parameters, device, checkpoints)
    figures: dict[str, float] = {}

    def values() -> Mapping[str, float]:
        with _recorded(compiler, figures):
            found = program.values()
        taken = max(allocated_bytes(program.step) for _ in range(program.batches))
        if taken > most and compiler is not eager:
            raise TooMuch(f"{taken / 2**20:.1f} MiB of {most / 2**20:.1f}")
        if figures:
            figures["budget, MiB"], figures["allocated, MiB"] = round(most / 2**20, 1), round(taken / 2**20, 1)
        return found

    values = program.values if compiler is eager and not checkpoints else values
    return dataclasses.replace(program, values=values, figures=lambda: figures)


@contextlib.contextmanager
def _recorded(compiler: Compiler, figures: dict[str, float]) -> Iterator[None]:
    """Note what a plan of memory predicts."""
    if not isinstance(compiler, functools.partial) or "memory" not in compiler.keywords:
        yield
        return
    from fxpasses.inspect import record

    with record() as found:
        yield
    if known := found.figures("memory"):
        figures["predicted, MiB"] = round(known["peak_bytes"] / 2**20, 1)


def _bytes(most: int) -> int:
    """The budget. It is for the process; here what a step allocates counts, so that contenders can be compared."""
    from fxpasses.memory import limits

    limits.in_use = limits.highest = lambda device: 0
    return most


def _program(compiler: Compiler, parameters: Parameters, device: str, checkpoints: bool = False) -> Program:
    import torch

    from bench.cases.decoders import new_decoder, packed_batches
    from bench.cases.encoders import classifier
    from bench.cases.training import training_program

    torch.manual_seed(0)  # a process makes several models
    if parameters["model"] == "bert":
        model, batches = classifier(parameters["layers"], parameters["tokens"], device)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        more = {"experts_implementation": "eager"} if parameters["model"] == "qwen3_moe" else {}
        model = new_decoder({**parameters, "checkpointed": checkpoints}, device, "sdpa", **more)
        rows = parameters["tokens"] // 2048 if parameters["tokens"] > 4096 else 1  # else attention is all that counts
        batches = packed_batches(parameters["tokens"], device, with_lengths=False, rows=rows)
    compiled = compiler(model)
    kept: list[Any] = []

    def loss_of(batch: Any) -> Any:
        kept[:] = [compiled(**batch)]  # as in most loops, the outputs are there until the next step
        return kept[0].loss

    return training_program(model, loss_of, batches)


def by_ratio(model: Any) -> Any:
    """Stock Inductor with PyTorch's own setting, a ratio of what a graph saves."""
    return inductor(model)


def _first_that_fits(parameters: Parameters, device: str, most: int) -> Program:
    """The largest ratio whose step fits, as a user would search it; PyTorch's setting knows no bytes."""
    import torch
    from torch._functorch import config

    from bench.counting import allocated_bytes

    def tried(ratio: float) -> tuple[Program, int]:
        torch._dynamo.reset()
        config.activation_memory_budget = ratio
        program = _program(inductor, parameters, device)
        program.values()
        return program, allocated_bytes(program.step)

    program, taken = tried(_RATIOS[-1])
    if taken > most:
        raise TooMuch(f"{taken / 2**20:.0f} MiB of {most / 2**20:.0f}, at a ratio of {_RATIOS[-1]}")
    low, high = 0, len(_RATIOS) - 1  # the first that fits is one of these; compiled once more, it comes from a cache
    while low < high:
        middle = (low + high) // 2
        program, taken = tried(_RATIOS[middle])
        low, high = (low, middle) if taken <= most else (middle + 1, high)
    return program if taken <= most else tried(_RATIOS[high])[0]


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    sizes = scale(device)
    if quick:
        return [{"model": "llama", "layers": 4, "tokens": 1024, "budget": 0.5, **sizes}]
    rows = [("llama", 8, 2048, (1.0, 0.7, 0.5, 0.35, 0.25, 0.1))]
    rows += [(model, 8, 2048, (0.7, 0.5, 0.35, 0.25)) for model in ("qwen3", "qwen3_moe", "bert")]
    rows += [(model, 28, 2048, (0.5, 0.25)) for model in ("llama", "qwen3")]
    rows += [(model, 8, 4096, (0.5, 0.25)) for model in ("llama", "qwen3")]
    rows += [("llama", 8, 16384, (0.5, 0.25)), ("bert", 8, 32768, (0.5, 0.25))]
    return [
        {"model": model, "layers": layers, "tokens": tokens, "budget": share, **sizes}
        for model, layers, tokens, shares in rows
        for share in shares
    ]


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
        to_disk(TO_DISK, build),
        ours(BUDGET, build, memory=1),
        to_disk(BUDGET_TO_DISK, build, memory=1),
        ours(FREE, functools.partial(build, checkpoints=True), memory=1, memory__checkpoints="free"),
    ],
    baseline=EAGER,
    shows=("time", "allocated_bytes", "compile"),
    x="budget",
    budget="budget",
    expected=(
        "A step fits into half of eager mode's memory with little or no recomputation, since a compiler saves less to "
        "begin with; checkpoints on all layers recompute everything, whatever there is room for. The less there is, "
        "the more layers recompute, up to the time of a forward."
    ),
    notes=(
        "The budget is a share of what eager mode's step allocates beyond what is held between steps, with the outputs "
        "of the model. Eager mode has none. A contender whose step allocates more fails: it has run out of memory. "
        "Of PyTorch's setting the largest ratio that fits, from 0.8 down to 0.05, is taken. torchtune's offloading "
        "moves tensors to the host, where they are here; ours moves to the disk, and mapped files are not counted."
    ),
)
