"""Steps that Inductor records as CUDA graphs: a decoder so small that launching its kernels takes the time."""

from __future__ import annotations

from typing import Any

from bench.case import Case, Parameters
from bench.cases.compilers import EAGER, contender, fastpack, inductor_with_flags, usual
from bench.cases.packed_metadata import build

MODE = "reduce-overhead"
STOCK_RECORDED, RECORDED = "Inductor, both flags, CUDA graphs", "fastpack, CUDA graphs"


def inductor_recorded(model: Any) -> Any:
    return inductor_with_flags(model, mode=MODE)


def fastpack_recorded(model: Any) -> Any:
    return fastpack(model, mode=MODE)


def only_on_cuda(parameters: Parameters, device: str) -> str:
    return "" if device == "cuda" else "a CPU has no CUDA graphs"


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    dtype = "bfloat16" if device == "cuda" else "float32"
    return [
        {"model": "llama", "layers": layers, "tokens": 256, "width": "reduced", "dtype": dtype}
        for layers in ([2] if quick else [2, 8])
    ]


CASE = Case(
    name="cuda_graphs",
    title="CUDA graphs: a small packed decoder",
    groups=groups,
    contenders=[
        *usual(build),
        contender(STOCK_RECORDED, build, inductor_recorded, unavailable=only_on_cuda),
        contender(RECORDED, build, fastpack_recorded, ours=True, unavailable=only_on_cuda),
    ],
    baseline=EAGER,
    x="layers",
    expected=(
        "A replay launches a whole piece of a step at once. A host read in a layer ends the piece; where the batch is "
        "asked before the main graph runs, forward is one piece and backward another (docs/cuda_graphs.md)."
    ),
    notes="The model is that of packed metadata, at the reduced width, so that the device waits for the host.",
)
