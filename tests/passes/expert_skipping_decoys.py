"""Loops that pass over experts without tokens, where that makes a difference."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.expert_skipping import (
    ADD,
    BINCOUNT,
    EXPERTS,
    JOINED,
    Program,
    State,
    by_counts,
    by_ends,
    cutting,
    joining,
    written,
)


def counts_locally(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out, count = torch.zeros_like(x), 0
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() == 0:
            continue
        count += 1
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out / count


def counts_in_state(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() == 0:
            continue
        state.count += 1
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def appends(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() > 0:
            state.visited.append(e)
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def appends_locally(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out, visited = torch.zeros_like(x), []
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() > 0:
            visited.append(e)
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out, len(visited)


def fills_dict(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() > 0:
            state.by_expert[e] = 1
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


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


def last_expert(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out, last = torch.zeros_like(x), -1
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() > 0:
            last = e
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out, last


def last_hit(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    e = torch.tensor(0)
    for e in torch.unique(idx):
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out, e


def last_result(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out, y = torch.zeros_like(x), x
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() > 0:
            y = x[tok] @ w[e] * weights[tok, slot, None]
            out.index_add_(0, tok, y)
    return out + y.sum()


def otherwise(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() > 0:
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
        else:
            out = out + 1
    return out


def otherwise_in_python(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out, empty = torch.zeros_like(x), 0
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() == 0:
            empty += 1
            continue
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out, empty


def adds_loss(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out, loss = torch.zeros_like(x), x.new_zeros(())
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() > 0:
            loss = loss + w[e].square().mean()
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out, loss


def writes_load(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out, load = torch.zeros_like(x), x.new_zeros(EXPERTS)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() > 0:
            load[e] = 1
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out, load


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


def adds_bias_to_all(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() > 0:
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
            out += w[e, 0]
    return out


def asks_for_another(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    counts = torch.bincount(idx.flatten(), minlength=EXPERTS).tolist()
    for e in range(EXPERTS):
        if counts[EXPERTS - 1 - e] == 0:
            continue
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def asks_another_routing(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    other = torch.topk(x[:, :EXPERTS], 2, dim=-1).indices
    for e in range(EXPERTS):
        if not (other == e).any():
            continue
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def changes_routing(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    idx = idx.clone()
    counts = torch.bincount(idx.flatten(), minlength=EXPERTS).tolist()
    idx[0] = 3
    for e in range(EXPERTS):
        if counts[e] == 0:
            continue
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def stops(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() == 0:
            break
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def returns(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() == 0:
            return out
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out * 2


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


def draws(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() > 0:
            torch.rand(3)
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out, torch.rand(3)


def raises(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if (idx == e + 7).any():
            raise ValueError(f"expert {e + 7}")
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def asks_for_more(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() > 8:
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def enough_hits(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in (torch.bincount(idx.flatten(), minlength=EXPERTS) > 8).nonzero().flatten().tolist():
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def numbered_hits(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for number, e in enumerate(torch.unique(idx).tolist()):
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] @ w[number] * weights[tok, slot, None])
    return out


def counted_hits(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    hit = torch.unique(idx).tolist()
    for e in hit:
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out / len(hit)


def hits_of_another(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    other = torch.topk(x[:, :EXPERTS], 1, dim=-1).indices
    for e in torch.unique(other):
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def looks_at_hits(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    """The number of experts that have tokens is used beside the loop, as a tensor's size."""
    out = torch.zeros_like(x)
    hit = torch.unique(idx)
    for e in hit:
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out, hit * 2


def left(body: str = "pass", before: str = "pass", condition: str = "tok.numel() == 0", after: str = "None") -> Program:
    """A loop that does something in its body, or asks something else, given as source."""
    source = f"""
def NAME(x, idx, weights, w, state):
    out = torch.zeros_like(x)
    {before}
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if {condition}:
            continue
        {body}
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out, {after}
"""
    return written("does", f"{before} {condition} {body}", source)


def asking_masks(mask: str, before: str) -> Program:
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
    return written("masks", f"{before} {mask}", source)


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


def drops_before_bincount(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    idx[0, 0] = EXPERTS + 3
    return x * 1, torch.bincount(idx.flatten(), minlength=EXPERTS)


def narrow_sum(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    """256 tokens of one expert are 0 in uint8."""
    rows = x.repeat(22, 1)[:256]
    idx = torch.topk(rows.new_zeros(256, EXPERTS) + torch.arange(EXPERTS, 0, -1), 1).indices
    out = torch.zeros_like(rows)
    counts = F.one_hot(idx, EXPERTS).sum((0, 1), dtype=torch.uint8)
    for e in range(EXPERTS):
        if counts[e] == 0:
            continue
        tok = torch.where(idx == e)[0]
        out.index_add_(0, tok, rows[tok] @ w[e])
    return out


TAKING = ["iter(range(9))", "iter({1: 2, 3: 4, 5: 6, 7: 8, 9: 9})", "(number for number in range(9))"]
LEFT_BY_SOURCE = [
    *(left("next(it)", before=f"it = {iterator}", after="next(it)") for iterator in TAKING),
    left("random.randint(0, 5)", after="random.randint(0, 99)"),
    left("x.register_hook(lambda gradient: gradient * 2)"),
    left(before="counts = torch.bincount(idx.flatten(), minlength=EXPERTS); torch._foreach_sub_([idx], 1)",
         condition="counts[e] == 0"),
    left(before="mask = F.one_hot(idx, EXPERTS).to(x.dtype); mask[:] = 0; counts = mask.sum((0, 1))",
         condition="counts[e] == 0"),
    left(before="ones = torch.ones(2 * TOKENS); ones[:] = 0; "
                "counts = torch.zeros(EXPERTS).scatter_add(0, idx.flatten(), ones)", condition="counts[e] == 0"),
    left(before="grid = torch.bincount(idx.flatten(), minlength=6).view(2, 3).t().flatten()", condition="grid[e] == 0"),
    left(condition="not (idx.to(torch.bool) == e).any()"),
    left(before="hot = idx.new_zeros((TOKENS, EXPERTS)); hot.scatter_(1, idx, 1); "
                "hot.scatter_(1, idx[:, :1] * 0 + 2, 0)", condition="not hot[:, e].any()"),
    asking_masks("hot[..., e - EXPERTS]", before="hot = F.one_hot(idx, EXPERTS)"),
    asking_masks("scores[:, e].long()", before="scores = x.new_zeros(TOKENS, EXPERTS).scatter(1, idx, weights)"),
    asking_masks("zeros[:, e]", before="zeros = x.new_zeros(TOKENS, EXPERTS); zeros.scatter(1, idx, 1)"),
    asking_masks("idx[:, e % 2]", before="x.new_zeros(TOKENS, EXPERTS).scatter(1, idx, 1)"),
    zero_with_a_sign, while_any, while_helper, fails_without_tokens, asserts_without_tokens,
    asks_the_counts, drops_before_bincount, narrow_sum,
]  # fmt: skip
COUNTED = "counts = torch.bincount(idx.flatten(), minlength=EXPERTS).tolist()"
LEFT_IN_COUNTS = [
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
    left("torch.where(idx == e)[0][0]"),
    left("torch._check(torch.where(idx == e)[0].numel() > 0)"),
    left("torch._check(tok.numel() != 0)"),
    left("assert counts[e] > 0", before=COUNTED),
    left("x[idx.flatten().argsort()[: counts[e]][0]]", before=COUNTED, condition="counts[e] == 0"),
    left("x.new_zeros(counts[e] - 1)", before=COUNTED, condition="counts[e] == 0"),
]  # fmt: skip
LEFT = [
    counts_locally, counts_in_state, appends, appends_locally, fills_dict, in_a_closure, last_expert, last_hit,
    last_result, otherwise, otherwise_in_python, adds_loss, writes_load, writes_before_query, adds_bias_to_all,
    asks_for_another, asks_another_routing, changes_routing, stops, returns, returns_early, draws, raises,
    asks_for_more, enough_hits, numbered_hits, counted_hits, hits_of_another,
]  # fmt: skip
