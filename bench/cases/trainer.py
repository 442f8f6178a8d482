"""A training step of Hugging Face's Trainer, whose model returns its logits: an unmodified model and trainer."""

from __future__ import annotations

import tempfile
from typing import Any

from bench.case import Case, Parameters, Program
from bench.cases.compilers import (
    EAGER,
    STOCK,
    STOCK_FLAGS,
    Compiler,
    contender,
    eager,
    fastpack,
    inductor,
    inductor_with_flags,
    ours,
)
from bench.cases.live_rows import SIZES, SMALL, model_of, padded_batches

OURS, EXACT = "FastpackCallback", "FastpackCallback, exact outputs"


def build(compiler: Compiler, parameters: Parameters, device: str) -> Program:
    import torch
    from transformers import Trainer, TrainingArguments

    from bench.cases.training import training_program

    torch.manual_seed(0)
    model = model_of(parameters).to(getattr(torch, parameters["dtype"])).train()
    folder = tempfile.mkdtemp()
    arguments = TrainingArguments(folder, report_to=[], use_cpu=device == "cpu", disable_tqdm=True, save_strategy="no")
    trainer = Trainer(model, arguments)
    compile_in_place(model, compiler)
    prepared = trainer.accelerator.prepare(model)

    def loss_of(batch: Any) -> Any:
        return trainer.compute_loss(prepared, batch)

    return training_program(model, loss_of, padded_batches(parameters, device))


def compile_in_place(model: Any, compiler: Compiler) -> None:
    """As `model.compile(...)` does, and FastpackCallback with it."""
    if compiler is not eager:
        model._compiled_call_impl = compiler(model._call_impl)


def lazy(model: Any) -> Any:
    return fastpack(model, outputs="lazy")


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    both = {"dead": "padding and prompts", "dtype": "bfloat16" if device == "cuda" else "float32"}
    if quick:
        return [{"model": "Llama", **both, "tokens": 128, **SMALL}]
    return [
        {"model": model, **both, "tokens": 384, **SIZES, "vocabulary": columns}
        for model, columns in (("Llama", 32000), ("Qwen3", 128000))
    ]


CASE = Case(
    name="trainer",
    title="Trainer: a padded batch with prompts, and a model that returns its logits",
    groups=groups,
    contenders=[
        contender(EAGER, build, eager),
        contender(STOCK, build, inductor),
        contender(STOCK_FLAGS, build, inductor_with_flags),
        contender(OURS, build, lazy, ours=True),
        ours(EXACT, build, outputs="exact"),
    ],
    baseline=EAGER,
    x="vocabulary",
    expected="Trainer reads no logits in training, so that only rows with labels reach the head, in chunks.",
    cpu_time=True,
    notes="Forward and backward by `Trainer.compute_loss`, of models of transformers, compiled by `model.compile`.",
)
