"""Case 6b: the extra cost of a call over stock `torch.compile`, and the memory that is kept for a batch."""

from __future__ import annotations

import functools
import gc
from typing import Any

from bench.case import Case, Contender, Parameters, Program

STOCK = "stock"
CALLS = ("no metadata", "same batch", "new batch")
LAYERS, WIDTH = 4, 256


def build(parameters: Parameters, device: str, ours: bool = False) -> Program:
    """Layers that do next to nothing, without a compiler, so that the call remains: guards and prologue."""
    import torch

    torch._dynamo.config.capture_scalar_outputs = True

    def asks(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            mask = torch.arange(WIDTH, device=x.device) < lengths.max().item()
            x = x * mask
        return x

    def asks_nothing(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            x = x * 3
        return x

    options = {"backend": "fastpack", "options": {"fastpack.lowering": "eager"}} if ours else {"backend": "eager"}
    compiled: Any = torch.compile(asks_nothing if parameters["call"] == "no metadata" else asks, **options)
    x = torch.ones(WIDTH, device=device)
    lengths = torch.arange(64, device=device) % 3 + 1

    def step() -> torch.Tensor:
        result: torch.Tensor = compiled(x, lengths.clone() if parameters["call"] == "new batch" else lengths)
        return result

    def values() -> dict[str, float]:
        return {"sum": step().sum().item()}

    def figures() -> dict[str, float]:
        before = held_bytes()
        batch = lengths.clone()
        compiled(x, batch)
        alive = held_bytes() - before - batch.untyped_storage().nbytes()
        del batch
        return {"held_with_batch_bytes": alive, "held_after_batch_bytes": held_bytes() - before}

    return Program(step, values, figures=figures)


def held_bytes() -> int:
    """Memory of all tensors that Python holds; each storage counts once."""
    import torch

    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    return [{"call": call, "layers": LAYERS} for call in CALLS]


def contender(name: str, ours: bool) -> Contender:
    return Contender(name, functools.partial(build, ours=ours), ours=ours)


CASE = Case(
    name="call_cost",
    title="Cost of fxpasses: time of a call, and memory that is kept",
    groups=groups,
    contenders=[contender(STOCK, ours=False), contender("fastpack", ours=True)],
    baseline=STOCK,
    shows=("time", "host_reads", "operators"),
    expected=(
        "A call of a compiled graph costs some microseconds more: the key of the batch is looked up, and the prologue "
        "runs if the batch is new. The prologue's results are kept while the batch lives, and freed with it."
    ),
    notes=(
        "Both contenders run the graph as captured, without a compiler, so the absolute times are not those of "
        "compiled code. `same batch` calls with the same tensor, `new batch` with a copy of it each time."
    ),
)
