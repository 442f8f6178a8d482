"""Loops that pass over experts without tokens: captured where the body does nothing without any, taken back where not.

Each program runs on routings with empty experts, against eager mode, with what it leaves in Python's state.
"""

from __future__ import annotations

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
GROUPED = [same, functional, rebound, temporaries, padded_hits, hits_by_where, *map(asking, CONDITIONS)]


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
        if tok.numel() > 1:
            out.index_add_(0, tok, x[tok] @ w[e] * weights[tok, slot, None])
    return out


def enough_hits(x: Tensor, idx: Tensor, weights: Tensor, w: Tensor, state: State) -> Any:
    out = torch.zeros_like(x)
    for e in (torch.bincount(idx.flatten(), minlength=EXPERTS) > 2).nonzero().flatten().tolist():
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
    """Logits with which all experts have tokens, the first has none."""
    torch.manual_seed(3)
    logits = torch.randn(TOKENS, EXPERTS)
    for empty in ((), (0,)):
        yield logits.index_fill(1, torch.tensor(empty, dtype=torch.long), -20.0)


@pytest.fixture(autouse=True)
def capturing() -> Iterator[None]:
    with flags.scoped():
        yield


def results_of(module: Router, program: Any) -> list[Any]:
    """For each routing: the results, the gradients and the state."""
    torch.manual_seed(4)
    module.state = State()
    found = []
    for number, logits in enumerate(routings()):
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(number)).requires_grad_()
        module.w.grad = None
        out = program(x, logits)
        first = out[0] if isinstance(out, tuple) else out
        if first.requires_grad:
            first.square().sum().backward()
        rest = list(out[1:]) if isinstance(out, tuple) else []
        found.append([first.detach(), x.grad, module.w.grad, *rest, dict(vars(module.state))])
    return found


def check(program: Program) -> tuple[fxpasses.inspect.Record, Any]:
    """The record, and what ran: call it with a routing."""
    module, expected = Router(program), Router(program)
    ours = compiled(module, "eager")
    with fxpasses.inspect.record() as record:
        found = results_of(module, ours)
    for actual, wanted in zip(found, results_of(expected, expected), strict=True):
        for one, other in zip(actual, wanted, strict=True):
            if isinstance(other, Tensor):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
            else:
                assert one == other
    return record, lambda: results_of(module, ours)


@pytest.mark.parametrize("program", GROUPED, ids=lambda program: program.__name__)
def test_experts_without_tokens_are_no_question(program: Program) -> None:
    """One graph for all routings, without a query."""
    record, step = check(program)
    assert len(record.graphs) == 1
    assert record.figures("group_experts")["loops_grouped"] == 1
    counts = events(step)
    assert not any(counts[f"aten::{name}"] for name in ("nonzero", "unique", "_unique2", "bincount")), counts


@pytest.mark.parametrize("program", [*LEFT, looks_at_hits], ids=lambda program: program.__name__)
def test_what_a_body_does_without_tokens_is_not_lost(program: Program) -> None:
    check(program)
