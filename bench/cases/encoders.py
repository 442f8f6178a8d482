"""A Hugging Face encoder that classifies padded texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

TEXTS = 8


def classifier(layers: int, tokens: int, device: str) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The model, and batches of `TEXTS` texts, or more of at most 512 tokens, padded to `tokens` tokens in all."""
    texts = max(TEXTS, tokens // 512)
    config = BertConfig(
        vocab_size=512, hidden_size=128, intermediate_size=512, num_attention_heads=4, num_hidden_layers=layers,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=512,
    )  # fmt: skip
    generator, batches = torch.Generator().manual_seed(2), []
    for _ in range(4):
        ids = torch.randint(512, (texts, tokens // texts), generator=generator)
        lengths = torch.randint(ids.shape[1] // 4, ids.shape[1], (texts, 1), generator=generator)
        mask = (torch.arange(ids.shape[1]) < lengths).long()
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2})
    return BertForSequenceClassification(config).to(device).train(), batches
