"""Hugging Face's mixtures of experts with their own loop, `for expert_idx in expert_hit`: one graph, one program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxpasses
import fxpasses.inspect
from tests.support import compiled, events
from tests.zoo import tiny
from tests.zoo.architectures import architectures

transformers = pytest.importorskip("transformers")

VOCABULARY, TOKENS = 64, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4}),
    "deepseek_v3": ("DeepseekV3Config", {
        "n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 16,
    }),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 16}),
    # These do not pass over the class that is more than there are experts.
    "nemotron_h": ("NemotronHConfig", {
        "layers_block_type": ["attention", "moe"], "head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    }),
    "dbrx": ("DbrxConfig", {
        "d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    }),
}  # fmt: skip


def model_of(name: str, layers: int = 1) -> torch.nn.Module:
    config_class, sizes = MODELS[name]
    config = getattr(transformers, config_class)(**SIZES | {"num_hidden_layers": layers} | sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model.train()


def step(model: Any, program: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = program(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    # An expert without tokens has no gradient in a loop, and zeros in the grouped program.
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return {"loss": loss.detach(), **grads}


def batch(number: int, length: int = TOKENS) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(number))


def assert_same_steps(model: Any, program: Any, batches: list[torch.Tensor], bound: float = 0.0) -> None:
    """Loss and all gradients, bit for bit by default."""
    for ids in batches:
        expected = step(model, model, ids)
        for name, value in step(model, program, ids).items():
            close = {"rtol": bound, "atol": bound, "msg": lambda text, n=name: f"{n}: {text}"}
            torch.testing.assert_close(value, expected[name], **close)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MODELS)
def test_own_loop_is_one_graph(name: str) -> None:
    model = model_of(name)
    program = compiled(model, "aot_eager")
    with fxpasses.inspect.record() as record:
        assert_same_steps(model, program, [batch(0), batch(1)])
    assert len(record.graphs) == 1
    assert record.figures("group_experts")["loops_grouped"] == 1
    counts = events(lambda: step(model, program, batch(1)))
    assert counts["aten::nonzero"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name, loops", [pytest.param("longcat_flash", 4, marks=pytest.mark.slow), ("jetmoe", 8)])
def test_loops_of_other_forms(name: str, loops: int) -> None:
    """Experts that return their input; and two projections, with attention between, of rows that are cut by counts."""
    [architecture] = [each for each in architectures() if each.key == f"causal/{name}"]
    model = tiny.model(architecture, experts="eager")
    program = compiled(model, "aot_eager")
    with fxpasses.inspect.record() as record:
        assert_same_steps(model, program, [batch(0), batch(1)], bound=1e-6)  # families add gradients in another order
    assert len(record.graphs) == 1
    assert record.figures("group_experts") == {"loops_grouped": loops}
    counts = events(lambda: step(model, program, batch(1)))
    assert counts["aten::nonzero"] == 0
    assert counts["aten::_local_scalar_dense"] == counts["aten::_assert_async"]


@pytest.mark.slow
def test_with_checkpointing() -> None:
    """Two layers, each in a checkpoint, each routed in backward as in forward."""
    model = model_of("mixtral", layers=2)
    model.gradient_checkpointing_enable()
    program = compiled(model, "aot_eager")
    with fxpasses.inspect.record() as record:
        assert_same_steps(model, program, [batch(0)])
    assert len(record.graphs) == 1
    assert record.figures("group_experts")["loops_grouped"] == 2


def test_few_tokens() -> None:
    """Most experts have none."""
    model = model_of("qwen3_moe")
    program = compiled(model, "aot_eager")
    with fxpasses.inspect.record() as record:
        assert_same_steps(model, program, [batch(0, 2)])
    assert record.figures("group_experts")["loops_grouped"] == 1
