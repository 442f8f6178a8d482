"""Hugging Face decoders on packed text, with their own attention or one that asks the batch in every layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from bench.case import Parameters
from bench.cases.identity_cache import IdentityCache
from bench.cases.training import packings

ENTRIES = 8  # of `lengths`, padded with zeros: `.tolist()` is unrolled, so another number is another graph
BATCHES = 4
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig),
}
# Llama-3.2-1B and Qwen3-0.6B; a small vocabulary, because the head is not compared.
FULL: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    },
    "qwen3": {
        "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "qwen3_moe": {
        "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "moe_intermediate_size": 768, "num_experts": 64, "num_experts_per_tok": 8,
    },
}  # fmt: skip
REDUCED = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512}
REDUCED_MORE: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 512},
    "qwen3": {"intermediate_size": 384},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
}


WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8}


def new_decoder(parameters: Parameters, device: str, attention: str, **more: Any) -> nn.Module:
    """parameters: model (of KINDS), layers, width ("full", "reduced" or "1024"), dtype, and optionally checkpointed."""
    name = parameters["model"]
    kind, config = KINDS[name]
    full = parameters["width"] == "full"
    sizes = FULL[name] | {"vocab_size": 8192} if full else REDUCED | REDUCED_MORE[name]
    if parameters["width"] == "1024":
        sizes = sizes | WIDE | {"head_dim": 64}
    model = kind(
        config(**(sizes | more), num_hidden_layers=parameters["layers"], use_cache=False, attn_implementation=attention)
    )
    model = model.to(device, getattr(torch, parameters["dtype"])).train()
    if parameters.get("checkpointed"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def packed_batches(tokens: int, device: str, with_lengths: bool, rows: int = 1) -> list[dict[str, Any]]:
    """input_ids, labels, position_ids: int64 [rows, tokens / rows], each row packed; with_lengths: lengths int64
    [ENTRIES], zeros at the end, of the only row."""
    generator = torch.Generator().manual_seed(2)
    batches = []
    lengths_of = packings(rows * BATCHES, tokens // rows, ENTRIES)
    for packed in (lengths_of[start : start + rows] for start in range(0, len(lengths_of), rows)):
        ids = torch.randint(REDUCED["vocab_size"], (rows, tokens // rows), generator=generator)
        positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in packed])
        batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}
        if with_lengths:
            (lengths,) = packed
            batch["lengths"] = torch.tensor(lengths + [0] * (ENTRIES - len(lengths)))
        batches.append({key: value.to(device) for key, value in batch.items()})
    return batches


# Attention that asks the batch in every layer, as kernels for packed text require


def block_causal_mask(lengths: Tensor, tokens: int) -> Tensor:
    """bool [tokens, tokens]: a query (row) may attend to a key (column). It reads the batch ENTRIES + 2 times."""
    torch._check(lengths.sum().item() == tokens)
    longest = lengths.max().item()
    position = torch.arange(tokens, device=lengths.device)
    mask = torch.zeros(tokens, tokens, dtype=torch.bool, device=lengths.device)
    start = 0
    for length in lengths.tolist():
        document = (position >= start) & (position < start + length)
        mask |= document[:, None] & document
        start += length
    distance = position[:, None] - position
    return mask.logical_and_((distance >= 0) & (distance < longest))


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """query [1, heads, tokens, width], key and value [1, kv_heads, tokens, width] -> [1, tokens, heads, width]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling).transpose(1, 2)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lengths: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers passes arguments that `model(...)` does not know to this function by name, as `lengths`."""
    return attend(module, query, key, value, block_causal_mask(lengths, query.shape[2]), scaling), None


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lengths: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    return attend(module, query, key, value, _cache(lengths, query.shape[2]), scaling), None


_cache = IdentityCache(block_causal_mask)  # one process runs one model
AttentionInterface.register("bench_packed", packed_attention)
AttentionInterface.register("bench_cached", cached_attention)


# Experts as a loop


def looped_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The loop that stock PyTorch captures; weights as in transformers: [E, 2 * width, hidden], [E, hidden, width]."""
    out = torch.zeros_like(hidden_states)
    for e in range(module.num_experts):
        token, slot = torch.where(top_k_index == e)
        gate, up = F.linear(hidden_states[token], module.gate_up_proj[e]).chunk(2, dim=-1)
        rows = F.linear(F.silu(gate) * up, module.down_proj[e])
        out.index_add_(0, token, rows * top_k_weights[token, slot, None])
    return out


ALL_EXPERTS_FUNCTIONS.register("bench_loop", looped_experts)
