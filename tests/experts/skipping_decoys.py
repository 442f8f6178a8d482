"""Loops that pass over experts without tokens, where that makes a difference; none may become one program.

Each is a loop with one thing wrong, written by `left`. `TAKEN_BACK` are loops whose trace goes through their branches
as though every expert had tokens, until something shows that this is not legal; `NOT_SPECULATED` ask what says nothing
of the routing; `OTHER_MASKS` ask nothing, and take rows by masks of another kind.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.experts.skipping import (
    ADD,
    BINCOUNT,
    COUNTS,
    EXPERTS,
    JOINED,
    NUMBERS,
    PAIRS,
    Program,
    State,
    by_counts,
    by_ends,
    cutting,
    hits,
    joining,
    left,
    written,
)

OTHER = "other = torch.topk(x[:, :EXPERTS], 2, dim=-1).indices"


def asking_masks(name: str, mask: str, before: str) -> Program:
    """A loop that asks for the tokens of its experts with masks, given as source."""
    source = f"""
def NAME(x, idx, weights, w, state):
    out = torch.zeros_like(x)
    {before}
    for e in range(EXPERTS):
        tok = torch.where({mask})[0]
        out.index_add_(0, tok, x[tok] @ w[e])
    return out
"""
    return written(name, "", source)


# Those that do not fit


def in_a_closure(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out, count = torch.zeros_like(x), 0

    def note() -> None:
        nonlocal count
        count += 1

    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() > 0:
            note()
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out, count


def writes_before_query(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out, load = torch.zeros_like(x), x.new_zeros(())
    counts = torch.bincount(idx.flatten(), minlength=EXPERTS).tolist()
    for e in range(EXPERTS):
        if counts[e] > 0:
            if e == 0:
                load.add_(1)
            tok, slot = torch.where(idx == e)
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out, load


def returns_early(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    def expert(rows: Tensor, weight: Tensor) -> Tensor:
        if rows.shape[0] == 0:
            return rows
        return rows @ weight

    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, expert(x[tok], w[e]) * weights[tok, slot, None])
    return out


def zero_with_a_sign(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out, signs = torch.zeros_like(x), []
    for e in range(EXPERTS):
        zero = 0.0
        tok, slot = torch.where(idx == e)
        if tok.numel() > 0:
            zero = -0.0
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
        signs.append(math.copysign(1.0, zero))
    return out, signs


def while_any(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    """Traced as though the answer were always yes, this would never end."""
    while (idx == 3).any():
        idx = torch.where(idx == 3, 2, idx)
    return x + idx.sum(-1, keepdim=True)


def while_helper(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    def more() -> bool:
        if (idx == 3).any():
            return bool(EXPERTS)
        return False

    while more():
        idx = torch.where(idx == 3, 2, idx)
    return x + idx.sum(-1, keepdim=True)


def fails_without_tokens(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    for e in range(EXPERTS):
        tok = torch.where(idx == e)[0]
        if tok.numel() > 0:
            x[tok].max()
    return x * 2


def asserts_without_tokens(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    if (idx == 0).any():
        (idx == 0).nonzero()[0, 0].item()
    return x * 2


def asks_the_counts(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    counts = torch.bincount(idx.flatten(), minlength=EXPERTS)
    parts = (idx.flatten().argsort(stable=True) // 2).split(counts.tolist())
    for e in range(EXPERTS):
        if (counts == e).any():
            out.index_add_(0, parts[e], x[parts[e]] @ w[e])
    return out


def gradients_left_off(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    """What follows the last expert with tokens has no gradient."""
    out = torch.zeros_like(x)
    with torch.enable_grad():
        for e in range(EXPERTS):
            tok, slot = torch.where(idx == e)
            if tok.numel() == 0:
                continue
            torch.set_grad_enabled(True)
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
            torch.set_grad_enabled(e > 0)
        scale = x.sum()
    return out * scale


def rows_without_gradients(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out, hit = torch.zeros_like(x), torch.bincount(idx.flatten(), minlength=EXPERTS).nonzero().flatten()
    for e in hit.tolist():
        with torch.no_grad():
            tok, slot = torch.where(idx == e)
            rows = x[tok]
        out.index_add_(0, tok, rows @ w[e] * weights[tok, slot, None])
    return out


def suppressed(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    """An expert whose query fails uses the tokens of the one before."""
    out, tok, slot = torch.zeros_like(x), idx[:0, 0], idx[:0, 0]
    for e in range(EXPERTS):
        if (idx == e).any():
            with contextlib.suppress(IndexError):
                tok, slot = torch.where(idx == (0, 1, 2)[e])
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def hits_of_written_ids(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    """Ids of the class for padding, which has an expert, are written after the choice."""
    out, every = torch.zeros_like(x), torch.cat([w, w[:1] * 2])
    ids = idx.clone()
    ids[idx == 1] = EXPERTS
    mask = F.one_hot(ids, EXPERTS + 1).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero().squeeze(-1):
        slot, tok = torch.where(mask[e])
        out.index_add_(0, tok, x[tok] @ every[e] * weights[tok, slot, None])
    return out


def drops_before_bincount(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    idx[0, 0] = EXPERTS + 3
    return x * 1, torch.bincount(idx.flatten(), minlength=EXPERTS)


def narrow_sum(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    """256 tokens of one expert are 0 in uint8."""
    rows = x.repeat(22, 1)[:256]
    idx = torch.topk(rows[:, :EXPERTS] * 0 + torch.arange(EXPERTS, 0, -1), 1).indices
    out = torch.zeros_like(rows)
    counts = F.one_hot(idx, EXPERTS).sum((0, 1), dtype=torch.uint8)
    for e in range(EXPERTS):
        if counts[e] == 0:
            continue
        tok = torch.where(idx == e)[0]
        out.index_add_(0, tok, rows[tok] @ w[e])
    return out


SOME = "tok.numel() > 0"
# What Python's state holds afterwards.
IN_PYTHON = [
    left("counts_locally", "count += 1", "count = 0", "out / count"),
    left("counts_in_state", "state.count += 1"),
    left("appends", "state.visited.append(e)", only_if=SOME),
    left("appends_locally", "visited.append(e)", "visited = []", "out, len(visited)", only_if=SOME),
    left("fills_dict", "state.by_expert[e] = 1", only_if=SOME),
    in_a_closure,
    left("last_expert", "last = e", "last = -1", "out, last", only_if=SOME),
    hits("last_hit", "e in torch.unique(idx)", "e = torch.tensor(0)", "out, e"),
    left("otherwise_in_python", before="empty = 0", result="out, empty", passed="empty += 1; continue"),
    left("takes_a_number", "next(it)", "it = iter(range(9))", "out, next(it)"),
    left("takes_a_key", "next(it)", "it = iter({1: 2, 3: 4, 5: 6, 7: 8, 9: 9})", "out, next(it)"),
    left("takes_from_a_generator", "next(it)", "it = (number for number in range(9))", "out, next(it)"),
    left("draws_in_python", "random.randint(0, 5)", result="out, random.randint(0, 99)"),
    left("hooks", "x.register_hook(lambda gradient: gradient * 2)"),
    zero_with_a_sign,
]
# Where the program goes on.
ELSEWHERE = [
    left("stops", passed="break"),
    left("returns", result="out * 2", passed="return out"),
    left("raises", unless="(idx == e + 7).any()", passed='raise ValueError(f"expert {e + 7}")'),
    returns_early, while_any, while_helper,
]  # fmt: skip
# What is computed without tokens too, or otherwise.
COMPUTED = [
    left("last_result", "y = x[tok] @ w[e] * weights[tok, slot, None]", "y = x", "out + y.sum()", only_if=SOME,
         add="out.index_add_(0, tok, y)"),
    left("otherwise", only_if=SOME, otherwise="out = out + 1"),
    left("adds_loss", "loss = loss + w[e].square().mean()", "loss = x.new_zeros(())", "out, loss", only_if=SOME),
    left("writes_load", "load[e] = 1", "load = x.new_zeros(EXPERTS)", "out, load", only_if=SOME),
    writes_before_query,
    left("adds_bias_to_all", only_if=SOME, add=f"{PAIRS}; out += w[e, 0]"),
    left("draws", "torch.rand(3)", result="out, torch.rand(3)", only_if=SOME),
    fails_without_tokens, asserts_without_tokens,
    left("reads_the_first_token", "torch.where(idx == e)[0][0]"),
    left("checks_a_size_asked_again", "torch._check(torch.where(idx == e)[0].numel() > 0)"),
    left("checks_the_size", "torch._check(tok.numel() != 0)"),
    left("asserts_a_count", "assert counts[e] > 0", NUMBERS),
    left("reads_the_first_pair", "x[idx.flatten().argsort()[: counts[e]][0]]", NUMBERS, unless="counts[e] == 0"),
    left("makes_one_less", "x.new_zeros(counts[e] - 1)", NUMBERS, unless="counts[e] == 0"),
]  # fmt: skip
# What is asked is not whether the expert has tokens.
ASKED = [
    left("asks_for_another", before=NUMBERS, first="counts[EXPERTS - 1 - e] == 0"),
    left("asks_another_routing", before=OTHER, first="not (other == e).any()"),
    left("changes_routing", before=f"idx = idx.clone(); {NUMBERS}; idx[0] = 3", first="counts[e] == 0"),
    hits("hits_of_another", "e in torch.unique(other)", OTHER.replace("2", "1", 1)),
    left("ids_changed_in_a_list", before=f"{COUNTS}; torch._foreach_sub_([idx], 1)", unless="counts[e] == 0"),
    left("one_hot_overwritten", before="mask = F.one_hot(idx, EXPERTS).to(x.dtype); mask[:] = 0; "
         "counts = mask.sum((0, 1))", unless="counts[e] == 0"),
    left("ones_overwritten", before="ones = torch.ones(2 * TOKENS); ones[:] = 0; "
         "counts = torch.zeros(EXPERTS).scatter_add(0, idx.flatten(), ones)", unless="counts[e] == 0"),
    left("ids_as_truths", unless="not (idx.to(torch.bool) == e).any()"),
    left("scattered_twice", before="hot = idx.new_zeros((TOKENS, EXPERTS)); hot.scatter_(1, idx, 1); "
         "hot.scatter_(1, idx[:, :1] * 0 + 2, 0)", unless="not hot[:, e].any()"),
    asks_the_counts,
]  # fmt: skip
# Numbers and lists of counts.
IN_COUNTS = [
    cutting(BINCOUNT, by_counts(before="more = isinstance(end, int)")),
    cutting(BINCOUNT, by_counts(before="more = count.item()")),
    cutting(BINCOUNT, by_counts() + "; out = out * counts[1]"),
    cutting(BINCOUNT, by_counts() + "; more = int(counts[0])"),
    cutting(BINCOUNT, by_counts(before="tensor.zero_()")),
    cutting(BINCOUNT, by_counts(f"{ADD}; start = start + 1")),
    cutting(BINCOUNT, by_counts(condition="counts[EXPERTS - 1 - e] == 0")),
    cutting("hot.sum(0) - 1", by_counts(condition="count == -1", before="end = start + count + 1")),
    cutting(BINCOUNT, by_ends("start == end", "more = ends[2] - ends[1]")),
    cutting(BINCOUNT, by_ends("start == end and e > 0")),
    cutting("hot[1:].sum(0)", by_ends("start == end")),
    joining("out = torch.cat(outputs); more = len(outputs)"),
    joining("out = torch.cat(outputs) + torch.cat(outputs)"),
    joining("more = [part.shape[0] for part in outputs]"),
    joining("out = torch.cat(outputs)", before="more = 1 if len(outputs) else more"),
    joining("out = torch.cat(outputs)", "y = rows[start:end] @ w[e]; outputs.append(y if e else y.double())"),
    joining("out = torch.cat(outputs)", f"{JOINED}; outputs.append(x[:1])"),
    joining("out = torch.cat(outputs); more = outputs.pop().shape[0]"),
]  # fmt: skip
# Tokens as a list, with which the program does more than index.
LISTED = [
    left("kept_list", "state.by_expert[e] = tok.tolist()"),
    left("summed_list", "out = out * (1 + sum(tok.tolist()) % 2)"),
    left("reordered_list", add=PAIRS.replace("x[tok]", "x[sorted(tok.tolist())]")),
    left("scaled_by_length", add=PAIRS.replace("x[tok]", "x[tok] * len(tok.tolist())")),
    left("tokens_move_on", "kept = tok.tolist(); tok.sub_(tok // 2)", add=PAIRS.replace("x[tok]", "x[kept]")),
]
TAKEN_BACK = [
    *IN_PYTHON,
    *LISTED,
    *ELSEWHERE,
    *COMPUTED,
    *ASKED,
    *IN_COUNTS,
    hits_of_written_ids,
    gradients_left_off,
    rows_without_gradients,
    suppressed,
]
NOT_SPECULATED = [
    left("asks_for_more", only_if="tok.numel() > 8"),
    hits("enough_hits", f"e in ({COUNTS.partition(' = ')[2]} > 8).nonzero().flatten().tolist()"),
    hits("numbered_hits", "number, e in enumerate(torch.unique(idx).tolist())", add=PAIRS.replace("w[e]", "w[number]")),
    hits("counted_hits", "e in hit", "hit = torch.unique(idx).tolist()", "out / len(hit)"),
    left("counts_in_another_order", unless="grid[e] == 0",
         before="grid = torch.bincount(idx.flatten(), minlength=6).view(2, 3).t().flatten()"),
    drops_before_bincount, narrow_sum,
]  # fmt: skip
# No question is asked; the masks are not those of experts.
OTHER_MASKS = [
    asking_masks("from_the_last", "hot[..., e - EXPERTS]", before="hot = F.one_hot(idx, EXPERTS)"),
    asking_masks("scores_as_numbers", "scores[:, e].long()",
                 before="scores = x.new_zeros(TOKENS, EXPERTS).scatter(1, idx, weights)"),
    asking_masks("not_scattered", "zeros[:, e]",
                 before="zeros = x.new_zeros(TOKENS, EXPERTS); zeros.scatter(1, idx, 1)"),
    asking_masks("ids_of_a_slot", "idx[:, e % 2]", before="x.new_zeros(TOKENS, EXPERTS).scatter(1, idx, 1)"),
]  # fmt: skip
# The number of experts that have tokens is used beside the loop, as a tensor's size: that of what the program asked.
looks_at_hits = hits("looks_at_hits", "e in hit", "hit = torch.unique(idx)", "out, hit * 2")
