"""Case 1: attention that asks a packed batch the same questions, and builds the same mask, in every layer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.benchmark import Timer

from bench.case import Case, Parameters, Program, scale
from bench.cases.compilers import EAGER, OURS, STOCK_FLAGS, Compiler, contender, eager, usual
from bench.results import find

CACHED = "eager, cached by identity"
STALLS = 20  # the time is their mean


def build(compiler: Compiler, parameters: Parameters, device: str, attention: str = "bench_packed") -> Program:
    from bench.cases.decoders import block_causal_mask, new_decoder, packed_batches
    from bench.cases.training import training_program

    model = new_decoder(parameters, device, attention)
    compiled = compiler(model)
    tokens = parameters["tokens"]
    batches = packed_batches(tokens, device, with_lengths=True)

    def figures() -> dict[str, float]:
        ask = Timer(
            "ask(lengths, tokens)",
            globals={"ask": block_causal_mask, "lengths": batches[0]["lengths"], "tokens": tokens},
            num_threads=torch.get_num_threads(),
        )
        return {"stall_s": ask.timeit(STALLS).median} if compiler is eager else {}

    return training_program(model, lambda batch: compiled(**batch).loss, batches, figures)


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    if quick:
        return [{"model": "llama", "layers": 4, "tokens": 512, **scale(device)}]
    sizes = [("llama", 4), ("llama", 16), ("qwen3", 28)]
    return [{"model": model, "layers": layers, "tokens": 2048, **scale(device)} for model, layers in sizes]


def arithmetic(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """T_saved against (L - 1) * s, where s is the time of one layer's questions and mask alone."""
    rows = []
    for entry in entries:
        if entry["contender"] != EAGER or entry["outcome"] != "measured":
            continue
        parameters, stall = entry["parameters"], entry["figures"]["stall_s"]
        expected = (parameters["layers"] - 1) * stall
        row = {"model": parameters["model"], "L": parameters["layers"], "s, ms": 1e3 * stall}
        row["(L−1)·s, ms"] = 1e3 * expected
        for name, before in ((CACHED, EAGER), (OURS, STOCK_FLAGS)):
            base, after = ((find(entries, parameters, wanted) or {}).get("median_s") for wanted in (before, name))
            saved = 1e3 * (base - after) if base and after else None
            row[f"saved by {name} against {before}, ms"] = saved
        rows.append(row)
    return rows


CASE = Case(
    name="packed_metadata",
    title="Packed metadata: `max().item()`, `sum().item()`, `tolist()` and a mask in every layer",
    groups=groups,
    contenders=[
        *usual(build),
        contender(CACHED, functools.partial(build, attention="bench_cached"), eager),
    ],
    baseline=EAGER,
    x="layers",
    expected=(
        "A model of L layers asks its batch L times; once is enough. If one layer's questions and mask take the time "
        "s, T_saved ≈ (L−1)·s. On a CPU nothing waits for a device: s is the work of building the mask and reading the "
        "lengths. On CUDA s also includes the wait for everything that was launched before."
    ),
    arithmetic=arithmetic,
    notes=(
        "The cache by identity is what a library does by hand in its own models; here it is the eager model with a "
        "mask that is kept for the last `lengths` tensor. An eager `.tolist()` of a CPU tensor does not show in a "
        "profile, so eager mode on a CPU reads more than is counted. In a graph without breaks and checkpoints "
        "AOTAutograd merges the identical masks of all layers, so stock Inductor with both flags builds the mask once, "
        "too, and fuses it with attention's conversion to floats. The prologue of fastpack is compiled as well if it "
        "is large enough, and writes the boolean mask that the main graph then reads: where nothing waits for a "
        "device, that write is its extra cost."
    ),
)
