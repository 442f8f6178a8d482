"""Case 5: everything in one model: packed text, a mixture of experts, checkpointed layers, and offload."""

from __future__ import annotations

from typing import Any

from bench.case import Case, Parameters, Program, scale
from bench.cases.compilers import EAGER, Compiler, usual
from bench.cases.offload import to_disk, to_host


def build(compiler: Compiler, parameters: Parameters, device: str) -> Program:
    from bench.cases.decoders import new_decoder, packed_batches
    from bench.cases.training import training_program

    model = new_decoder(parameters, device, "bench_packed", experts_implementation="bench_loop")
    compiled = compiler(model)
    batches = packed_batches(parameters["tokens"], device, with_lengths=True)
    return training_program(model, lambda batch: compiled(**batch).loss, batches)


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    sizes = {"model": "qwen3_moe", "checkpointed": True, **scale(device)}
    if device == "cuda":
        return [{**sizes, "layers": 16, "tokens": 2048}]
    layers = [2] if quick else [4, 8]
    return [{**sizes, "layers": n, "tokens": 512 if quick else 2048} for n in layers]


CASE = Case(
    name="all_together",
    title="All together: a packed mixture-of-experts decoder with checkpointed layers",
    groups=groups,
    contenders=[
        *usual(build),
        to_host("fastpack, to host", build),
        to_disk("fastpack, to disk", build),
    ],
    baseline=EAGER,
    x="layers",
    expected=(
        "In each layer, and again in its recomputation, the batch is asked and each expert asks the router. If the "
        "batch is asked once and each layer sorts once, no layer waits for an answer, and copies of activations can "
        "run ahead."
    ),
    notes=(
        "At the reduced width an expert's products take little time, and nothing waits for a device on a CPU: there "
        "the loop that stock Inductor captures with both flags costs less than the grouped operators, which are called "
        "from Python. The profile shows them as the self time of `fxpasses::grouped_mm`, `grouped_outer`, "
        "`gather_rows`, `aten::index_select`, and in `aten::mm`. A loop over the groups in C++ would change that; so "
        "do more experts (the case `experts`), and a device, on which each of the loop's host reads is a wait."
    ),
)
