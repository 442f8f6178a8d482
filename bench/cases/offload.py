"""Case 4a: a checkpointed decoder whose activations leave memory between forward and backward."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from bench.case import Case, Contender, Parameters, Program, scale
from bench.cases.compilers import EAGER, OURS, STOCK, Build, Compiler, contender, eager, inductor, ours

MIN_BYTES = 1 << 18  # at the reduced width, what a checkpoint keeps per layer is little more


def build(compiler: Compiler, parameters: Parameters, device: str, around: str = "") -> Program:
    """around: what saves tensors on the host in eager mode, "save_on_cpu" or "torchtune"."""
    import torch

    from bench.cases.decoders import new_decoder, packed_batches
    from bench.cases.training import training_program

    model = new_decoder(parameters, device, "sdpa")
    compiled = compiler(model)
    batches = packed_batches(parameters["tokens"], device, with_lengths=False)

    def loss_of(batch: Any) -> Any:
        if around == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return compiled(**batch).loss
        if around == "torchtune":
            from torchtune.training import OffloadActivations

            with OffloadActivations():
                return compiled(**batch).loss
        return compiled(**batch).loss

    program = training_program(model, loss_of, batches)
    moves = "offload" in getattr(compiler, "keywords", {})
    return dataclasses.replace(program, figures=lambda: moved(program)) if moves else program


def moved(program: Program) -> dict[str, float]:
    """The bytes that one step moves, as fxpasses counts them."""
    import fxpasses

    fxpasses.offload_stats(reset=True)
    program.step()
    found = fxpasses.offload_stats()
    names = ("tensors_out", "bytes_out", "bytes_in", "seconds_exposed", "pool_bytes")
    return {name: getattr(found, name) for name in names}


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    sizes = {"model": "llama", "checkpointed": True, **scale(device)}
    if device == "cuda":
        return [{**sizes, "layers": 16, "tokens": 4096}]
    layers = [2] if quick else [8, 16]
    return [{**sizes, "layers": n, "tokens": 1024 if quick else 2048} for n in layers]


def only_on_cuda(parameters: Parameters, device: str) -> str:
    return "" if device == "cuda" else "it moves tensors from a device to the host, and there is none"


def needs_torchtune(parameters: Parameters, device: str) -> str:
    missing = "" if importlib.util.find_spec("torchtune") else "torchtune is not installed"
    return only_on_cuda(parameters, device) or missing


def pytorchs_offloading(model: Any) -> Any:
    """Mark the tensors that fastpack would move: PyTorch's own pass moves marked tensors.

    Private names, checked on torch 2.13: `enable_activation_offloading` and its kin, and `meta["should_offload"]`.
    """
    import torch
    from torch._functorch import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Mark(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            for node in graph.nodes:
                value = node.meta.get("val")
                if node.op == "call_function" and isinstance(value, torch.Tensor):
                    node.meta["should_offload"] = value.numel() * value.element_size() >= MIN_BYTES

        def uuid(self) -> str:
            return "fxpasses-bench-mark-1"

    config.enable_activation_offloading = True
    config.activation_offload_separate_stream = config.activation_reload_prefetch = torch.cuda.is_available()
    return torch.compile(model, options={"joint_custom_post_pass": Mark()})


def in_eager(name: str, around: str, missing: Callable[[Parameters, str], str]) -> Contender:
    return contender(name, functools.partial(build, around=around), eager, unavailable=missing)


def to_host(name: str, build: Build, **options: Any) -> Contender:
    found = ours(name, build, offload="host", offload__min_bytes=MIN_BYTES, **options)
    return dataclasses.replace(
        found, unavailable=lambda p, device: only_on_cuda(p, device) or found.unavailable(p, device)
    )


def to_disk(name: str, build: Build, **options: Any) -> Contender:
    return ours(name, build, offload="disk", offload__min_bytes=MIN_BYTES, **options)


CASE = Case(
    name="offload",
    title="Offload: what checkpoints keep, on the host or on disk between forward and backward",
    groups=groups,
    contenders=[
        contender(EAGER, build, eager),
        in_eager("eager, save_on_cpu", "save_on_cpu", only_on_cuda),
        in_eager("eager, torchtune", "torchtune", needs_torchtune),
        contender(STOCK, build, inductor),
        contender("Inductor, PyTorch's offloading", build, pytorchs_offloading, unavailable=only_on_cuda),
        ours(OURS, build),
        to_host("fastpack, to host", build),
        to_host("fastpack, to host, 1 buffer", build, offload__buffers=1),
        to_disk("fastpack, to disk", build),
        to_disk("fastpack, to disk, 1 buffer", build, offload__buffers=1),
    ],
    baseline=EAGER,
    x="layers",
    expected=(
        "With c the time to copy one layer's activation and g that of its backward, L layers take L·(c+g) with one "
        "buffer and c+(L−1)·max(c,g)+g with two: where g is not less than c, two buffers cost one copy and one wait in "
        "all. L activations of tokens × hidden numbers leave memory; the memory of a step falls by no more than that."
    ),
    notes=("On a machine without an accelerator the tier is the disk, and memory is the resident set of the process."),
    timeline=True,
)
