"""Case 4b: copies against compute. Layers that compute for longer or shorter, beside the model of the schedule."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.case import Case, Contender, Parameters, Program
from bench.cases.compilers import Compiler, fastpack, ours

NO_OFFLOAD = "no offload"
BUFFERS = {"1 buffer": 1, "2 buffers": 2}
FORWARDS = 5  # the time is their mean


def build(compiler: Compiler, parameters: Parameters, device: str) -> Program:
    import torch
    from torch.utils.benchmark import Timer

    from bench.cases.checkpointed_products import Stack
    from bench.cases.offload import moved
    from bench.cases.training import training_program

    if device == "cpu":
        slow_down(parameters["copy_mb_s"] * 1e6)
    width = parameters["width"]
    model = Stack(parameters["layers"], parameters["products"], width, lambda x: x.square().mean()).to(device)
    compiled = compiler(model)
    x = torch.randn(parameters["tokens"], width, device=device)
    program = training_program(model, lambda batch: compiled(batch["x"]), [{"x": x}])
    offloads = "offload" in compiler.keywords  # type: ignore[attr-defined]

    def figures() -> dict[str, float]:
        if not offloads:
            forward = Timer("forward(x)", globals={"forward": compiled, "x": x}, num_threads=torch.get_num_threads())
            return {"forward_s": forward.timeit(FORWARDS).median, "copy_s": copy_seconds(x, parameters["copy_mb_s"])}
        found = moved(program)
        if found["tensors_out"] != parameters["layers"]:
            raise RuntimeError(f"{found['tensors_out']} tensors were moved, not one a layer")
        return found

    return dataclasses.replace(program, figures=figures)


def slow_down(bandwidth: float) -> None:
    """Have reads and writes of the disk tier last at least as long as at `bandwidth` bytes a second, in this process.

    A copy through the page cache takes the processor that compute needs, and how long it takes is up to the machine.
    Slowed down to a bus, most of a copy is spent asleep, as it is where a device copies.
    """
    from torch import Tensor

    from fxpasses.offload.runtime.disk import UnlinkedFile

    def wrapped(move: Callable[[UnlinkedFile, Tensor], None]) -> Callable[[UnlinkedFile, Tensor], None]:
        def slow(self: UnlinkedFile, data: Tensor) -> None:
            started = time.perf_counter()
            move(self, data)
            time.sleep(max(0.0, data.numel() / bandwidth - (time.perf_counter() - started)))

        return slow

    UnlinkedFile.write = wrapped(UnlinkedFile.write)  # type: ignore[method-assign]
    UnlinkedFile.read = wrapped(UnlinkedFile.read)  # type: ignore[method-assign]


def copy_seconds(x: Any, megabytes: float) -> float:
    """c: the copy time of one layer's activation; on a device, the measured copy to pinned memory."""
    import torch
    from torch.utils.benchmark import Timer

    if not x.is_cuda:
        return float(x.numel() * x.element_size() / (megabytes * 1e6))
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return float(Timer("host.copy_(x)", globals={"host": host, "x": x}).timeit(20).median)


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    sizes = {"layers": 12, "tokens": 2048, "width": 256, "copy_mb_s": 200}
    products = [4] if quick else [1, 2, 4, 8, 16]
    if device == "cuda":
        sizes, products = {"layers": 12, "tokens": 8192, "width": 4096, "copy_mb_s": 0}, [1, 2, 4, 8, 16, 32]
    return [{"products": count, **sizes} for count in products]


def model(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Seconds of a step by contender and products, as the schedule predicts them from the run without offload."""
    from fxpasses.offload.schedule import backward_time, forward_time

    found: dict[str, dict[int, float]] = {name: {} for name in BUFFERS}
    for entry in entries:
        if entry["contender"] != NO_OFFLOAD or not entry.get("figures"):
            continue
        layers, step = entry["parameters"]["layers"], entry["median_s"]
        forward, copy = entry["figures"]["forward_s"], entry["figures"]["copy_s"]
        for name, buffers in BUFFERS.items():
            there = forward_time([copy] * layers, [forward / layers] * layers, buffers)
            back = backward_time([copy] * layers, [(step - forward) / layers] * layers, buffers)
            found[name][entry["parameters"]["products"]] = there + back
    return found


def arithmetic(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Measurement and model, by the ratio of a layer's copy time to its backward time."""
    predicted, rows = model(entries), []
    for entry in entries:
        if entry["contender"] != NO_OFFLOAD or not entry.get("figures"):
            continue
        products, figures = entry["parameters"]["products"], entry["figures"]
        backward = (entry["median_s"] - figures["forward_s"]) / entry["parameters"]["layers"]
        row = {"products": products, "c, ms": 1e3 * figures["copy_s"], "g, ms": 1e3 * backward}
        row |= {"c/g": figures["copy_s"] / backward, f"{NO_OFFLOAD}, ms": 1e3 * entry["median_s"]}
        for name in BUFFERS:
            mine = next((e for e in entries if e["contender"] == name and e["parameters"]["products"] == products), {})
            row[f"{name}, ms"] = 1e3 * mine["median_s"] if "median_s" in mine else None
            row[f"{name}, model"] = 1e3 * predicted[name][products]
        rows.append(row)
    return sorted(rows, key=lambda row: row["c/g"])


def contender(name: str, **options: Any) -> Contender:
    """All contenders run without Inductor, which makes this stack's compute too even to sweep over."""
    found = ours(name, build, lowering="aot_eager", **options)
    return dataclasses.replace(found, build=functools.partial(build_on, options))


def build_on(options: Mapping[str, Any], parameters: Parameters, device: str) -> Program:
    """The tier is the disk if there is no device to move tensors from."""
    tier = {"offload": "host" if device == "cuda" else "disk"} if "offload" in options else {}
    return build(functools.partial(fastpack, lowering="aot_eager", **{**options, **tier}), parameters, device)


CASE = Case(
    name="offload_sweep",
    title="Offload: copies against compute",
    groups=groups,
    contenders=[
        dataclasses.replace(contender(NO_OFFLOAD), ours=False),
        *(
            contender(name, offload="disk", offload__min_bytes=0, offload__keep_last=0, offload__buffers=count)
            for name, count in BUFFERS.items()
        ),
    ],
    baseline=NO_OFFLOAD,
    x="products",
    shows=("time", "step_bytes"),
    expected=(
        "The backward pass of L identical layers takes L·(c+g) with one buffer and c+(L−1)·max(c,g)+g with two. More "
        "products per layer make g longer; c stays. Dashed lines show this model, computed from the compute times of "
        "the run without offload."
    ),
    arithmetic=arithmetic,
    model=model,
    notes=(
        "On the CPU copies are slowed down to 200 MB/s, mostly by sleeping, so that they take no processor time from "
        "compute, as on a device. The case `offload` has a program that pays for its copies with compute."
    ),
)
