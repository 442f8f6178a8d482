"""Loops that look like the spellings and must not become one expert on sorted rows: each would give other numbers.

In some the branch mixes its rows, in some the branches differ, in some one branch feeds the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.experts.models import HIDDEN, WIDTH, Listed, Loop, Moe

# The branch mixes rows


Step = Callable[[Moe, int, Tensor, Tensor], Tensor]


def looping(step: Step) -> Loop:
    """An ordinary loop that adds `step(moe, e, rows, scores)`, of an expert's rows [n, HIDDEN] and scores [n, 1]."""

    def loop(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in moe.local:
            tok, slot = torch.where(idx == e)
            out.index_add_(0, tok, step(moe, e, x[tok], weights[tok, slot, None]))
        return out

    return loop


def attend(rows: Tensor) -> Tensor:
    return (rows @ rows.t() / HIDDEN**0.5).softmax(-1) @ rows


plain = looping(lambda moe, e, rows, scores: moe.experts(e, rows) * scores)  # what is wrong with it are the experts
centred_rows = looping(lambda moe, e, rows, scores: moe.experts(e, rows - rows.mean(0, keepdim=True)) * scores)
softmax_over_rows = looping(lambda moe, e, rows, scores: moe.experts(e, rows) * scores.softmax(0))
running_sum = looping(lambda moe, e, rows, scores: moe.experts(e, rows.cumsum(0)) * scores)
attends_within_expert = looping(lambda moe, e, rows, scores: moe.experts(e, attend(rows)) * scores)
flipped_rows = looping(lambda moe, e, rows, scores: moe.experts(e, rows.flip(0)) * scores)
scaled_by_load = looping(lambda moe, e, rows, scores: moe.experts(e, rows) * scores / (rows.shape[0] + 1))


class BatchNorms(Listed):
    """Normalises over the expert's tokens, and updates running statistics."""

    def expert(self, e: int) -> nn.Module:
        return nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, HIDDEN))


# Random numbers


class Dropouts(Listed):
    """Dropout on the expert's rows: other shapes draw other numbers."""

    def expert(self, e: int) -> nn.Module:
        return nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.ReLU(), nn.Dropout(0.3), nn.Linear(WIDTH, HIDDEN))


# The branches differ


class UnequalActivations(Listed):
    def expert(self, e: int) -> nn.Module:
        activation = (nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh())[e % 4]
        return nn.Sequential(nn.Linear(HIDDEN, WIDTH), activation, nn.Linear(WIDTH, HIDDEN))


unequal_constants = looping(lambda moe, e, rows, scores: moe.experts(e, rows) * (e + 1) * scores)


@looping
def one_detached(moe: Moe, e: int, rows: Tensor, scores: Tensor) -> Tensor:
    y = moe.experts(e, rows)
    return (y.detach() if e == 1 else y) * scores


def pairs(
    ask: Callable[[int, Tensor], Tensor] = lambda e, idx: idx == e,
    add: Callable[[Tensor, Tensor, Tensor], Any] = lambda out, tok, y: out.index_add_(0, tok, y),
    most: int | None = None,
) -> Loop:
    """The loop with other masks, another sum, or as many tokens of an expert as `most`."""

    def loop(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in moe.local:
            tok, slot = torch.where(ask(e, idx))
            if most is not None:
                tok, slot = tok[:most], slot[:most]
            add(out, tok, moe.experts(e, x[tok]) * weights[tok, slot, None])
        return out

    return loop


other_index = pairs(lambda e, idx: (idx if e != 2 else idx.flip(0)) == e)
overlapping = pairs(lambda e, idx: idx >= e)


# Tokens are dropped


capacity_drop = pairs(most=5)
last_expert_wins = pairs(add=lambda out, tok, y: out.index_put_((tok,), y))


# One branch feeds the next


def writes_its_input(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    x = x.clone()
    for e in moe.local:
        tok, slot = torch.where(idx == e)
        x.index_add_(0, tok, moe.experts(e, x[tok].clone()) * weights[tok, slot, None])
    return x


def chained(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    for e in moe.local:
        tok, slot = torch.where(idx == e)
        x = x.index_add(0, tok, moe.experts(e, x[tok]) * weights[tok, slot, None])
    return x


def reads_the_sum(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        tok, slot = torch.where(idx == e)
        y = moe.experts(e, x[tok] + out[tok]) * weights[tok, slot, None]
        out = out.index_add(0, tok, y)
    return out


def decayed_sum(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        tok, slot = torch.where(idx == e)
        out = out * 0.9
        out.index_add_(0, tok, moe.experts(e, x[tok]) * weights[tok, slot, None])
    return out


def reroutes(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    idx = idx.clone()
    for e in moe.local:
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, moe.experts(e, x[tok]) * weights[tok, slot, None])
        idx[tok[:1], 0] = (e + 1) % moe.count
    return out


def weight_changes(moe: Moe, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in moe.local:
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, F.normalize(moe.experts(e, x[tok]), dim=-1) * weights[tok, slot, None])
        weights = weights * 0.5
    return out
