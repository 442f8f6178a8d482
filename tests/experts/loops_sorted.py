"""Loops over rows that are sorted by expert first, and cut by counts: as in `loops.py`, to [T, H]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.experts.models import Moe


def split_counts(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    flat = idx.view(-1)
    counts = torch.histc(flat.float(), bins=moe.count, min=0, max=moe.count - 1).long()
    order = torch.argsort(flat, stable=True)
    tok = order // idx.shape[1]
    parts = torch.split(x[tok], counts.tolist(), dim=0)
    y = torch.cat([moe.experts(e, part) for e, part in enumerate(parts)], dim=0)
    y = y * weights.view(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).scatter_add(0, tok.reshape(-1, 1).expand(-1, x.shape[1]), y)


def split_bincount(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    scores, order = torch.sort(idx.flatten(), stable=True)
    counts = torch.bincount(scores, minlength=moe.count).tolist()
    tok = order.div(idx.shape[1], rounding_mode="trunc")
    y = torch.cat([moe.experts(e, part) for e, part in enumerate(x[tok].split(counts, dim=0))])
    return torch.zeros_like(x).index_add(0, tok, y * weights.flatten()[order, None])


def split_one_hot_counts(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    counts = torch.zeros(idx.shape[0], moe.count, dtype=torch.long).scatter(1, idx, 1).sum(0).tolist()
    _, order = idx.flatten().sort(dim=0, stable=True)
    tok = order.div(idx.shape[1], rounding_mode="trunc")
    rows = list(x[tok].split(counts, dim=0))
    y = torch.cat([moe.experts(e, rows[e]) for e in moe.local], dim=0) * weights.flatten()[order][:, None]
    return torch.zeros(x.shape, dtype=y.dtype).index_add(0, tok, y)


def slices_of_counts(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    flat, top = idx.flatten(), idx.shape[1]
    order = flat.argsort(stable=True)
    rows = x[order // top]
    y, start = torch.zeros_like(rows), 0
    for e, count in enumerate(F.one_hot(flat, moe.count).sum(0).tolist()):
        y[start : start + count] = moe.experts(e, rows[start : start + count])
        start += count
    back = torch.empty_like(y)
    back[order] = y
    return (back.view(*idx.shape, -1) * weights.unsqueeze(-1)).sum(1)


def slices_of_offsets(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    ids, order = torch.sort(idx.flatten(), stable=True)
    ends = torch.searchsorted(ids, torch.arange(moe.count), right=True).tolist()
    tok, scores = order // idx.shape[1], weights.flatten()[order]
    out = torch.zeros_like(x)
    for e in moe.local:
        start = ends[e - 1] if e > 0 else 0
        own = tok[start : ends[e]]
        out.index_add_(0, own, moe.experts(e, x[own]) * scores[start : ends[e], None])
    return out


def padded_split(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    flat = idx.view(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(moe.count, dtype=torch.long).scatter_add(0, flat, torch.ones_like(flat)).tolist()
    tok = order // idx.shape[1]
    rows = torch.cat([x[tok], x.new_zeros(3, x.shape[1])])
    parts = torch.split(rows[: sum(counts)], counts, dim=0)
    y = torch.cat([moe.experts(e, part) for e, part in enumerate(parts)], dim=0)
    y = torch.vstack((y, y.new_zeros((rows.shape[0] - sum(counts), y.shape[-1]))))[: tok.shape[0]]
    return torch.zeros_like(x).index_add(0, tok, y * weights.view(-1)[order].unsqueeze(1))


def concatenated_then_unsorted(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    parts, pairs = [], []
    for e in moe.local:
        (own,) = torch.where(idx.flatten() == e)
        parts.append(moe.experts(e, x[own // idx.shape[1]]))
        pairs.append(own)
    order, y = torch.cat(pairs), torch.cat(parts)
    y = y[torch.argsort(order)].view(*idx.shape, -1)
    return (y * weights.unsqueeze(-1)).sum(1)


# Loops that skip experts without tokens


def moe_infer(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    counts = idx.new_zeros((idx.shape[0], moe.count))
    counts.scatter_(1, idx, 1)
    per_expert = counts.sum(dim=0)
    order = idx.view(-1).argsort()
    rows = x[order // idx.shape[1]]
    outputs, start = [], 0
    for e, count in enumerate(per_expert.cpu().numpy()):
        end = start + count
        if count == 0:
            continue
        outputs.append(moe.experts(e, rows[start:end]))
        start = end
    outs = torch.cat(outputs, dim=0) if len(outputs) else rows.new_empty(0)
    new = torch.empty_like(outs)
    new[order] = outs
    return new.view(*idx.shape, -1).type(weights.dtype).mul(weights.unsqueeze(dim=-1)).sum(dim=1).type(new.dtype)


def numpy_ends(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    flat, scores = idx.view(-1), weights.view(-1, 1)
    cache = torch.zeros_like(x)
    order = flat.argsort(stable=True)
    ends = flat.bincount(minlength=moe.count).cpu().numpy().cumsum(0)
    tokens = order // idx.shape[1]
    for e, end in enumerate(ends):
        start = 0 if e == 0 else ends[e - 1]
        if start == end:
            continue
        own = tokens[start:end]
        y = moe.experts(e, x[own]) * scores[order[start:end]]
        cache = cache.scatter_reduce(0, own.view(-1, 1).repeat(1, x.shape[-1]), y, reduce="sum")
    return cache


def skip_count_slices(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    flat = idx.flatten()
    order = flat.argsort(stable=True)
    tok, scores = order // idx.shape[1], weights.flatten()[order]
    out, start = torch.zeros_like(x), 0
    for e, count in enumerate(flat.bincount(minlength=moe.count).tolist()):
        if count > 0:
            own = tok[start : start + count]
            out.index_add_(0, own, moe.experts(e, x[own]) * scores[start : start + count, None])
        start += count
    return out
