"""A Qwen3 in 4 bits with adapters, checkpoints and packed texts: one graph, and eager mode's step, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import fxpasses.inspect
from tests.support import compiled

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("capture_flags"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]

VOCABULARY, TOKENS = 64, 24


def model_of(folder: Path, bits: int, nested: bool, dtype: torch.dtype, reentrant: bool, dropout: float) -> Any:
    """The model is written and loaded, because transformers quantizes what it loads."""
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    quantized = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=dtype,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantized, dtype=dtype)
    checkpoints = {"use_reentrant": reentrant}
    model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=checkpoints)
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=dropout)
    return peft.get_peft_model(model, adapters).train()


def batch(first: int) -> dict[str, Any]:
    """Two texts in one row, of which the first has so many tokens; the first half of the row has no labels."""
    ids = torch.randint(VOCABULARY, (1, TOKENS))
    positions = torch.cat([torch.arange(first), torch.arange(TOKENS - first)])[None]
    labels = ids.masked_fill(torch.arange(TOKENS) < TOKENS // 2, -100)
    # Without `use_cache=False` transformers makes no mask from positions, and the texts attend to each other.
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "use_cache": False}


def step(program: Any, model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Loss, logits, and the gradients of the adapters."""
    torch.manual_seed(0)
    found = program(**inputs)
    found.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return {"loss": found.loss.detach(), "logits": found.logits.detach(), **gradients}


KINDS: list[Any] = [
    pytest.param({}, id="nested"),
    pytest.param({"nested": False, "dtype": torch.bfloat16}, id="bfloat16", marks=pytest.mark.slow),
    pytest.param({"reentrant": True}, id="reentrant", marks=pytest.mark.slow),
    pytest.param({"dropout": 0.1}, id="dropout", marks=pytest.mark.slow),
]


def graphs_of_eager_modes_steps(kind: dict[str, Any], folder: Path) -> int:
    """How many graphs the compiled model is, whose steps are compared with eager mode's."""
    usual = {"bits": 4, "nested": True, "dtype": torch.float32, "reentrant": False, "dropout": 0.0}
    model = model_of(folder, **usual | kind)
    assert any("bitsandbytes" in type(module).__module__ for module in model.modules())
    program = compiled(model, "aot_eager")
    batches = [batch(9), batch(15)]
    expected = [step(model, model, inputs) for inputs in batches]
    counters.clear()
    with fxpasses.inspect.record() as record:
        actual = [step(program, model, inputs) for inputs in batches]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert len(expected[0]) == 2 + 2 * 2 * 7  # each layer has 7 products, and each of them two matrices
    assert all(gradient.abs().sum() > 0 for gradient in expected[0].values())
    return len(record.graphs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_is_eager_modes_step(kind: dict[str, Any], tmp_path: Path) -> None:
    assert graphs_of_eager_modes_steps(kind, tmp_path) == 1 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*`set_` at .* writes to memory that outlives the checkpoint")
def test_eight_bits_are_eager_modes_step_in_more_graphs(tmp_path: Path) -> None:
    """bitsandbytes gives its layers their weights anew in each call, which no graph may do under a checkpoint."""
    assert graphs_of_eager_modes_steps({"bits": 8}, tmp_path) > 1
