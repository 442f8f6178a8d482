"""A small transformer, whose parts are spelled in several ways, and batches of padded and labelled text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, VOCABULARY, TOKENS = 16, 2, 23, 12

Exit = Callable[["Model", Tensor, Tensor, Tensor], Any]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, 1, 2 * TOKENS))

    def forward(self, x: Tensor, mask: Tensor | None, is_causal: bool, spelling: str = "fused") -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return self._after(x, parts, mask, is_causal, spelling)

    def across(self, x: Tensor, mask: Tensor, text: Tensor, spelling: str) -> Tensor:
        """Attention of x to another text."""
        q = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))[:, :, 0]
        _, k, v = self.qkv(text).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return self._after(x, (q, k, v), mask, False, spelling)

    def _after(self, x: Tensor, parts: Any, mask: Tensor | None, is_causal: bool, spelling: str) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in parts)
        y = ATTENTIONS[spelling](q, k, v, mask, is_causal, self.bias[..., : k.shape[2]])
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.silu(self.up(x)))


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, _: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)


def additive(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, _: Tensor) -> Tensor:
    # In the dtype of the queries: eager mode's kernel takes a float32 mask of float64 queries for a float64 one.
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(mask, 0.0, LEAST).to(q.dtype))


def written(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, _: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3 + torch.where(mask, 0.0, LEAST)
    return torch.matmul(scores.softmax(-1), v)


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, _: Tensor) -> Tensor:
    return (torch.matmul(q / 2, k.mT).masked_fill(~mask, LEAST).softmax(-1)) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, _: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
    weights = torch.where(mask, scores, LEAST).softmax(-1)
    return torch.einsum("bhqk,bhkd->bqhd", weights, v).transpose(1, 2)


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, _: Tensor) -> Tensor:
    """As Gemma 2."""
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) / 2) * 2
    weights = (scores + torch.where(mask, 0.0, LEAST)).softmax(-1)
    return torch.matmul(F.dropout(weights, 0.3), v)


def biased(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    """As T5, by the operator."""
    biases = torch.where(mask, bias[None].expand(q.shape[0], -1, q.shape[2], -1), LEAST)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=biases)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    """As GPT-OSS."""
    scores = torch.matmul(q, k.mT) + torch.where(mask, 0.0, LEAST)
    sinks = bias[None, ..., :1].expand(q.shape[0], -1, q.shape[2], -1)
    logits = torch.cat([scores, sinks], -1)
    weights = (logits - logits.max(-1, keepdim=True).values).softmax(-1)
    return torch.matmul(weights[..., :-1], v)


def filled_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    """As Flaubert: what the operator in place returns is not used."""
    scores = torch.matmul(q, k.mT).add_(bias)
    scores.masked_fill_(~mask.expand_as(scores), LEAST)
    return torch.matmul(scores.double().softmax(-1).type_as(scores), v)


def dropped(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, _: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.2)


def by_groups(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    """As BLOOM and TrOCR: heads of all texts are one dimension."""
    batch, heads, *_ = q.shape
    q, k, v = (part.reshape(batch * heads, -1, part.shape[-1]).tanh() for part in (q, k, v))
    scores = bias.repeat(batch, 1, 1).baddbmm(q, k.transpose(1, 2), beta=0.5, alpha=0.3)
    scores = scores.view(batch, heads, q.shape[1], k.shape[1]) + torch.where(mask, 0.0, LEAST)
    weights = (scores + bias).view(batch * heads, q.shape[1], k.shape[1]).softmax(-1)
    return torch.bmm(weights, v).view(batch, heads, q.shape[1], -1)


def alike_for_texts(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    """Groups with one mask for all texts, which hides what is later, and one for each group."""
    batch, heads, *_ = q.shape
    q, k, v = (part.flatten(0, 1) for part in (q, k, v))
    own = mask.expand(-1, heads, -1, -1).flatten(0, 1)
    later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    scores = torch.bmm(q, k.mT).masked_fill(later, LEAST).masked_fill(~own, LEAST)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (batch, heads))


def of_two(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    """As LiLT and xGLM: scores of two products, not less than the least; as CPM-Ant: weights that are filled."""
    scores = torch.matmul(q, k.mT) + bias + torch.where(mask, 0.0, LEAST) + torch.matmul(q.sin(), k.cos().mT)
    weights = torch.max(scores, torch.tensor(LEAST)).softmax(-1)
    return torch.matmul(weights.masked_fill(~mask, 0), v)


def with_scaled_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, bias: Tensor) -> Tensor:
    """As Granite, by the logarithm of the sum; and as LayoutLM, stabilized."""
    scores = torch.matmul(q, k.mT) + torch.where(mask, 0.0, LEAST)
    scale = (scores.logsumexp(-1) - bias[None, ..., 0]).sigmoid()
    weights = ((scores / 4 - (scores / 4).amax(dim=(-1)).unsqueeze(-1)) * 4).softmax(-1)
    return torch.matmul(weights, v) * scale.unsqueeze(-1)


LEAST = torch.finfo(torch.float32).min
ATTENTIONS: dict[str, Any] = {
    "fused": fused,
    "additive": additive,
    "written": written,
    "filled": filled,
    "einsum": einsum,
    "capped": capped,
    "biased": biased,
    "with_sinks": with_sinks,
    "dropped": dropped,
    "filled_in_place": filled_in_place,
    "by_groups": by_groups,
    "alike_for_texts": alike_for_texts,
    "of_two": of_two,
    "with_scaled_sinks": with_scaled_sinks,
}


class Model(nn.Module):
    """exit: what becomes of the last layer's rows. attention: "padding", "causal" or "both"."""

    def __init__(self, exit: Exit, attention: str = "both", checkpoints: bool = False, spelling: str = "fused") -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.exit, self.attention, self.checkpoints, self.spelling = exit, attention, checkpoints, spelling

    def forward(self, ids: Tensor, seen: Tensor, labels: Tensor) -> Any:
        tokens = ids.shape[1]
        mask = seen.bool()[:, None, None].expand(-1, 1, tokens, -1)
        if self.attention == "both":
            mask = mask & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        x = self.embedding(ids) + self.positions(torch.arange(tokens))
        for layer in self.layers:
            arguments: Any = (x, None, True) if self.attention == "causal" else (x, mask, False, self.spelling)
            x = checkpoint(layer, *arguments, use_reentrant=False) if self.checkpoints else layer(*arguments)
        return self.exit(self, x, seen, labels)


class Translation(Model):
    """An encoder, and a decoder that attends to it."""

    def forward(self, ids: Tensor, seen: Tensor, labels: Tensor, source: Tensor, source_seen: Tensor) -> Any:  # type: ignore[override]
        y, x = self.embedding(source), self.embedding(ids)
        encoder, decoder = self.layers
        keys = source_seen.bool()[:, None, None]
        y = encoder(y, keys.expand(-1, 1, y.shape[1], -1), False, self.spelling)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for _ in range(2):
            x = decoder(x, seen.bool()[:, None, None] & causal, False, self.spelling)
            x = decoder.across(x, keys.expand(-1, 1, x.shape[1], -1), y, self.spelling)
        return self.exit(self, x, seen, labels)


def batch(*lengths: int, tokens: int = TOKENS, left: bool = False, labelled: float = 0.4) -> tuple[Tensor, ...]:
    """ids, seen and labels, int64 [B, T]; the last part of each text is labelled."""
    ids, seen = (torch.zeros(len(lengths), tokens, dtype=torch.int64) for _ in range(2))
    labels = torch.full_like(ids, -100)
    for row, length in enumerate(lengths):
        own = slice(tokens - length, tokens) if left else slice(0, length)
        ids[row, own], seen[row, own] = torch.randint(1, VOCABULARY, (length,)), 1
        labels[row, own.start + round(length * (1 - labelled)) : own.stop] = 3
    return ids, seen, labels
