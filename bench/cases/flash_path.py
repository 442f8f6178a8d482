"""Case 2: Hugging Face's own flash-attention path, where `position_ids` alone says which tokens belong together."""

from __future__ import annotations

from typing import Any

from bench.case import Case, Parameters, Program, scale
from bench.cases.compilers import EAGER, OURS, STOCK, Compiler, contender, eager, inductor, ours


def build(compiler: Compiler, parameters: Parameters, device: str) -> Program:
    from bench.cases.decoders import new_decoder, packed_batches
    from bench.cases.training import training_program
    from examples.varlen_attention import install

    model = new_decoder(parameters, device, install())
    compiled = compiler(model)
    batches = packed_batches(parameters["tokens"], device, with_lengths=False)
    return training_program(model, lambda batch: compiled(**batch).loss, batches)


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    if quick:
        return [{"model": "llama", "layers": 2, "tokens": 512, "checkpointed": False, **scale(device)}]
    return [
        {"model": "llama", "layers": layers, "tokens": 2048, "checkpointed": checkpointed, **scale(device)}
        for layers, checkpointed in ((4, False), (16, False), (16, True))
    ]


CASE = Case(
    name="flash_path",
    title="Flash path: transformers' own, with `position_ids` alone",
    groups=groups,
    contenders=[
        contender(EAGER, build, eager),
        contender(STOCK, build, inductor),
        ours(OURS, build),
    ],
    baseline=EAGER,
    x="layers",
    expected=(
        "Every layer asks whether the batch is packed, where its sequences start and how long the longest is. Stock "
        "`torch.compile` breaks its graph at each question, or skips a checkpointed layer; if the batch is asked once, "
        "the model is one graph. On a CPU the attention is the operator of examples/varlen_attention.py, the same for "
        "all contenders, so what differs is the rest of the layer."
    ),
)
