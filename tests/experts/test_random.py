"""Random loops over experts give equal results and gradients with and without `group_experts`."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxpasses.dynamo import flags
from tests.support import assert_same

WIDTH, EXPERTS = 8, 3
Step = Callable[["Program", Any, Tensor, Tensor], Tensor]  # (program, expert, rows, tokens of the rows) to rows

ALIKE: dict[str, Step] = {
    "silu": lambda p, e, r, t: F.silu(r),
    "gelu": lambda p, e, r, t: F.gelu(r),
    "stacked": lambda p, e, r, t: r @ p.stacked[e],
    "transposed": lambda p, e, r, t: r @ p.stacked[e].t(),
    "linear": lambda p, e, r, t: p.linears[e](r),
    "bias": lambda p, e, r, t: r + p.bias[e],
    "shared": lambda p, e, r, t: p.linears[0](r),
    "shared bias": lambda p, e, r, t: r * p.bias[0],
    "glu": lambda p, e, r, t: (lambda a, b: torch.cat([a.tanh() * b, b], -1))(*r.chunk(2, -1)),
    "norm": lambda p, e, r, t: F.layer_norm(r, (WIDTH,)),
    "softmax": lambda p, e, r, t: r.softmax(-1),
    "mean": lambda p, e, r, t: r - r.mean(-1, keepdim=True),
    "clamp": lambda p, e, r, t: r.clamp(max=1.0),
    "halves": lambda p, e, r, t: torch.stack([r[..., ::2], r[:, 1::2]], -1).flatten(1),
    "in place": lambda p, e, r, t: (r * 1.0).mul_(2.0),
    "residual": lambda p, e, r, t: r + p.tokens[t],
    "in float64": lambda p, e, r, t: r.double().exp().clamp(max=9.0).float(),
    "in the type of others": lambda p, e, r, t: r.double().exp().type_as(p.bias[0]).type_as(r),
}
OTHERS: dict[str, Step] = {  # not row by row, or not alike in all experts
    "over rows": lambda p, e, r, t: r - r.mean(0),
    "softmax over rows": lambda p, e, r, t: r.softmax(0),
    "rows": lambda p, e, r, t: r.flip(0),
    "first": lambda p, e, r, t: torch.cat([r[:1] * 2, r[1:]]),
    "load": lambda p, e, r, t: r * r.shape[0],
    "number": lambda p, e, r, t: r * (e + 1),
    "gram": lambda p, e, r, t: (r @ r.t()).tanh() @ r,
    "positions": lambda p, e, r, t: r + torch.arange(r.shape[0])[:, None],
    "own dropout": lambda p, e, r, t: r + torch.zeros_like(r).bernoulli_(0.0),
}
STEPS = ALIKE | OTHERS
QUERIES = ("where", "slots first", "nonzero", "any", "mask", "rows by mask", "column")
MERGES = ("index_add_", "index_add", "iadd", "index_put_", "scatter_add_")


@dataclass(frozen=True)
class Plan:
    query: str
    steps: tuple[str, ...]
    merge: str
    scaled: bool
    local: tuple[int, int]
    checkpointed: bool
    tokens: int
    writes: str  # what else happens in each round, or is returned
    level: str  # the option `fastpack.experts`
    order: str  # in which the experts come


class Program(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.plan = plan
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.stacked = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.register_buffer("tokens", torch.randn(plan.tokens, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return checkpoint(self.loop, x, use_reentrant=False) if self.plan.checkpointed else self.loop(x)

    def loop(self, x: Tensor) -> tuple[Tensor, ...]:
        plan = self.plan
        scores, idx = self.gate(x).softmax(-1).topk(2, dim=-1)
        out, other = torch.zeros_like(x), torch.zeros(EXPERTS)
        found: list[Tensor] = []
        for e in self.experts():
            tok, scale = self.ask(e, idx, scores)
            rows = x[(idx == e).any(-1)] if plan.query == "rows by mask" else x[tok]
            for step in plan.steps:
                rows = STEPS[step](self, e, rows, tok)
            out = self.merge(out, tok, rows * scale if plan.scaled else rows)
            if plan.writes == "elsewhere":
                other[e] = 1.0
            elif plan.writes == "input":
                x = x * 1.1
            elif plan.writes == "sum":
                out = out * 0.5
            elif plan.writes == "routing":
                idx = idx.clone()
                idx[0] = e
            elif plan.writes == "tokens":
                found.append(tok)
        return out + other.sum(), *found

    def experts(self) -> list[int]:
        experts = list(range(*self.plan.local))
        return experts[::-1] if self.plan.order == "down" else experts[1:] + experts[:1] if self.plan.order else experts

    def ask(self, e: int, idx: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        query = self.plan.query
        if query == "where":
            tok, slot = torch.where(idx == e)
        elif query == "slots first":
            slot, tok = torch.where(F.one_hot(idx, EXPERTS).permute(2, 1, 0)[e])
        elif query == "nonzero":
            hits = (idx == e).nonzero()
            tok, slot = hits[:, 0], hits[:, 1]
        elif query == "any":
            tok = (idx == e).any(-1).nonzero().squeeze(-1)
            return tok, (scores * (idx == e)).sum(-1)[tok].unsqueeze(-1)
        elif query == "column":
            dense = torch.zeros(len(idx), EXPERTS).scatter(1, idx, scores)
            tok = (dense[:, e] > 0.25).nonzero().squeeze(1)
            return tok, dense[tok, e, None]
        else:
            tok = (idx == e).any(-1).nonzero().flatten()
            return tok, scores[idx == e].unsqueeze(-1)
        return tok, scores[tok, slot, None]

    def merge(self, out: Tensor, tok: Tensor, rows: Tensor) -> Tensor:
        merge = self.plan.merge
        if merge == "index_add_":
            return out.index_add_(0, tok, rows)
        if merge == "index_add":
            return out.index_add(0, tok, rows)
        if merge == "iadd":
            out[tok] += rows
            return out
        if merge == "index_put_":
            return out.index_put_((tok,), rows, accumulate=True)
        return out.scatter_add_(0, tok[:, None].expand(-1, WIDTH), rows)


alike = st.lists(st.sampled_from(sorted(ALIKE)), min_size=1, max_size=3).map(tuple)
one_other = st.tuples(st.sampled_from(sorted(ALIKE)), st.sampled_from(sorted(OTHERS)), st.sampled_from(sorted(ALIKE)))
plans = st.builds(
    Plan,
    st.sampled_from(QUERIES),
    st.one_of(alike, alike, alike, one_other),
    st.sampled_from(MERGES),
    st.booleans(),
    st.sampled_from([(0, EXPERTS), (0, EXPERTS), (1, EXPERTS), (0, 2)]),
    st.integers(0, 11).map(lambda number: number == 5),
    st.sampled_from([1, 5, 12]),
    st.sampled_from(["", "", "", "", "", "", "elsewhere", "input", "sum", "routing", "tokens"]),
    st.sampled_from(["auto", "auto", "slices", "grouped"]),
    st.sampled_from(["", "", "", "down", "turned"]),
)
seen: Counter[str] = Counter()


@pytest.mark.slow
@pytest.mark.timeout(1500)  # two minutes, and much more on a busy machine
@hypothesis.settings(
    max_examples=200,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
)
@hypothesis.given(plans)
def test_equal_results_and_gradients(plan: Plan) -> None:
    """One compilation for each program, and three batches: tokens at random, all alike, and each its own."""
    torch._dynamo.reset()
    torch.manual_seed(4)
    x = torch.randn(plan.tokens, WIDTH)
    batches = [x, x[:1].expand_as(x).clone(), torch.eye(plan.tokens, WIDTH) * 3]
    lowering = "aot_eager" if plan.checkpointed else "eager"  # a checkpoint is one only where autograd sees it
    with flags.scoped(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = assert_same(
            Program(plan), [(batch.requires_grad_(),) for batch in batches], lowering, 2e-5,
            experts=plan.level, passes=["group_experts"], capture="off",
        )  # fmt: skip
    figures = record.figures("group_experts")
    seen["grouped" if figures.get("loops_grouped") else "sliced" if figures.get("loops_sliced") else "left"] += 1


def test_the_programs_are_of_all_kinds() -> None:
    """Runs after the test above: programs that no pass touches would show nothing."""
    if not seen:
        pytest.skip("the random programs were not run")
    assert min(seen["grouped"], seen["sliced"], seen["left"]) >= 10, seen
