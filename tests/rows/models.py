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

    def forward(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        batch, tokens = x.shape[:2]
        parts = self.qkv(self.norm(x)).view(batch, tokens, 3, HEADS, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(F.silu(self.up(x)))


class Model(nn.Module):
    """exit: what becomes of the last layer's rows. attention: "padding", "causal" or "both"."""

    def __init__(self, exit: Exit, attention: str = "both", checkpoints: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.exit, self.attention, self.checkpoints = exit, attention, checkpoints

    def forward(self, ids: Tensor, seen: Tensor, labels: Tensor) -> Any:
        tokens = ids.shape[1]
        mask = seen.bool()[:, None, None].expand(-1, 1, tokens, -1)
        if self.attention == "both":
            mask = mask & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        x = self.embedding(ids) + self.positions(torch.arange(tokens))
        for layer in self.layers:
            arguments = (x, None, True) if self.attention == "causal" else (x, mask, False)
            x = checkpoint(layer, *arguments, use_reentrant=False) if self.checkpoints else layer(*arguments)
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
