"""Architectures of Hugging Face with their layers folded: loss and all gradients are those without, bit for bit.

Encoder-decoders are not here: their decoder's layers all use the encoder's result, several times each, so that under
`aot_eager` they are refused, and so is the rest that they leave.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxpasses.inspect
from fxpasses.inspect import Record
from fxpasses.report import Reason
from tests.support import THOROUGH, compiled, reports_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("capture_flags")

LAYERS = 6
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "pad_token_id": 0,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
GPT = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16, **EXPERTS}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 16},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 16},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16, "sliding_window_pattern": 3},
    "gpt2": GPT,
    "gpt_neox": {},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "starcoder2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {},
    "bloom": {"n_layer": LAYERS, "n_head": 4},
    "falcon_h1": {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "head_dim": 8,
        "mamba_chunk_size": 16,
    },
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"decoder_sparse_step": 2, **SHARED},
    "gpt_oss": {
        "num_local_experts": 4, "head_dim": 8, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "deepseek_v3": {
        **LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2,
        "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 2,
    },
}  # fmt: skip
MASKED: dict[str, dict[str, Any]] = {
    "bert": {},
    "albert": {"embedding_size": 16},
    "roberta": {},
    "modernbert": {
        "local_attention": 16, "global_attn_every_n_layers": 3, "cls_token_id": 1, "sep_token_id": 2,
        "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
FAST = ("llama",)  # the others take minutes together
# One of a kind each: the others are run without checkpoints where all arrangements are.
PLAIN = (*FAST, "gemma3_text", "gpt2", "falcon_h1", "qwen2_moe", "gpt_oss", "deepseek_v3", "albert", "modernbert")
Numbers = dict[str, torch.Tensor | None]


def model_of(name: str, checkpointed: bool) -> Any:
    sizes = CAUSAL.get(name, MASKED.get(name, {}))
    config = transformers.AutoConfig.for_model(name, **SIZES | sizes)
    config.use_cache = False
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM if name in CAUSAL else transformers.AutoModelForMaskedLM
    model = auto.from_config(config).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def steps(model: Any, fold: str) -> tuple[list[Numbers], Record]:
    """Loss and gradients of two steps, in training mode, so with dropout; one sequence of two is padded."""
    torch._dynamo.reset()
    ids = torch.randint(1, 96, (2, 32), generator=torch.Generator().manual_seed(1))
    attended = torch.ones_like(ids)
    attended[1, 20:] = 0
    torch.manual_seed(7)
    found: list[Numbers] = []
    with fxpasses.inspect.record() as record:
        program = compiled(model, "aot_eager", fold=fold)
        for _ in range(2):
            model.zero_grad()
            loss = program(input_ids=ids, attention_mask=attended, labels=ids).loss
            loss.backward()
            found.append({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}})
    return found, record


def assert_equal(expected: list[Numbers], actual: list[Numbers]) -> None:
    for before, after in zip(expected, actual, strict=True):
        for name, value in before.items():
            same = after[name] is None if value is None else torch.equal(value, after[name])
            assert same, name


def folded(record: Record) -> int:
    return sum(report.figures.get("layers", 0) for report in reports_of(record, "fold_layers"))


def cases() -> list[Any]:
    return [
        pytest.param(name, checkpointed, marks=[] if name in FAST and not checkpointed else pytest.mark.slow)
        for at, name in enumerate((*CAUSAL, *MASKED))
        for checkpointed in (False, True)
        if THOROUGH or (checkpointed is bool(at % 2) and at % 4 < 2) or name in FAST
        if not (name == "albert" and checkpointed)  # which has none
        if checkpointed or THOROUGH or name in PLAIN
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "checkpointed"), cases())
def test_folded_layers_give_the_same_numbers(name, checkpointed):
    expected, _ = steps(model_of(name, checkpointed), "off")
    actual, record = steps(model_of(name, checkpointed), "on")
    assert_equal(expected, actual)
    assert folded(record) >= LAYERS - 2


def encoder_decoder() -> Any:
    config = transformers.BartConfig(
        vocab_size=96, d_model=32, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0, decoder_start_token_id=0,
        max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(config).train()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_encoder_decoder_is_left_alone_where_bits_count():
    expected, _ = steps(encoder_decoder(), "off")
    actual, record = steps(encoder_decoder(), "on")
    assert_equal(expected, actual)
    refusals = [refusal.reason for report in reports_of(record, "fold_layers") for refusal in report.refusals]
    assert Reason.SUMS_REORDERED in refusals
