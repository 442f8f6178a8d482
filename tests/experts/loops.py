"""Loops that ask, for each expert, which tokens are its own: (model, x [T, H], weights [T, k], idx [T, k]) to [T, H].

Where each is met, and what is special about it, says the table in `spellings.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.experts.models import Moe


def where_pairs(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, (moe.experts(e, x[tok]) * weights[tok, slot, None]).to(out.dtype))
    return out


def where_mask_slots_first(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    mask = F.one_hot(idx, moe.count).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for e in moe.local:
        slot, tok = torch.where(mask[e])
        rows = x[None, tok].reshape(-1, x.shape[-1])
        out.index_add_(0, tok, moe.experts(e, rows) * weights[tok, slot, None])
    return out


def where_lists(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    mask = F.one_hot(idx, num_classes=moe.count).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for e in moe.local:
        slot, tok = torch.where(mask[e])
        if tok.shape[0] == 0:
            continue
        toks, slots = tok.tolist(), slot.tolist()
        rows = x[None, toks].reshape(-1, x.shape[-1])
        out.index_add_(0, tok, moe.experts(e, rows) * weights[toks, slots, None])
    return out


def where_mask_tokens_first(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    mask = F.one_hot(idx, moe.count).permute(2, 0, 1)
    out = torch.zeros_like(x)
    for e in moe.local:
        tok, slot = torch.where(mask[e])
        out.index_add_(0, tok, moe.experts(e, x[tok]) * weights[tok, slot, None])
    return out


def nonzero_tuple(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        tok, slot = (idx == e).nonzero(as_tuple=True)
        out[tok] += moe.experts(e, x[tok]) * weights[tok, slot].unsqueeze(-1)
    return out


def nonzero_columns(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        hits = (idx == e).nonzero()
        tok, slot = hits[:, 0], hits[:, 1]
        y = weights[tok, slot][:, None] * moe.experts(e, x[tok])
        out.index_put_((tok,), y, accumulate=True)
    return out


def nonzero_unbind(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        tok, slot = (idx == e).nonzero(as_tuple=False).unbind(1)
        out = out.index_add(0, tok, moe.experts(e, x.index_select(0, tok)) * weights[tok, slot, None])
    return out


def any_slot_squeeze(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        chosen = idx == e
        tok = chosen.any(-1).nonzero().squeeze(-1)
        scale = (weights * chosen).sum(-1)[tok].unsqueeze(-1)
        out.index_add_(0, tok, moe.experts(e, x[tok]) * scale)
    return out


def any_slot_flatten(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        tok = (idx == e).any(dim=-1).nonzero().flatten()
        scale = torch.where(idx[tok] == e, weights[tok], 0.0).sum(-1, keepdim=True)
        out[tok] = out[tok] + moe.experts(e, x[tok]) * scale
    return out


def bool_mask_add(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        chosen = idx == e
        mask = chosen.any(-1)
        out[mask] += moe.experts(e, x[mask]) * (weights * chosen).sum(-1)[mask].unsqueeze(-1)
    return out


def bool_mask_scores(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        chosen = idx == e
        mask = chosen.any(-1)
        out[mask] += moe.experts(e, x[mask]) * weights[chosen].unsqueeze(-1)
    return out


def bool_mask_each_slot(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for slot in range(idx.shape[1]):
        for e in moe.local:
            mask = idx[:, slot] == e
            out[mask] += weights[mask, slot, None] * moe.experts(e, x[mask])
    return out


def where_each_slot(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for slot in range(idx.shape[1]):
        for e in moe.local:
            (tok,) = torch.where(idx[:, slot] == e)
            out.index_add_(0, tok, moe.experts(e, x[tok]) * weights[tok, slot].unsqueeze(1))
    return out


def bool_mask_assign(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        mask = (idx == e).squeeze(-1)
        out[mask] = moe.experts(e, x[mask])
    return out * weights


def masked_select(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        chosen = idx == e
        mask = chosen.any(-1, keepdim=True)
        rows = torch.masked_select(x, mask).view(-1, x.shape[1])
        y = moe.experts(e, rows) * torch.masked_select(weights, chosen).unsqueeze(-1)
        out = out + torch.zeros_like(x).masked_scatter(mask, y)
    return out


def masked_select_columns(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    scores = torch.zeros(x.shape[0], moe.count, dtype=weights.dtype).scatter(1, idx, weights)
    out = torch.zeros_like(x)
    for e in moe.local:
        mask = (idx == e).any(-1)
        rows = x.masked_select(mask.unsqueeze(-1)).view(-1, x.shape[1])
        y = moe.experts(e, rows) * scores[:, e].masked_select(mask).unsqueeze(-1)
        out = out + torch.zeros_like(x).masked_scatter(mask.unsqueeze(-1), y)
    return out


def dense_scores(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    dense = torch.zeros(x.shape[0], moe.count, dtype=weights.dtype).scatter(1, idx, weights)
    out = torch.zeros_like(x)
    for e in moe.local:
        tok = torch.nonzero(dense[:, e]).squeeze(1)
        out.index_add_(0, tok, moe.experts(e, x[tok]) * dense[tok, e, None])
    return out


def dense_scores_mask(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    hot = F.one_hot(idx, moe.count)
    mask, dense = hot.sum(1).bool(), (hot * weights.unsqueeze(-1)).sum(1)
    out = torch.zeros_like(x)
    for e in moe.local:
        own = mask[..., e]
        out[own] += torch.einsum("b,be->be", dense[own, e], moe.experts(e, x[own]))
    return out


def repeated_mask(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    flat, repeated = idx.view(-1), x.repeat_interleave(idx.shape[1], dim=0)
    y = torch.empty_like(repeated)
    for e in moe.local:
        y[flat == e] = moe.experts(e, repeated[flat == e])
    return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def repeated_where(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    flat, repeated = idx.flatten(), x.unsqueeze(1).expand(-1, idx.shape[1], -1).reshape(-1, x.shape[1])
    y = torch.zeros_like(repeated)
    for e in moe.local:
        (pairs,) = torch.where(flat == e)
        y[pairs] = moe.experts(e, repeated[pairs])
    return torch.einsum("tkh,tk->th", y.view(*weights.shape, -1), weights)


def flat_pairs(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    top, flat, scores = idx.shape[1], idx.flatten(), weights.flatten()
    out = torch.zeros_like(x)
    for e in moe.local:
        pairs = (flat == e).nonzero().view(-1)
        tok = pairs // top
        out.scatter_add_(0, tok[:, None].expand(-1, x.shape[1]), moe.experts(e, x[tok]) * scores[pairs, None])
    return out


def scaled_input(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, moe.experts(e, x[tok] * weights[tok, slot, None]))
    return out


def scatter_added(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        tok, slot = torch.where(idx == e)
        y = moe.experts(e, x[tok]) * weights[tok, slot, None]
        out.scatter_add_(0, tok.unsqueeze(-1).repeat(1, x.shape[1]), y)
    return out


def gathered_in_float(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32)
    for e in moe.local:
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, moe.experts(e, x[tok]).float() * weights[tok, slot, None])
    return out.to(x.dtype)


def from_the_last(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in reversed(moe.local):
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, moe.experts(e, x[tok]) * weights[tok, slot, None])
    return out


# Loops that skip experts without tokens


def skip_numel(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        tok, slot = torch.where(idx == e)
        if tok.numel() == 0:
            continue
        out.index_add_(0, tok, moe.experts(e, x[tok]) * weights[tok, slot, None])
    return out


def skip_shape(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    mask = F.one_hot(idx, num_classes=moe.count).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for e in moe.local:
        slot, tok = torch.where(mask[e])
        if tok.shape[0] == 0:
            continue
        rows = x[None, tok].reshape(-1, x.shape[1])
        out.index_add_(0, tok, (moe.experts(e, rows) * weights[tok, slot, None]).to(x.dtype))
    return out


def skip_len(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        tok, slot = torch.where(idx == e)
        if len(tok) > 0:
            out[tok] += moe.experts(e, x[tok]) * weights[tok, slot, None]
    return out


def skip_counts(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    counts = torch.bincount(idx.flatten(), minlength=moe.count).tolist()
    for e in moe.local:
        if counts[e] == 0:
            continue
        tok, slot = torch.where(idx == e)
        out[tok] += moe.experts(e, x[tok]) * weights[tok, slot, None]
    return out


def skip_mask_any(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        chosen = idx == e
        mask = chosen.any(dim=-1)
        if mask.any():
            out[mask] += moe.experts(e, x[mask]) * (weights * chosen).sum(-1)[mask].unsqueeze(-1)
    return out


def skip_mask_sum(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    flat, repeated = idx.view(-1), x.repeat_interleave(idx.shape[1], dim=0)
    y = torch.zeros_like(repeated)
    for e in moe.local:
        mask = flat == e
        if mask.sum() == 0:
            continue
        y[mask] = moe.experts(e, repeated[mask])
    return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def hit_tensor(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(idx, num_classes=moe.count + 1).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for e in hit:
        e = e[0]
        if e == moe.count:
            continue
        slot, tok = torch.where(mask[e])
        y = moe.experts(e, x[tok]) * weights[tok, slot, None]
        out.index_add_(0, tok, y.to(out.dtype))
    return out


def hit_list(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    mask = F.one_hot(idx, num_classes=moe.count).permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero().flatten().tolist()
    out = torch.zeros_like(x)
    for e in hit:
        slot, tok = torch.where(mask[e])
        out.index_add_(0, tok, moe.experts(e, x[tok]) * weights[tok, slot, None])
    return out


def unique_tensor(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in torch.unique(idx):
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, moe.experts(e, x[tok]) * weights[tok, slot, None])
    return out


def unique_list(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in idx.unique().tolist():
        tok, slot = (idx == e).nonzero(as_tuple=True)
        out.index_add_(0, tok, moe.experts(e, x[tok]) * weights[tok, slot, None])
    return out
