"""Case 7a, a simulation: how often the host waits for the device in a step whose layers all read the batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.case import Case, Contender, Parameters, Program
from bench.cases.compilers import EAGER, OURS, Compiler, contender, eager, ours
from bench.cases.packed_metadata import CACHED
from bench.cases.simulated_device import DEVICE, NOTE, kernel_seconds, plug_in, unavailable
from bench.results import with_figures

READS = 4  # of each layer
TOKENS, WIDTH = 16, 16  # so small that the set time of a kernel is all of it
PACKED = ([5, 8, 3], [1, 14, 1], [4, 4, 8])  # lengths of three batches
STOCK = "aot_eager, both flags"


def build(compiler: Compiler, parameters: Parameters, device: str, cached: bool = False) -> Program:
    simulated = plug_in()
    import torch
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

    from bench.cases.identity_cache import IdentityCache
    from bench.cases.training import training_program

    Read = tuple[int | float, ...]

    def read(lengths: Tensor) -> Read:
        """By copies of 8 bytes: an `.item()` of the simulated device waits, and its own copy takes no time."""
        asked = lengths.max(), lengths.min(), lengths.sum(), lengths[0]
        longest, shortest, total, first = (answer.cpu().item() for answer in asked)
        return longest, shortest, total, first

    ask: Callable[[Tensor], Read] = IdentityCache(read) if cached else read

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            longest, shortest, total, first = ask(lengths)
            return x + torch.tanh(self.linear(x)) * (longest + shortest + first) / total

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(parameters["layers"]))

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, lengths, use_reentrant=False) if checkpointed else layer(x, lengths)
            return x.square().mean()

    checkpointed = parameters["checkpointed"]
    model = Stack().to(DEVICE)
    compiled = compiler(model)
    x = torch.randn(TOKENS, WIDTH).to(DEVICE)
    batches = [{"x": x, "lengths": torch.tensor(lengths).to(DEVICE)} for lengths in PACKED]
    program = training_program(model, lambda batch: compiled(**batch), batches)
    program.step()  # compiles, while nothing takes time
    simulated.costs(out=bandwidth_of(parameters), kernel=parameters["kernel_ms"] / 1e3)

    def step() -> None:
        program.step()
        torch.accelerator.synchronize()

    def figures() -> dict[str, float]:
        """Of a step, without the wait at its end."""
        step()
        simulated.reset_counts()
        program.step()
        found = simulated.counts()
        torch.accelerator.synchronize()
        counted = {name: getattr(found, name) for name in ("stalls", "kernels", "bytes_out")}
        return {**counted, "kernel_s": kernel_seconds()}

    return dataclasses.replace(program, step=step, figures=figures)


def stock(model: Any) -> Any:
    import torch

    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    return torch.compile(model, backend="aot_eager")


def bandwidth_of(parameters: Parameters) -> float:
    """Bytes a second to the host, from the time that a read's 8 bytes take."""
    return 8 / (float(parameters["read_ms"]) / 1e3)


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    sizes = [(4, False)] if quick else [(4, False), (8, False), (16, False), (40, False), (16, True), (40, True)]
    return [{"layers": n, "checkpointed": again, "kernel_ms": 2.0, "read_ms": 1.0} for n, again in sizes]


def stalls(contender: str, parameters: Parameters) -> int | None:
    """In theory. A checkpointed layer reads again when it is computed again; stock PyTorch promises nothing."""
    layers = parameters["layers"] * (2 if parameters["checkpointed"] else 1)
    return {EAGER: READS * layers, CACHED: READS, OURS: 1}.get(contender)


def arithmetic(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The stalls, and a step as the sum of its kernels and of its copies to the host, which nothing overlaps."""
    rows = []
    for entry in with_figures(entries):
        figures, parameters = entry["figures"], entry["parameters"]
        copies = figures["bytes_out"] / bandwidth_of(parameters)
        theory = figures["kernels"] * figures["kernel_s"] + copies
        row: dict[str, Any] = {"L": parameters["layers"], "checkpointed": parameters["checkpointed"]}
        row |= {"contender (simulated device)": entry["contender"], "stalls": int(figures["stalls"])}
        row |= {"stalls, computed": stalls(entry["contender"], parameters), "kernels": int(figures["kernels"])}
        row |= {"a kernel, ms": 1e3 * figures["kernel_s"], "copies to the host, ms": 1e3 * copies}
        row |= {"step, ms": 1e3 * entry["median_s"], "kernels and copies, ms": 1e3 * theory}
        row["step, off by"] = f"{100 * (entry['median_s'] / theory - 1):+.1f} %"
        rows.append(row)
    return rows


def on_simulated_device(found: Contender) -> Contender:
    def missing(parameters: Parameters, device: str) -> str:
        return unavailable(parameters, device) or found.unavailable(parameters, device)

    return dataclasses.replace(found, unavailable=missing)


CASE = Case(
    name="simulated_device_stalls",
    title="Simulated device: stalls of a step whose layers read the batch",
    groups=groups,
    contenders=[
        on_simulated_device(one)
        for one in (
            contender(EAGER, build, eager),
            contender(CACHED, functools.partial(build, cached=True), eager),
            contender(STOCK, build, stock),
            ours(OURS, build, lowering="aot_eager"),
        )
    ],
    baseline=EAGER,
    x="layers",
    shows=("time",),
    expected=(
        f"Each of L layers reads the batch {READS} times: eager mode waits for the device {READS}·L times a step, a "
        f"cache by identity {READS} times, and fastpack once, whatever L. A checkpointed layer of eager mode reads "
        "again in the backward pass. A step takes the time of its kernels and of the copies to the host, for which "
        "both the device and the host wait."
    ),
    arithmetic=arithmetic,
    notes=NOTE
    + (
        " Kernels take 2 ms, and the "
        "copy of one read's 8 bytes 1 ms; fastpack copies all lengths of the batch at once. `max`, `min` and "
        "`sum` are kernels, too: a step has as many as it has reads. Stock `torch.compile` has both capture flags, and "
        "is lowered by `aot_eager`, as is fastpack here: AOTAutograd merges what the layers of a graph without "
        "checkpoints ask, and reads as little as the cache by identity."
    ),
    simulated=True,
)
