"""PEFT's adapters under checkpoints, and TRL's fused head: one graph each, and eager mode's step, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fxpasses.inspect
from fxpasses.inspect import Record
from tests.support import compiled, events

trl_utils = pytest.importorskip("trl.trainer.utils")
LoraConfig, get_peft_model = (getattr(pytest.importorskip("peft"), name) for name in ("LoraConfig", "get_peft_model"))
transformers = pytest.importorskip("transformers")
LlamaConfig, LlamaForCausalLM = transformers.LlamaConfig, transformers.LlamaForCausalLM

pytestmark = [
    pytest.mark.usefixtures("capture_flags"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]

VOCABULARY = 64


def models_of(adapted: bool, reentrant: bool = False) -> tuple[Any, Any]:
    return model_of(adapted, reentrant), model_of(adapted, reentrant)


def model_of(adapted: bool, reentrant: bool) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    trl_utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if adapted:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if adapted or reentrant:
        model.enable_input_require_grads()
    return model


def batch(columns: int, masked: int) -> dict[str, Tensor]:
    torch.manual_seed(columns)
    ids = torch.randint(0, VOCABULARY, (2, columns))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(columns) < masked, -100)}


def step(program: Any, model: Any, inputs: dict[str, Tensor], **arguments: Any) -> list[Any]:
    found = program(**inputs, **arguments)
    found.loss.backward()
    results = [found.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)]
    model.zero_grad()
    return results


def assert_same_steps(models: Any, batches: list[dict[str, Tensor]], **arguments: Any) -> tuple[Any, Record]:
    """models: two equal ones. TRL's head is a bound method, which a copy of the model would share."""
    model, eager = models
    program = compiled(model, "aot_eager")
    with fxpasses.inspect.record() as record:
        for inputs in batches:
            actual, expected = step(program, model, inputs, **arguments), step(eager, eager, inputs, **arguments)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    return program, record


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("adapted", "reentrant"),
    [
        pytest.param(True, False, id="LoRA"),
        pytest.param(True, True, id="LoRA, reentrant", marks=pytest.mark.slow),
        pytest.param(False, False, id="all parameters", marks=pytest.mark.slow),
        pytest.param(False, True, id="all parameters, reentrant"),
    ],
)
def test_checkpoints_whose_inputs_require_gradients(adapted: bool, reentrant: bool) -> None:
    _, record = assert_same_steps(models_of(adapted, reentrant), [batch(12, 0)])
    assert len(record.graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [True, False], ids=["LoRA", "all parameters"])
def test_the_fused_head_is_one_graph_for_all_lengths(adapted: bool) -> None:
    batches = [batch(12, 3), batch(12, 5), batch(16, 4), batch(10, 9)]
    _, record = assert_same_steps(models_of(adapted), batches, fused_lm_head=True)
    assert len(record.graphs) == 2  # the second for all lengths


@pytest.mark.slow
def test_the_fused_head_on_valid_positions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it runs where Triton does."""
    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: True)
    models, batches = models_of(True), [batch(12, 3), batch(12, 5), batch(16, 4), batch(10, 9)]
    program, record = assert_same_steps(models, batches, fused_lm_head=True)
    assert len(record.graphs) == 2
    assert all("nonzero" in str(graph.reports) for graph in record.graphs)
    (model, _), inputs = models, batch(12, 3)
    step(program, model, inputs, fused_lm_head=True)
    assert not any("nonzero" in name for name in events(lambda: step(program, model, inputs, fused_lm_head=True)))


def test_a_model_that_is_compiled_before_peft_wraps_it() -> None:
    def adapted(compiles: bool) -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            use_cache=False,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        if compiles:
            model.compile(backend=fxpasses.fastpack_backend, options={"fastpack.lowering": "aot_eager"})
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))

    model, eager = adapted(True), adapted(False)
    with fxpasses.inspect.record() as record:
        actual, expected = step(model, model, batch(8, 2)), step(eager, eager, batch(8, 2))
    torch.testing.assert_close(actual, expected)
    assert len(record.graphs) == 1
