"""Attention as people write it: functions of query, key, value [B, H, T, D] and what may be seen, bool [1, 1, T, T].

`FUSED` calls PyTorch's operator, `WRITTEN` writes it out; all give softmax(q · kᵀ / sqrt(D), masked) · v, [B, H, T, D].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

LEAST = torch.finfo(torch.float32).min
INF = float("inf")


def added(allowed, least=-INF, dtype=torch.float32):
    return torch.where(allowed, torch.zeros((), dtype=dtype), least)


def keywords(q, k, v, allowed):
    return F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=allowed, dropout_p=0.0, is_causal=False)


def positions(q, k, v, allowed):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed, 0.0, False)


def scaled(q, k, v, allowed):
    return F.scaled_dot_product_attention(q, k, v, allowed, scale=1 / math.sqrt(q.shape[-1]))


def overload(q, k, v, allowed):
    return torch.ops.aten.scaled_dot_product_attention(q, k, v, allowed)


def additive(q, k, v, allowed):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added(allowed))


def least_values(q, k, v, allowed):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added(allowed, LEAST))


def filled_in_place(q, k, v, allowed):
    mask = torch.zeros(q.shape[-2], k.shape[-2])
    mask[allowed[0, 0].logical_not()] = -INF
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sliced(q, k, v, allowed):
    longer = F.pad(allowed, (0, 7))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=longer[:, :, :, : k.shape[-2]])


def expanded(q, k, v, allowed):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed.expand(-1, q.shape[1], -1, -1))


def without_heads(q, k, v, allowed):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[0, 0])


def as_integers(q, k, v, allowed):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed.to(torch.int64).to(torch.bool))


def hugging_face(q, k, v, allowed):
    weights = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    weights = weights + added(allowed, LEAST)
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=True)
    return torch.matmul(weights, v).transpose(1, 2).contiguous().transpose(1, 2)


def at_sign(q, k, v, allowed):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(~allowed, -INF).softmax(-1) @ v


def least_filled(q, k, v, allowed):
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return torch.matmul(torch.softmax(torch.masked_fill(scores, allowed.logical_not(), LEAST), -1), v)


def query_scaled(q, k, v, allowed):
    scores = added(allowed) + torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
    return F.dropout(torch.softmax(scores, dim=3), 0.5, False) @ v


def gpt2(q, k, v, allowed):
    scores = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], v.size(-1) ** 0.5, dtype=q.dtype)
    scores = torch.where(allowed, scores, torch.full([], LEAST, dtype=q.dtype))
    return torch.matmul(F.softmax(scores, dim=-1).type(v.dtype), v)


def hidden_first(q, k, v, allowed):
    scores = q.shape[-1] ** -0.5 * (q @ k.transpose(2, 3))
    return torch.where(~allowed, -INF, scores).softmax(dim=-1) @ v


def in_place(q, k, v, allowed):
    scores = q @ k.transpose(2, 3)
    scores *= q.shape[-1] ** -0.5
    scores += added(allowed)
    return scores.float().softmax(-1).type_as(v) @ v


def einsum(q, k, v, allowed):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    out = torch.einsum("bhqk,bkhd->bqhd", (scores + added(allowed)).softmax(-1), v)
    return out.transpose(1, 2)


def batched(q, k, v, allowed):
    batch, heads, tokens, width = q.shape
    q, k, v = (tensor.reshape(batch * heads, tokens, width) for tensor in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) * width**-0.5 + added(allowed[0])
    return torch.bmm(F.softmax(scores, dim=-1), v).view(batch, heads, tokens, width)


def padding_in_one_row(q, k, v, allowed):
    """A mask of one row for all queries."""
    seen = allowed.any(-2, keepdim=True)
    return (q @ k.mT * q.shape[-1] ** -0.5 + added(seen, LEAST)).softmax(-1) @ v


FUSED = [
    keywords, positions, scaled, overload, additive, least_values, filled_in_place, sliced, expanded, without_heads,
    as_integers,
]  # fmt: skip
WRITTEN = [
    hugging_face, at_sign, least_filled, query_scaled, gpt2, hidden_first, in_place, einsum, batched,
    padding_in_one_row,
]  # fmt: skip
