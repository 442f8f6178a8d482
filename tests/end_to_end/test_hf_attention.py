"""Hugging Face's attention, on packed and padded batches: what its masks rule out is not computed, and numbers stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxpasses.inspect
from fxpasses.report import Reason
from tests.support import compiled, reports_of, thorough

transformers = pytest.importorskip("transformers")

TOKENS, VOCABULARY, WINDOW = 512, 64, 100
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DECODER: dict[str, Any] = {"num_key_value_heads": 2, "use_cache": False}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**DECODER, "head_dim": 8}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**DECODER, "sliding_window": WINDOW}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {
        **DECODER, "head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", {
        "local_attention": WINDOW, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2,
    }),
    "bert": ("BertConfig", "BertForMaskedLM", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 1, "num_decoder_layers": 1,
        "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False,
    }),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {
        **DECODER, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": WINDOW,
    }),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**DECODER, "head_dim": 8, "sliding_window": WINDOW}),
}  # fmt: skip
NO_EFFECT = 1e-6  # gradients under it are rounding: softmax does not see the bias of BERT's keys
DECODERS = ("llama", "qwen3", "mistral", "gemma3")
MASKS = {"gemma3": 2, "modernbert": 2}


def model_of(name: str, implementation: str, checkpointed: bool = False) -> torch.nn.Module:
    config, model, sizes = MODELS[name]
    torch.manual_seed(0)
    configured = getattr(transformers, config)(**{**SIZES, **sizes}, attn_implementation=implementation)
    found = getattr(transformers, model)(configured).train()
    if checkpointed:
        found.gradient_checkpointing_enable({"use_reentrant": False})
    return found


def packed(seed: int) -> dict[str, torch.Tensor]:
    """Six documents of random lengths, told by positions that start again."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=random)
    cuts = torch.randperm(TOKENS - 1, generator=random)[:5].add(1).sort().values
    lengths = torch.cat([cuts, torch.tensor([TOKENS])]).diff(prepend=torch.tensor([0])).tolist()
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1).contiguous()
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


def padded(seed: int) -> dict[str, torch.Tensor]:
    """Two rows, the shorter one padded: on the left for an odd seed, where rows of padding see nothing."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (2, TOKENS), generator=random)
    mask = torch.ones_like(ids)
    length = int(torch.randint(100, 400, (), generator=random))
    mask[0, slice(length) if seed % 2 else slice(-length, None)] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(model: Any, program: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = program(**batch)
    out.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **gradients}


def check(name: str, implementation: str, make: Any, checkpointed: bool = False) -> Any:
    """Three batches: right to 1e-5 of eager mode, in one graph; returns the pass's report."""
    model = model_of(name, implementation, checkpointed)
    program = compiled(model, "aot_eager")
    with fxpasses.inspect.record() as record:
        for seed in range(3):
            batch = make(seed)
            expected = step(model, model, batch)
            for key, value in step(model, program, batch).items():
                size = max(expected[key].abs().max().item(), NO_EFFECT)
                torch.testing.assert_close(
                    value, expected[key], rtol=0, atol=1e-5 * size, msg=lambda m, k=key: f"{k}: {m}"
                )
    assert len(record.graphs) == 1
    [report] = reports_of(record, "sparsify_attention")
    return report


CASES = [(name, make) for name in DECODERS for make in (packed, padded)] + [(n, padded) for n in ("modernbert", "bert")]
QUICK = [("llama", "sdpa", packed), ("gemma3", "eager", padded), ("modernbert", "sdpa", padded)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "implementation", "make"), QUICK)
def test_a_plan_for_each_mask(name, implementation, make):
    assert check(name, implementation, make).figures == {"attentions": 2, "masks": MASKS.get(name, 1)}


def test_in_checkpoints():
    assert check("llama", "eager", packed, checkpointed=True).figures == {"attentions": 2, "masks": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "checkpointed"),
    [
        ("sdpa", False),
        ("eager", True),
        *(pytest.param(*way, marks=thorough) for way in [("sdpa", True), ("eager", False)]),
    ],
)
@pytest.mark.parametrize(("name", "make"), CASES)
def test_every_model(name, make, implementation, checkpointed):
    report = check(name, implementation, make, checkpointed)
    assert report.figures == {"attentions": 2, "masks": MASKS.get(name, 1)} and not report.refusals


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_changed_scores_are_refused(name):
    """A sink beside the scores; scores under tanh."""
    report = check(name, "eager", packed)
    assert not report.changed and {refusal.reason for refusal in report.refusals} == {Reason.SCORES_CHANGED}


@thorough
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_bias_of_relative_positions_is_refused(implementation):
    """Encoder and decoder of T5; the decoder looks at the encoder's tokens through the padding mask alone."""
    report = check("t5", implementation, padded)
    reasons = {refusal.reason for refusal in report.refusals}
    if implementation == "sdpa":
        assert reasons == {Reason.PARAMETER} and report.figures["masks"] == 1
    else:  # there the decoder adds a bias of zeros too
        assert reasons == {Reason.PARAMETER, Reason.SCORES_CHANGED} and not report.changed


def test_weights_that_are_returned():
    model = model_of("llama", "eager")
    with fxpasses.inspect.record() as record:
        compiled(model, "aot_eager")(**packed(0), output_attentions=True)
    reports = reports_of(record, "sparsify_attention")
    assert {refusal.reason for report in reports for refusal in report.refusals} == {Reason.WEIGHTS_USED}
