"""Loops that pass over experts without tokens, whose bodies do nothing without any."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.experts.layer import source as defined

EXPERTS, HIDDEN, TOKENS = 4, 8, 12


class State:
    """What a program may change besides tensors."""

    def __init__(self) -> None:
        self.visited: list[int] = []
        self.count = 0
        self.by_expert: dict[int, int] = {}


Program = Callable[[Tensor, Tensor, Tensor, Tensor, State], Any]


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


def hits_without_padding(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    """One class more than there are experts, which no id has, and no line that skips it."""
    out = torch.zeros_like(x)
    mask = F.one_hot(idx, EXPERTS + 1).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero().squeeze(-1):
        e = e.item()
        slot, tok = torch.where(mask[e])
        if tok.numel() == 0:
            continue
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def hits_without_gradients(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    """The body switches gradients off for its query, and on again, as DBRX does."""
    out, mask = torch.zeros_like(x), F.one_hot(idx, EXPERTS + 1).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        e = e[0]
        with torch.no_grad():
            slot, tok = torch.where(mask[e])
        out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def hits_of_padding(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    """Ids that have the class of the padding, which has an expert of its own."""
    out, every = torch.zeros_like(x), torch.cat([w, w[:1] * 2])
    mask = F.one_hot(idx.masked_fill(idx == 1, EXPERTS), EXPERTS + 1).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero().squeeze(-1):
        slot, tok = torch.where(mask[e])
        out.index_add_(0, tok, x[tok] @ every[e] * weights[tok, slot, None])
    return out


def searched_ends(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    """Where each expert's rows end is looked up among the sorted ids."""
    in_order, order = torch.sort(idx.flatten(), stable=True)
    tok, rows, out, start = order // 2, x[order // 2], torch.zeros_like(x), 0
    for e, end in enumerate(torch.searchsorted(in_order, torch.arange(EXPERTS), right=True).tolist()):
        if start != end:
            out.index_add_(0, tok[start:end], rows[start:end] @ w[e])
        start = end
    return out


def written(kind: str, text: str, source: str) -> Program:
    """The program that `source` defines as NAME; it is called after its kind and what sets it apart."""
    name = "".join(letter if letter.isalnum() else "_" for letter in f"{kind} {text}".strip())
    return defined(name, source, random=random, EXPERTS=EXPERTS, TOKENS=TOKENS)


PAIRS = "out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])"
COUNTS = "counts = torch.bincount(idx.flatten(), minlength=EXPERTS)"
NUMBERS = f"{COUNTS}.tolist()"


def left(
    name: str,
    body: str = "pass",
    before: str = "pass",
    result: str = "out",
    *,
    unless: str = "tok.numel() == 0",
    passed: str = "continue",
    only_if: str = "",
    otherwise: str = "pass",
    first: str = "",
    experts: str = "e in range(EXPERTS)",
    ask: str = "tok, slot = torch.where(idx == e)",
    add: str = PAIRS,
) -> Program:
    """A loop over experts, given as source.

    before: ahead of the loop. experts: what it loops over. first: a condition to pass over an expert, asked before its
    tokens are. unless: one that is asked after that, and passed: what is done then. only_if: the same as a block around
    the rest, and otherwise: its `else`. ask: for its tokens. body, add: what is done with an expert's tokens. result:
    what is returned.
    """
    lines = [f"if {first}: continue"] if first else []
    lines.append(ask)
    if only_if:
        lines += [f"if {only_if}:", f"    {body}", f"    {add}", "else:", f"    {otherwise}"]
    else:
        lines += [f"if {unless}:", f"    {passed}"] if unless and not first else []
        lines += [body, add]
    source = f"""
def NAME(x, idx, weights, w, state):
    out = torch.zeros_like(x)
    {before}
    for {experts}:
        {(chr(10) + " " * 8).join(lines)}
    return {result}
"""
    return written(name, "", source)


def hits(name: str, experts: str, before: str = "pass", result: str = "out", **parts: str) -> Program:
    """A loop over some experts alone, none of which is passed over."""
    return left(name, before=before, result=result, unless="", experts=experts, **parts)


def cutting(counts: str, loop: str) -> Program:
    """A loop over rows that are sorted and cut by counts, given as source; `out`, `outputs` and `start` go on."""
    source = f"""
def NAME(x, idx, weights, w, state):
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
    return written("cuts", f"{counts} {loop}", source)


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
    cutting("F.one_hot(idx, EXPERTS).float().sum((0, 1)).long()", by_counts()),
]

JOINED = "outputs.append(rows[start:end] @ w[e]); start = end"


def joining(after: str, body: str = JOINED, before: str = "pass") -> Program:
    return cutting(SCATTERED, by_counts(body, before=before) + f"\n    {after}")


CONDITIONS = [
    "tok.nelement() == 0", "tok.size(0) == 0", "not tok.numel()", "len(tok) < 1", "0 >= tok.shape[0]",
    "(idx == e).sum().item() == 0", "int((idx == e).sum()) == 0", "not torch.any(idx == e)",
    "not (idx == e).any().item()", "not bool((idx == e).any())", "(idx == e).nonzero().numel() == 0",
    "torch.count_nonzero(idx == e) == 0", "x[tok].numel() == 0", "not (idx == e).max()",
    "((idx == e).sum() == 0).any()", "not (idx == e).unsqueeze(-1).to(torch.uint8).sum()",
    "torch.histc(idx.float(), bins=EXPERTS, min=0, max=EXPERTS)[e] == 0",
]  # fmt: skip
SAME = [
    left("same", only_if="tok.numel() >= 1"),
    left("functional", unless="tok.shape[0] == 0", add=PAIRS.replace("out.index_add_", "out = out.index_add")),
    left("rebound", only_if="len(tok)", add=f"out = {PAIRS}"),
    temporaries,
]
HITS = [
    padded_hits,
    hits_without_padding,
    hits_without_gradients,
    hits_of_padding,
    hits("hits_by_where", f"e in torch.where({COUNTS.partition(' = ')[2]} > 0)[0]"),
    hits(
        "hits_of_floats",
        "e in torch.histc(idx.float(), bins=EXPERTS, min=0, max=EXPERTS).nonzero().flatten().tolist()",
        "mask = F.one_hot(idx, EXPERTS).float().permute(2, 1, 0)",
        ask="slot, tok = torch.where(mask[e] > 0)",
    ),
]
ASKING = [left(f"asks {condition}", unless=condition) for condition in CONDITIONS]
GROUPED = [*CUT, *SAME, *HITS, searched_ends, *ASKING]
