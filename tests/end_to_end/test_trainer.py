"""Hugging Face's `Trainer`, its collator for packed batches and its checkpointing, with a compiled model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fxpasses.inspect
from examples.varlen_attention import install
from tests.support import reports_of

VOCABULARY = 64
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def trained(folder: Path, compiled: bool, flash_arguments: bool) -> tuple[list[float], LlamaForCausalLM]:
    """The loss of each step, and the model after the last: batches of 4 sequences, two of them to a step."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, attn_implementation=install(), **SIZES)
    model = LlamaForCausalLM(config)
    if compiled:
        model.compile(backend="fastpack", options={"fastpack.lowering": "aot_eager", "fastpack.strict": True})
    lengths = torch.randint(4, 12, (24,)).tolist()
    texts = [{"input_ids": torch.randint(0, VOCABULARY, (length,)).tolist()} for length in lengths]
    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1,
        activation_checkpointing=True, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash_arguments)
    trainer = Trainer(model, arguments, collator, texts)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


@pytest.mark.parametrize(
    "flash_arguments",
    [pytest.param(False, id="position_ids alone"), pytest.param(True, id="lengths given", marks=pytest.mark.slow)],
)
def test_trainer_trains_as_in_eager_mode(tmp_path: Path, flash_arguments: bool) -> None:
    expected, model = trained(tmp_path, compiled=False, flash_arguments=flash_arguments)
    with fxpasses.inspect.record() as record:
        losses, compiled = trained(tmp_path, compiled=True, flash_arguments=flash_arguments)
    assert losses == expected and len(losses) == 3
    parameters: Any = zip(compiled.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(mine, its) for mine, its in parameters)
    assert 0 < len(record.graphs) <= 2  # the second batch has another number of tokens: one graph for all numbers
    # With lengths given the host reads nothing, and the one small mask stays in the graph.
    assert {bool(report.changes) for report in reports_of(record)} == {not flash_arguments}
