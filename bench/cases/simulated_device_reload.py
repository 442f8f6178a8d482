"""Case 7b, a simulation: the backward pass of offloaded layers, with copies and kernels of set cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bench.case import Case, Contender, Parameters, Program
from bench.cases.compilers import Compiler, ours
from bench.cases.offload_sweep import BUFFERS, NO_OFFLOAD
from bench.cases.simulated_device import DEVICE, NOTE, device_seconds, kernel_seconds, plug_in
from bench.cases.simulated_device_stalls import on_simulated_device
from bench.results import spread, with_figures

TOKENS, WIDTH = 64, 64
PASSES = 5  # the time is their median
ALLOWED = 0.05
FORMULAS = {None: "L·g", 1: "L·(c+g)", 2: "c+(L−1)·max(c,g)+g"}  # by the number of buffers


def build(compiler: Compiler, parameters: Parameters, device: str) -> Program:
    simulated = plug_in()
    import torch

    from bench.cases.checkpointed_products import Stack
    from bench.cases.offload import moved
    from bench.cases.training import training_program

    # The gradient of a sum is no kernel: backward is layers, and nothing else.
    model = Stack(parameters["layers"], 2, WIDTH, torch.sum).to(DEVICE)
    compiled = compiler(model)
    x = torch.randn(TOKENS, WIDTH).to(DEVICE)
    program = training_program(model, lambda batch: compiled(batch["x"]), [{"x": x}])
    bandwidth = x.numel() * x.element_size() / (parameters["copy_ms"] / 1e3)
    program.step()  # compiles, and measures how fast copies of many megabytes are: before they are slow
    simulated.costs(out=bandwidth, in_=bandwidth, kernel=parameters["kernel_ms"] / 1e3)
    offloads = "offload" in compiler.keywords  # type: ignore[attr-defined]

    def step() -> None:
        program.step()
        torch.accelerator.synchronize()

    def backward_seconds() -> float:
        loss = compiled(x)
        seconds = device_seconds(loss.backward)
        model.zero_grad(set_to_none=True)
        return seconds

    def figures() -> dict[str, float]:
        if offloads and (found := moved(program)["tensors_out"]) != parameters["layers"]:
            raise RuntimeError(f"{found} tensors were moved, not one a layer")
        kernels, seconds = [], []
        for _ in range(PASSES):  # in turns, so that what the machine does meanwhile is in both
            kernels.append(kernel_seconds())
            seconds.append(backward_seconds())
        loss = compiled(x)
        simulated.reset_counts()
        loss.backward()
        lower, median, upper = spread(seconds)
        found = {"backward_s": median, "backward_q1_s": lower, "backward_q3_s": upper}
        return found | {"kernel_s": spread(kernels)[1], "kernels": simulated.counts().kernels}

    return dataclasses.replace(program, step=step, figures=figures)


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    copies = [24.0] if quick else [2.4, 24.0, 72.0, 8.0, 48.0]
    return [{"copy_ms": copy, "layers": 4 if quick else 8, "kernel_ms": 3.0} for copy in copies]


def computed(layers: int, copy: float, compute: float, buffers: int | None) -> float:
    """The backward pass, in the unit of `copy` and `compute`, which are those of a layer. None: without offload."""
    if buffers is None:
        return layers * compute
    if buffers == 1:
        return layers * (copy + compute)
    return copy + (layers - 1) * max(copy, compute) + compute


def arithmetic(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """c is what was set; g what a layer's kernels take when nothing is copied, measured beside the pass."""
    rows = []
    for entry in with_figures(entries):
        figures, parameters = entry["figures"], entry["parameters"]
        layers, copy, buffers = parameters["layers"], parameters["copy_ms"] / 1e3, BUFFERS.get(entry["contender"])
        compute = figures["kernels"] * figures["kernel_s"] / layers
        theory = computed(layers, copy, compute, buffers)
        off = figures["backward_s"] / theory - 1
        row: dict[str, Any] = {"contender (simulated device)": entry["contender"]}
        row |= {"c/g": copy / compute, "c, ms": 1e3 * copy, "g, ms": 1e3 * compute, "formula": FORMULAS[buffers]}
        row |= {"computed, ms": 1e3 * theory, "measured, ms": 1e3 * figures["backward_s"]}
        row["± (quartiles), ms"] = 1e3 * (figures["backward_q3_s"] - figures["backward_q1_s"]) / 2
        row["off by"] = f"{100 * off:+.1f} %" + " (!)" * (abs(off) > ALLOWED)
        rows.append(row)
    return sorted(rows, key=lambda row: (str(row["formula"]), row["c/g"]))


def contender(name: str, **options: Any) -> Contender:
    return on_simulated_device(ours(name, build, lowering="aot_eager", **options))


CASE = Case(
    name="simulated_device_reload",
    title="Simulated device: reload of offloaded activations, with one buffer and with two",
    groups=groups,
    contenders=[
        dataclasses.replace(contender(NO_OFFLOAD), ours=False),
        *(
            contender(name, offload="host", offload__min_bytes=0, offload__keep_last=0, offload__buffers=count)
            for name, count in BUFFERS.items()
        ),
    ],
    baseline=NO_OFFLOAD,
    x="copy_ms",
    shows=("time",),
    expected=(
        "If a layer's backward pass takes the time g and the copy of its activation c, the backward pass of L layers "
        "takes L·(c+g) with one buffer and c+(L−1)·max(c,g)+g with two."
    ),
    arithmetic=arithmetic,
    notes=NOTE
    + (
        " The arithmetic is of the backward pass alone, by the device's events; a step has the forward pass, too, and "
        "its copies. g is the time of a layer's kernels when nothing is copied: their number times what a queued "
        "kernel takes, measured in turns with the passes. "
        f"(!) marks what is off by more than {100 * ALLOWED:.0f} %."
    ),
    simulated=True,
)
