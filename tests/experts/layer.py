"""A router and stacked experts around one loop, and how far `group_experts` gets with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpasses.inspect import Record
from tests.support import assert_same

WIDTH, EXPERTS, TOKENS = 8, 4, 10


class Layer(nn.Module):
    """A router and stacked experts around `loop(layer, x, weights, idx)`."""

    def __init__(self, loop: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.loop = loop
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Any:
        scores = self.gate(x).softmax(-1)
        weights, idx = scores.topk(2, dim=-1)[0], scores.detach().topk(2, dim=-1)[1]  # so that `idx` may be written to
        return self.loop(self, x, weights, idx)


def check(loop: Callable[..., Any], lowering: str = "eager", level: str = "auto", tolerance: float = 0.0) -> Record:
    torch.manual_seed(6)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    return assert_same(Layer(loop), [(x,)], lowering, tolerance, experts=level)


def level_of(record: Record) -> int:
    figures = record.figures("group_experts")
    return 2 if figures.get("loops_grouped") else 1 if figures.get("loops_sliced") else 0


Loop = Callable[..., Any]
Step = Callable[[Layer, int, Tensor, Tensor], Tensor]


def product(layer: Layer, e: int, x: Tensor, tok: Tensor) -> Tensor:
    return x[tok] @ layer.w[e]


def add_all(
    layer: Layer,
    x: Tensor,
    weights: Tensor,
    idx: Tensor,
    experts: Iterable[int] = range(EXPERTS),
    step: Step = product,
    masks: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """The ordinary loop: `step(layer, e, x, tok)` of an expert's tokens, times their scores, is added in place.

    masks: by expert, and not `idx == e`. out: what it is added to, if not to zeros.
    """
    out = torch.zeros_like(x) if out is None else out
    for e in experts:
        tok, slot = torch.where(idx == e if masks is None else masks[e])
        out.index_add_(0, tok, step(layer, e, x, tok) * weights[tok, slot, None])
    return out


def looping(step: Step, experts: Iterable[int] = range(EXPERTS)) -> Callable[..., Tensor]:
    return lambda *given: add_all(*given, experts, step)


# What `written` may do for an expert: ask for its pairs, compute its rows, and add them.
PAIRS = "tok, slot = torch.where(idx == e); y = (x[tok] @ w[e]) * weights[tok, slot, None]"
ADD = f"{PAIRS}; out.index_add_(0, tok, y)"


def source(name: str, text: str, **names: Any) -> Callable[..., Any]:
    """The function NAME that `text` defines, under another name."""
    namespace: dict[str, Any] = {"torch": torch, "F": F, **names}
    exec(compile(text.replace("NAME", name), f"<{name}>", "exec"), namespace)
    return namespace[name]


def written(
    body: str,
    before: str = "pass",
    result: str = "out",
    *,
    start: str = "torch.zeros_like(x)",
    experts: str = "range(EXPERTS)",
    **names: Any,
) -> Loop:
    """The loop that does what `body` says for each expert e, with its weight w[e]. All are given as source.

    names: what the source uses besides.
    """
    text = f"""
def NAME(layer, x, weights, idx):
    w = layer.w
    out = {start}
    {before}
    for e in {experts}:
        {body}
    return {result}
"""
    return source("written", text, EXPERTS=EXPERTS, WIDTH=WIDTH, TOKENS=TOKENS, **names)
