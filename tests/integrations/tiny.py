"""A model, a tokenizer and text for the trainers of TRL: random, small, and made in memory."""

from __future__ import annotations

import random
import string
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = list(string.ascii_lowercase)
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def tokenizer() -> Any:
    """One token per letter that stands alone."""
    vocabulary = {word: number for number, word in enumerate([*_SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def model(layers: int = 1) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def text(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))
