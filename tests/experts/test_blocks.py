"""Blocks as published models write them, where they do more around the loop than the spellings of the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.experts.layer import EXPERTS, PAIRS, WIDTH, Layer, Loop, add_all, check, level_of, looping, written

pytestmark = pytest.mark.usefixtures("capture_flags")


def gpt_oss(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    """transformers 4: scores scattered to all experts, the query alone without gradients."""
    scores, out = torch.zeros(len(x), EXPERTS).scatter(1, idx, weights), torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(idx, EXPERTS + 1).permute(2, 1, 0)
    for e in range(EXPERTS):
        with torch.no_grad():
            _, tok = torch.where(mask[e])
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * scores[tok, e, None])
    return out


def make_moe(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    """makeMoE: a routing [B, T, k]; masks [B, T], and laid flat."""
    x = x.view(2, -1, WIDTH)
    logits = layer.gate(x)
    values, idx = logits.topk(2, dim=-1)
    gates = torch.full_like(logits, float("-inf")).scatter(-1, idx, values).softmax(-1)
    out, rows, scores = torch.zeros_like(x), x.view(-1, WIDTH), gates.view(-1, EXPERTS)
    for e in range(EXPERTS):
        mask = (idx == e).any(dim=-1)
        own = mask.view(-1)
        out[mask] += ((rows[own] @ layer.w[e]) * scores[own, e].unsqueeze(1)).squeeze(1)
    return out


def of_a_batch(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    """A routing [B, T, k] with all its coordinates."""
    x = x.view(2, -1, WIDTH)
    weights, idx = layer.gate(x).softmax(-1).topk(2, dim=-1)
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        b, t, slot = torch.where(idx == e)
        out[b, t] += (x[b, t] @ layer.w[e]) * weights[b, t, slot, None]
    return out


def switch(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    """Switch Transformer as labml writes it: the best expert alone, queries first, results assigned."""
    best, chosen = layer.gate(x).softmax(-1).max(-1)
    own = [torch.eq(chosen, e).nonzero(as_tuple=True)[0] for e in range(EXPERTS)]
    out, results = torch.zeros_like(x), [x[own[e], :] @ layer.w[e] for e in range(EXPERTS)]
    for e in range(EXPERTS):
        out[own[e], :] = results[e]
    return out * best.unsqueeze(-1)


def switch_argmax(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    scores, out = layer.gate(x).softmax(-1), torch.zeros_like(x)
    chosen = scores.argmax(dim=-1)
    for e in range(EXPERTS):
        (tok,) = torch.where(chosen == e)
        out[tok] = (x[tok] @ layer.w[e]) * scores[tok, e].unsqueeze(-1)
    return out


def balanced(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Any:
    """With Mixtral's auxiliary loss, of the masks that the loop asks."""
    mask, out = F.one_hot(idx, EXPERTS), torch.zeros_like(x)
    loss = (mask.float().mean(0) * layer.gate(x).softmax(-1).mean(0).unsqueeze(0)).sum() * EXPERTS
    mask = mask.permute(2, 1, 0)
    for e in range(EXPERTS):
        slot, tok = torch.where(mask[e])
        out.index_add_(0, tok, (x[tok] @ layer.w[e]) * weights[tok, slot, None])
    return out, loss


def dropped_by_rank(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    """Capacity: pairs beyond an expert's first three are sent to no expert."""
    hot = F.one_hot(idx, EXPERTS)
    rank = (hot.view(-1, EXPERTS).cumsum(0).view(hot.shape) * hot).sum(-1)
    return add_all(layer, x, weights, idx.masked_fill(rank > 3, EXPERTS))


def torchtitan(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    """Scores before the experts, counts by `histc` that also go into a buffer, rows padded behind the last expert."""
    flat = idx.view(-1)
    counts = torch.histc(flat.float(), bins=EXPERTS, min=0, max=EXPERTS)
    load = torch.zeros(EXPERTS)
    with torch.no_grad():
        load.add_(counts)
    order = torch.argsort(flat, stable=True)
    places = (order // 2).reshape(-1, 1).expand(-1, WIDTH)
    rows = (torch.gather(x, dim=0, index=places).float() * weights.view(-1)[order].reshape(-1, 1)).to(x.dtype)
    sizes = counts.long().tolist()
    padding = rows.shape[0] - sum(sizes)
    parts = torch.split(rows[: sum(sizes)], split_size_or_sections=sizes, dim=0)
    y = torch.cat([F.silu(part @ layer.w[e]) for e, part in enumerate(parts)], dim=0)
    y = torch.vstack((y, y.new_zeros((padding, y.shape[-1]))))
    return torch.zeros_like(x).scatter_add(dim=0, index=places, src=y) * load.sum()


def megatron(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    """Permute, a part for each expert, and back by `index_copy_`."""
    flat = idx.view(-1)
    order = flat.argsort(stable=True)
    parts = x.index_select(0, order // 2).split(flat.bincount(minlength=EXPERTS).tolist())
    y = torch.cat([part @ layer.w[e] for e, part in enumerate(parts)])
    back = torch.zeros_like(y).index_copy(0, order, y)
    return (back.reshape(-1, 2, WIDTH) * weights.unsqueeze(-1)).sum(1)


def idle_dropout(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    return F.dropout(F.dropout(x[tok], 0.0) @ layer.w[e], 0.5, training=False)


def named(*loops: Loop) -> dict[str, Loop]:
    return {loop.__name__: loop for loop in loops}


GROUPED = {
    # transformers 4: the mask of an expert is squeezed in vain.
    "qwen2_moe": written(
        "slot, tok = torch.where(mask[e].squeeze(0)); "
        "out.index_add_(0, tok, x[None, tok].reshape(-1, WIDTH) @ w[e] * weights[tok, slot, None])",
        "mask = F.one_hot(idx, EXPERTS).permute(2, 1, 0)",
    ),
    "idle_dropout": looping(idle_dropout),
    # Adapters as experts, added in place to what a shared layer gives.
    "onto_a_base": written(f"{PAIRS}; out[tok] += y", start="x @ w[0]", experts="range(1, EXPERTS)"),
    **named(gpt_oss, make_moe, of_a_batch, switch, switch_argmax, balanced, dropped_by_rank, megatron, torchtitan),
}


@pytest.mark.parametrize("name", GROUPED)
def test_blocks(name: str) -> None:
    """Up to the order in which gradients of shared inputs are summed."""
    assert level_of(check(GROUPED[name], tolerance=1e-5)) == 2


def one_addition_without_gradients(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        y = (x[tok] @ layer.w[e]) * weights[tok, slot, None]
        with torch.set_grad_enabled(e != 1):
            out.index_add_(0, tok, y)
    return out


def halves_without_gradients(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        y = x[tok] @ layer.w[e]
        with torch.no_grad():
            gate = torch.cat(y.chunk(2, dim=-1), -1)
        out = out.index_add(0, tok, y * gate * weights[tok, slot, None])
    return out


def squeezed_slots(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    """`any` over the tokens of a batch, and not over the slots."""
    x = x.view(2, -1, WIDTH)
    idx = layer.gate(x).softmax(-1).topk(2, dim=-1)[1]
    out = torch.zeros(2, 2, WIDTH)
    for e in range(EXPERTS):
        mask = (idx == e).any(1)
        out[mask] += x[:, :2][mask] @ layer.w[e]
    return out


def second_of_a_pair(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    """`argmax` over tokens, as many as there are experts or more: ids that are not known to be experts."""
    scores = layer.gate(x).softmax(-1)
    chosen, out = scores.argmax(dim=0), torch.zeros(EXPERTS, WIDTH)
    for e in range(EXPERTS):
        (row,) = torch.where(chosen == e)
        out[row] = x[row] @ layer.w[e]
    return out


LEFT = {
    "a_branch_without_gradients": written(
        "tok, slot = torch.where(idx == e)\n        with torch.no_grad(): y = x[tok] @ w[e]\n"
        "        out = out.index_add(0, tok, y * weights[tok, slot, None])"
    ),
    "active_dropout": looping(lambda layer, e, x, tok: F.dropout(x[tok] @ layer.w[e], 1.0)),
    **named(one_addition_without_gradients, halves_without_gradients, squeezed_slots, second_of_a_pair),
}


@pytest.mark.parametrize("name", LEFT)
def test_blocks_that_stay_loops(name: str) -> None:
    assert level_of(check(LEFT[name])) < 2
