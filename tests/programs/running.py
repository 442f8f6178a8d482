"""Runs random programs in eager mode and compiled, over training steps, and says where they differ.

    python -m tests.programs.running 0:2000              # programs 0 to 1999, in processes that may die
    python -m tests.programs.running 17 --show           # one, with its source

A step is forward, backward and an optimizer's step. Compared are what the program returns, the gradients and the
buffers after each step, and the parameters after the last one.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import fxpasses
from tests.programs.writing import source

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
VOCABULARY = 17
IN_A_PROCESS = 40  # programs
TOLERANCE = 2e-4  # of the largest element; the programs compute in float32, and some steps amplify rounding


def program(seed: int, folder: Path) -> ModuleType:
    """The module with program `seed`, in a file of its own, as Dynamo asks for."""
    path = folder / f"program_{seed}.py"
    path.write_text(source(seed))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches(seed: int, count: int = 3) -> list[Batch]:
    """Padded batches of changing sizes: texts of one token, batches without padding, labels that are all ignored."""
    chance = random.Random(seed)
    rows, tokens = chance.randint(2, 4), chance.randint(5, 11)
    found = []
    for _ in range(count):
        if chance.random() < 0.5:
            tokens = chance.randint(4, 12)
        if chance.random() < 0.2:
            rows = chance.randint(1, 4)
        kind = chance.choice(["any", "any", "any", "full", "short", "shorter"])
        longest = {"full": tokens, "short": 1, "shorter": max(1, tokens - 2)}.get(kind, tokens)
        lengths = [chance.randint(1, longest) if kind != "full" else tokens for _ in range(rows)]
        generator = torch.Generator().manual_seed(chance.randrange(10**6))
        real = torch.arange(tokens) < torch.tensor(lengths)[:, None]
        ids = torch.randint(1, VOCABULARY, (rows, tokens), generator=generator) * real
        learnt = real & (torch.rand(rows, tokens, generator=generator) < chance.choice([0.3, 1.0, 1.0]))
        target = torch.randint(0, VOCABULARY, (rows,), generator=generator)
        found.append((ids, torch.tensor(lengths), ids.masked_fill(~learnt, -100), target))
    return found


def train(model: torch.nn.Module, step: Any, data: Iterable[Batch]) -> Iterator[dict[str, Any]]:
    """What can be seen after each training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    fxpasses.skip_idle_experts(optimizer)  # whose gradients are zeros where eager mode has none
    for batch in data:
        returned = step(*[tensor.clone() for tensor in batch])
        loss, *others = returned if isinstance(returned, tuple) else (returned,)
        optimizer.zero_grad()
        loss.backward()
        seen = {"loss": loss, **{f"output {at}": value for at, value in enumerate(others)}}
        seen |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
        seen |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
        yield {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in seen.items()
        }
        optimizer.step()
    yield {name: parameter.detach() for name, parameter in model.named_parameters()}


def difference(expected: dict[str, Any], actual: dict[str, Any]) -> str:
    """The first thing that differs, or ""."""
    gradients = [one for name, one in expected.items() if name.startswith("gradient") and one is not None]
    gradients = [gradient for gradient in gradients if gradient.isfinite().all()]
    # Of the largest gradient, for those that are zero but for rounding: of a bias that `softmax` takes away again.
    rounding = 1e-6 * max((g.abs().max().item() for g in gradients if g.numel()), default=0.0)
    if expected.keys() != actual.keys():
        return f"only one has {sorted(expected.keys() ^ actual.keys())}"
    for name, one in expected.items():
        other = actual[name]
        if one is None and other is not None and name.startswith("gradient"):
            one = torch.zeros_like(other)
        if not isinstance(one, torch.Tensor):
            if type(one) is not type(other) or one != other:
                return f"{name} is {other!r} for {one!r}"
            continue
        scale = max(1e-6, one.double().nan_to_num().abs().max().item()) if one.numel() else 1.0
        try:
            atol = max(TOLERANCE * scale, rounding if name.startswith("gradient") else 0.0)
            torch.testing.assert_close(other.double(), one.double(), rtol=0, atol=atol, equal_nan=True)
        except AssertionError as error:
            return f"{name}: {' '.join(str(error).split())[:160]}"
        if other.dtype is not one.dtype:
            return f"{name} is of {other.dtype} for {one.dtype}"
    return ""


def model_of(module: ModuleType, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return module.Model()


def in_eager_mode(module: ModuleType, seed: int, data: list[Batch] | None = None) -> list[dict[str, Any]] | None:
    """What can be seen of program `seed`; None if eager mode raises, since some statements do not fit together."""
    model = model_of(module, seed)
    try:
        return list(train(model, model, data or batches(seed)))
    except Exception:
        return None


def fault(seed: int, lowering: str = "aot_eager", backend: str = "fastpack") -> str:
    """What is wrong with program `seed` when it is compiled, or "", also where eager mode does not run it.

    Some programs amplify rounding: what differs in float32 alone is no fault.
    """
    torch.set_num_threads(1)
    found = _fault(seed, lowering, backend)
    if "not close" not in found:
        return found
    torch.set_default_dtype(torch.float64)
    try:
        return found if _fault(seed, lowering, backend) else ""
    finally:
        torch.set_default_dtype(torch.float32)


def _fault(seed: int, lowering: str, backend: str) -> str:
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        module = program(seed, Path(folder))
        data = batches(seed, 2 if lowering == "inductor" else 3)  # whose compiling takes long
        expected, model = in_eager_mode(module, seed, data), model_of(module, seed)
        options = {"fastpack.lowering": lowering} if backend == "fastpack" else None
        compiled = torch.compile(model, backend=backend, options=options)
        steps = train(model, compiled, data)
        for at, seen in enumerate(expected or ()):
            try:
                found = difference(seen, next(steps))
            except Exception as error:
                found = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if found:
                return f"step {at}: {found}"
        return ""


def faults(
    seeds: Iterable[int], lowering: str, processes: int = 2, backend: str = "fastpack"
) -> Iterator[tuple[int, str]]:
    """(seed, fault) of each program that is not right, also of those that kill their process."""
    waiting, run = list(seeds), functools.partial(fault, lowering=lowering, backend=backend)
    context = multiprocessing.get_context("spawn")
    while waiting:  # in new processes after some programs, since each leaves something behind
        taken, waiting = waiting[: IN_A_PROCESS * processes], waiting[IN_A_PROCESS * processes :]
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            running = {seed: pool.submit(run, seed) for seed in taken}
            died = []
            for seed, future in running.items():
                try:
                    found = future.result(timeout=600)
                except BrokenProcessPool:
                    died.append(seed)
                    continue
                if found:
                    yield seed, found
        for seed in died:  # one of them ended its process, and the others' with it
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                try:
                    found = pool.submit(run, seed).result()
                except BrokenProcessPool:
                    found = "the process died"
            if found:
                yield seed, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", help="a number, or FROM:TO")
    parser.add_argument("--lowering", default="aot_eager", choices=["eager", "aot_eager", "inductor"])
    parser.add_argument("--backend", default="fastpack", help="another one of torch.compile's, to compare")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="print the source, and run in this process")
    given = parser.parse_args()
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    if given.show:
        for seed in seeds:
            print(source(seed))
            print(seed, fault(seed, given.lowering, given.backend) or "ok", flush=True)
        return 0
    started, wrong = time.time(), 0
    for seed, found in faults(seeds, given.lowering, given.processes, given.backend):
        wrong += 1
        print(f"{seed}: {found}", flush=True)
    print(f"{len(seeds)} programs, {wrong} wrong, {time.time() - started:.0f} s")
    return wrong > 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
