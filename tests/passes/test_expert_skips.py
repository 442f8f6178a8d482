"""Loops that pass over experts without tokens: captured where the body does nothing without any, taken back where not.

Each program runs on routings with empty experts, against eager mode, with what it leaves in Python's state.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxpasses.inspect
from fxpasses.capture import flags
from tests.support import compiled, events

EXPERTS, HIDDEN, TOKENS = 4, 8, 12


class State:
    """What a program may change besides tensors."""

    def __init__(self) -> None:
        self.visited: list[int] = []
        self.count = 0
        self.by_expert: dict[int, int] = {}


Program = Callable[[Tensor, Tensor, Tensor, Tensor, State], Any]


def same(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.numel() >= 1:
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def functional(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if tok.shape[0] == 0:
            continue
        out = out.index_add(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def rebound(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if len(tok):
            out = out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def temporaries(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    """What the body makes for itself may change: lists, dicts, and variables that nobody reads later."""
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = F.one_hot(idx, EXPERTS).permute(2, 1, 0)[e]
        if not mask.any():
            continue
        parts = []
        slot, tok = torch.where(mask)
        for half in (x[tok] @ w[e]).chunk(2, dim=-1):
            parts.append(half * 2)
        found = {"y": torch.cat(parts, dim=-1)}
        found["y"] = found["y"] * weights[tok, slot, None]
        out.index_add_(0, tok, found["y"])
    return out


def padded_hits(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    mask = F.one_hot(idx, EXPERTS + 1).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        e = e[0]
        if e == EXPERTS:
            continue
        slot, tok = torch.where(mask[e])
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def hits_by_where(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in torch.where(torch.bincount(idx.flatten(), minlength=EXPERTS) > 0)[0]:
        tok, slot = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def cutting(counts: str, loop: str) -> Program:
    """A loop over rows that are sorted and cut by counts, given as source; `out`, `outputs` and `start` go on."""
    name = "cuts_" + "".join(letter if letter.isalnum() else "_" for letter in f"{counts} {loop}")
    source = f"""
def {name}(x, idx, weights, w, state):
    flat = idx.view(-1)
    order = flat.argsort(stable=True)
    tok, rows = order // 2, x[order // 2]
    {FILLED if "hot" in counts else "pass"}
    tensor = {counts}
    counts, ends, more = tensor.cpu().numpy(), tensor.cpu().numpy().cumsum(0), None
    out, outputs, pairs, start = torch.zeros_like(x), [], [], 0
    {loop}
    return out, start, more
"""
    namespace: dict[str, Any] = {"torch": torch, "F": F, "EXPERTS": EXPERTS, "TOKENS": TOKENS}
    exec(compile(source, f"<{name}>", "exec"), namespace)
    return namespace[name]


FILLED = "hot = idx.new_zeros((TOKENS, EXPERTS)); hot.scatter_(1, idx, 1)"
BINCOUNT, SCATTERED = "torch.bincount(flat, minlength=EXPERTS)", "hot.sum(0)"
ADD = "out.index_add_(0, tok[start:end], rows[start:end] @ w[e]); start = end"


def by_counts(body: str = ADD, condition: str = "count == 0", before: str = "pass") -> str:
    return f"""
    for e, count in enumerate(counts):
        end = start + count
        {before}
        if {condition}:
            continue
        {body}
    start = None"""


def by_ends(condition: str, body: str = "") -> str:
    return f"""
    for e, end in enumerate(ends):
        start = 0 if e == 0 else ends[e - 1]
        if {condition}:
            continue
        out.index_add_(0, tok[start:end], rows[start:end] @ w[e])
        {body}
    start = None"""


CUT = [
    cutting(SCATTERED, by_counts()),
    cutting(BINCOUNT, by_counts(condition="not count > 0")),
    cutting(BINCOUNT, by_ends("end - start == 0")),
    cutting(SCATTERED, by_ends("end <= start")),
    cutting(f"{BINCOUNT}.to(torch.int32)", by_ends("start == end")),
]


def asking(condition: str) -> Program:
    """A loop that passes over an expert on a condition, given as source."""
    name = "asks_" + "".join(letter if letter.isalnum() else "_" for letter in condition)
    source = f"""
def {name}(x, idx, weights, w, state):
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        tok, slot = torch.where(idx == e)
        if {condition}:
            continue
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out
"""
    namespace: dict[str, Any] = {"torch": torch, "EXPERTS": EXPERTS}
    exec(compile(source, f"<{name}>", "exec"), namespace)
    return namespace[name]


CONDITIONS = [
    "tok.nelement() == 0", "tok.size(0) == 0", "not tok.numel()", "len(tok) < 1", "0 >= tok.shape[0]",
    "(idx == e).sum().item() == 0", "int((idx == e).sum()) == 0", "not torch.any(idx == e)",
    "not (idx == e).any().item()", "not bool((idx == e).any())", "(idx == e).nonzero().numel() == 0",
    "torch.count_nonzero(idx == e) == 0", "x[tok].numel() == 0",
]  # fmt: skip
GROUPED = [*CUT, same, functional, rebound, temporaries, padded_hits, hits_by_where, *map(asking, CONDITIONS)]


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
    name = "does_" + "".join(letter if letter.isalnum() else "_" for letter in f"{before} {condition} {body}")
    source = f"""
def {name}(x, idx, weights, w, state):
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
    namespace: dict[str, Any] = {"torch": torch, "F": F, "random": random} | {
        "EXPERTS": EXPERTS,
        "TOKENS": TOKENS,
    }
    exec(compile(source, f"<{name}>", "exec"), namespace)
    return namespace[name]


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
    zero_with_a_sign, while_any, while_helper, fails_without_tokens, asserts_without_tokens,
    asks_the_counts, drops_before_bincount, narrow_sum,
]  # fmt: skip
JOINED = "outputs.append(rows[start:end] @ w[e]); start = end"


def joining(after: str, body: str = JOINED, before: str = "pass") -> Program:
    return cutting(SCATTERED, by_counts(body, before=before) + f"\n    {after}")


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


class Router(torch.nn.Module):
    """A program between a router and a result; `state` is what it may change."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.state = program, State()
        torch.manual_seed(0)
        self.w = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))

    def forward(self, x: Tensor, logits: Tensor) -> Any:
        weights, idx = torch.topk(logits.softmax(-1), 2, dim=-1)
        return self.program(x, idx, weights, self.w, self.state)


def routings() -> Iterator[Tensor]:
    """Logits with which the first expert has no tokens, and with which all have some."""
    torch.manual_seed(3)
    logits = torch.randn(TOKENS, EXPERTS)
    for empty in ((0,), ()):
        yield logits.index_fill(1, torch.tensor(empty, dtype=torch.long), -20.0)


@pytest.fixture(autouse=True)
def capturing() -> Iterator[None]:
    with flags.scoped():
        yield


def results_of(module: Router, program: Any, many: int) -> list[Any]:
    """For the first `many` routings: the results, the gradients and the state."""
    torch.manual_seed(4)
    random.seed(4)
    module.state = State()
    found = []
    for number, logits in enumerate(itertools.islice(routings(), many)):
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(number)).requires_grad_()
        module.w.grad = None
        out = program(x, logits)
        first = out[0] if isinstance(out, tuple) else out
        if first.requires_grad:
            first.square().sum().backward()
        rest = list(out[1:]) if isinstance(out, tuple) else []
        found.append([first.detach(), x.grad, module.w.grad, *rest, dict(vars(module.state))])
    return found


def check(program: Program, many: int) -> tuple[fxpasses.inspect.Record, Any]:
    """The record, and what ran."""
    module, expected = Router(program), Router(program)
    ours = compiled(module, "eager")
    with fxpasses.inspect.record() as record:
        found = results_of(module, ours, many)
    for actual, wanted in zip(found, results_of(expected, expected, many), strict=True):
        for one, other in zip(actual, wanted, strict=True):
            if isinstance(other, Tensor):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
            else:
                assert one == other
    return record, lambda: results_of(module, ours, many)


@pytest.mark.parametrize("program", GROUPED, ids=lambda program: program.__name__)
def test_experts_without_tokens_are_no_question(program: Program) -> None:
    """One graph for all routings, without a query."""
    record, step = check(program, 2)
    assert len(record.graphs) == 1
    assert record.figures("group_experts")["loops_grouped"] == 1
    counts = events(step)
    assert not any(counts[f"aten::{name}"] for name in ("nonzero", "unique", "_unique2", "bincount")), counts


@pytest.mark.parametrize("program", [*LEFT, *LEFT_BY_SOURCE, *LEFT_IN_COUNTS, looks_at_hits], ids=lambda p: p.__name__)
def test_what_a_body_does_without_tokens_is_not_lost(program: Program) -> None:
    check(program, 1)
