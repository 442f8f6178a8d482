"""Case 6d: when the first step is done, with empty caches, and in a process that finds them filled."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.case import Case, Parameters, Program, scale
from bench.cases.compile_time import BY_LAYER, by_layer
from bench.cases.compilers import (
    EAGER,
    OURS,
    STOCK,
    STOCK_FLAGS,
    Compiler,
    contender,
    eager,
    inductor,
    inductor_with_flags,
    ours,
)  # fmt: skip
from bench.first_call import AOT, CXX, DYNAMO, INDUCTOR, PASSES, STEP

EAGER_START, FROM_FILE = "fastpack, eager start", "fastpack, a file"
_LONGEST = 600.0  # seconds that a process is waited for which compiles beside the steps


def build(compiler: Compiler, parameters: Parameters, device: str, from_file: bool = False) -> Program:
    """The first step is measured by itself, in CPU seconds; the steps afterwards are compiled ones.

    from_file: the first process saves what it has compiled, and the next one loads it, as a part of its first step.
    """
    from bench.cases.training import fresh, training_program
    from bench.first_call import first_call

    model, batches = _program(parameters, device)
    other = None
    if parameters["ranks"] == 2:
        from bench.second_rank import SAVE, STEP, SecondRank, wrapped

        other = SecondRank(steps_of_second_rank, (compiler, dict(parameters), device, from_file))
        model = wrapped(model)
    program_of = compiler(model)
    costs: dict[str, float] = {}

    def loss_of(batch: Mapping[str, Any]) -> Any:
        if other is not None:
            other.tell(STEP)
        return program_of(**batch).loss

    program = training_program(model, loss_of, batches)

    def values() -> Mapping[str, float]:
        path = _file(0)

        def call() -> None:
            if from_file:
                fxpasses.load_caches(path, missing_ok=True)
            loss_of(fresh(batches[0])).backward()

        if from_file:
            import fxpasses
        if compiler is eager:
            call()
        else:
            costs.update(first_call(call))
        model.zero_grad(set_to_none=True)
        _until_compiled(program.step)
        found = program.values()
        if from_file and not path.exists():
            fxpasses.save_caches(path)
            if other is not None:
                other.tell(SAVE)
        return found

    return Program(program.step, values, batches=program.batches, compiling=lambda: costs)


def steps_of_second_rank(
    compiler: Compiler, parameters: Parameters, device: str, from_file: bool
) -> Callable[[int], None]:
    """The other rank takes the same batch in each step."""
    from bench.cases.training import fresh
    from bench.second_rank import SAVE, wrapped

    model, batches = _program(parameters, device)
    model = wrapped(model)
    program_of = compiler(model)
    loads = from_file

    def step(what: int) -> None:
        nonlocal loads
        if from_file:
            import fxpasses

            if what == SAVE:
                return fxpasses.save_caches(_file(1))
            if loads:
                loads = False
                fxpasses.load_caches(_file(1), missing_ok=True)
        program_of(**fresh(batches[0])).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def _file(rank: int) -> Path:
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ".")) / f"fxpasses{rank}.zip"


def _program(parameters: Parameters, device: str) -> tuple[Any, list[dict[str, Any]]]:
    from bench.cases.decoders import new_decoder, packed_batches
    from bench.cases.encoders import classifier

    if parameters["model"] == "demo":
        return _demo(parameters, device)
    if parameters["model"] != "bert":
        experts = parameters["experts"]
        more = {"experts_implementation": "eager", "num_experts": experts} if experts else {}
        return (
            new_decoder(parameters, device, "sdpa", **more),
            packed_batches(parameters["tokens"], device, with_lengths=False),
        )
    return classifier(parameters["layers"], parameters["tokens"], device)


def _demo(parameters: Parameters, device: str) -> tuple[Any, list[dict[str, Any]]]:
    """What `make demo` trains: each layer asks for the lengths of the batch, and is checkpointed."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import packed_training
    from transformers import AttentionInterface

    AttentionInterface.register("packed", packed_training.packed_attention)

    given = argparse.Namespace(
        layers=parameters["layers"], tokens=parameters["tokens"], steps=4, seed=0, device=device,
        attention="mask", padded=False,
    )  # fmt: skip
    return packed_training.new_model(given), packed_training.packed_batches(given)


def _without_flags(parameters: Parameters, device: str) -> str:
    return "" if parameters["model"] == "demo" else "the same graph as without flags"


def _until_compiled(step: Any) -> None:
    """Run steps while a process compiles their graph (`fastpack.start`)."""
    module: Any = sys.modules.get("fxpasses.compiler.eager_start")  # in contenders of ours alone
    started = time.monotonic()
    while module is not None and any(frame.children for frame in module._frames.values()):
        assert time.monotonic() - started < _LONGEST, "the graph is not compiled"
        step()


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    rest = {"tokens": 512, "experts": 0, **scale("cpu"), "ranks": 1}
    if quick:
        return [{"model": "llama", "layers": 2, **rest}]
    found = [{"model": "llama", "layers": n, **rest} for n in (4, 28, 40)]
    found += [{"model": "qwen3", "layers": n, **rest} for n in (4, 28, 40)]
    found.append({"model": "bert", "layers": 4, **rest})
    found += [{"model": "qwen3_moe", "layers": 4, **rest, "experts": experts} for experts in (8, 128)]
    found += [{"model": model, "layers": n, **rest, "width": "1024"} for model in ("llama", "qwen3") for n in (4, 28)]
    found.append({"model": "demo", "layers": 8, **rest})
    return [*found, {"model": "llama", "layers": 28, **rest, "ranks": 2}]


def arithmetic(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """CPU seconds of the first step, by phase, with empty and with filled caches."""
    rows = []
    for entry in entries:
        parameters = entry["parameters"]
        kind = (
            f"{parameters['model']}, {parameters['experts']} experts" if parameters["experts"] else parameters["model"]
        )
        kind += ", hidden 1024" * (parameters["width"] == "1024") + ", two ranks" * (parameters["ranks"] == 2)
        for caches in ("cold", "warm"):
            costs = entry.get(f"compiling_{caches}")
            if entry["outcome"] == "measured" and costs:
                phases = {phase: costs[f"{phase}_s"] for phase in (DYNAMO, PASSES, AOT, INDUCTOR, CXX, STEP)}
                rows.append(
                    {
                        "model": kind,
                        "layers": parameters["layers"],
                        "contender": entry["contender"],
                        "caches": {"cold": "empty", "warm": "filled"}[caches],
                        "CPU s": costs["cpu_s"],
                        **phases,
                        "elapsed s": costs["wall_s"],
                    }
                )
    return rows


CASE = Case(
    name="start",
    title="The first step",
    groups=groups,
    contenders=[
        contender(EAGER, build, eager),
        contender(STOCK, build, inductor),
        contender(STOCK_FLAGS, build, inductor_with_flags, unavailable=_without_flags),
        contender(BY_LAYER, build, by_layer),
        ours(OURS, build),
        ours(EAGER_START, build, start="eager"),
        ours(FROM_FILE, functools.partial(build, from_file=True)),
    ],
    baseline=EAGER,
    shows=("time", "graphs"),
    x="layers",
    expected=(
        "Stock PyTorch traces and compiles every layer. Equal layers are traced once and compiled once here, so only "
        "what looks at all of them grows: the copies of their nodes, guards, and the passes. With an eager start the "
        "first step waits for Dynamo and the passes alone. With filled caches no compiler runs, and with a file of "
        "`fxpasses.save_caches` nothing is traced either."
    ),
    arithmetic=arithmetic,
    cpu_time=True,
    notes=(
        "CPU seconds of the first step, forward and backward, with all processes that it started and waited for; with "
        "an eager start, the process that compiles beside the steps is not among them. Steps are measured once their "
        "code is there. `Inductor by layer` calls `layer.compile()`; what is around the layers is not compiled."
    ),
)
