"""Random programs that loop over parts: a body of several operators, lists of its values, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.sequences.comparing import WIDTH, Program


def written(h: Tensor, other: Tensor) -> Tensor:
    rows = torch.zeros_like(h)
    rows[: h.shape[0] // 2] = 1
    rows[:, 1] = other[:, 1]
    return h * rows + h


# Of the rows h and other rows of a part, [u, WIDTH] each, and w: rows.
STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda h, other, w: F.linear(h, w, w[0]),
    "product": lambda h, other, w: (h @ w).tanh(),
    "other": lambda h, other, w: h * other.sigmoid() + other,
    "centred": lambda h, other, w: h - h.mean(0),
    "centred by the other": lambda h, other, w: h - other.mean(0, keepdim=True),
    "scaled by the sum": lambda h, other, w: h * (other.sum(0) @ w).sigmoid(),
    "scaled by a number": lambda h, other, w: h * h.mean().tanh(),
    "of a row": lambda h, other, w: h / (h.square().sum(-1, keepdim=True) + 1),
    "gated": lambda h, other, w: torch.cat([h[:, :3].relu(), other[..., 3:]], -1),
    "halves": lambda h, other, w: torch.mul(*h.chunk(2, -1)).repeat_interleave(2, -1),
    "norm": lambda h, other, w: F.layer_norm(h, (WIDTH,)),
    "softmax": lambda h, other, w: h.softmax(-1) - h.log_softmax(-1) / 9,
    "choice": lambda h, other, w: torch.where(other > 0, h, other.mean(0)),
    "heads": lambda h, other, w: (h.view(-1, 2, 3).transpose(1, 2) * w[:3, :2]).transpose(1, 2).flatten(1),
    "permuted": lambda h, other, w: (h.unsqueeze(0).permute(2, 0, 1) * w[:, :1, None]).squeeze(1).mT,
    "attention": lambda h, other, w: F.scaled_dot_product_attention(h[None], other[None], h[None])[0],
    "causal": lambda h, other, w: F.scaled_dot_product_attention(h[None], h[None], (h @ w)[None], is_causal=True)[0],
    "weights": lambda h, other, w: ((h @ w) @ other.mT / 3).softmax(-1) @ h,
    "detached": lambda h, other, w: h + other.detach(),
    "dtype": lambda h, other, w: h + other.float().double(),
    "several dimensions": lambda h, other, w: (h[:, None] * w).mean(1),
    # Not for all parts at once.
    "running": lambda h, other, w: h.cumsum(0) / 4,
    "backwards": lambda h, other, w: h + h.flip(0),
    "scores": lambda h, other, w: (h @ other.mT / 9).tanh() @ h,
    "by size": lambda h, other, w: h * 2 if h.shape[0] > 2 else h,
    "mixed": lambda h, other, w: (h.reshape(-1, 3) * w[0, :3]).reshape(-1, WIDTH),
    "in place": lambda h, other, w: (h * 2).add_(other).clamp_(-2),
    "written": lambda h, other, w: written(h, other),
    "dropout": lambda h, other, w: F.dropout(h, 0.4),
    "nested": lambda h, other, w: torch.cat([part - part.mean(0) for part in h.split(2)]),
    "nested of the other": lambda h, other, w: sum((part.sum(0) for part in other.split(3)), h),
}
UNBATCHED = (
    "running",
    "backwards",
    "scores",
    "by size",
    "mixed",
    "in place",
    "written",
    "dropout",
    "nested",
    "nested of the other",
)

# Of rows: one value for each part.
VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda h, w: h.sum(0),
    "mean": lambda h, w: h.mean(0) @ w,
    "kept": lambda h, w: h.sum(0, keepdim=True).tanh(),
    "number": lambda h, w: h.square().sum(),
    "matrix": lambda h, w: h.view(-1, 2, 3).sum(0).permute(1, 0),
    "outer": lambda h, w: h.sum(0)[:, None] * h.sum(0).tanh(),
}

# Of a list of rows, and of a list of values.
JOINS_OF_ROWS: dict[str, Callable[[list[Tensor]], Any]] = {
    "cat": torch.cat,
    "pad": lambda rows: pad_sequence(rows, batch_first=True, padding_value=0.5),
    "pad first": pad_sequence,
    "length": lambda rows: torch.cat(rows) * len(rows),
    "element": lambda rows: (rows[0], torch.cat(rows)),
    "returned": lambda rows: rows,
}
JOINS_OF_VALUES: dict[str, Callable[[list[Tensor]], Any]] = {
    "stack": torch.stack,
    "stack last": lambda values: torch.stack(values, -1),
    "sum": sum,
    "cat": lambda values: torch.cat([value.flatten() for value in values]),
    "cat of stack": lambda values: torch.stack(values).flatten(),
}


@dataclass(frozen=True)
class Plan:
    """steps: of the body, each with whether the other rows are those of y. value, carries: what else the body makes.
    again: whether a second loop takes the results of the first. skips: parts of fewer rows, which a loop that appends
    leaves out.
    """

    steps: tuple[tuple[str, bool], ...]
    value: str
    join_rows: str
    join_values: str
    spelling: str
    carries: bool
    again: bool
    skips: int = 0


def program_of(plan: Plan) -> Program:
    def body(one: Tensor, other: Tensor, w: Tensor) -> Tensor:
        h = one
        for name, is_of_y in plan.steps:
            h = STEPS[name](h, other if is_of_y else one, w)
        return h

    def appended(x: Tensor, y: Tensor, w: Tensor, sizes: list[int]) -> Any:
        rows, values, total = [], [], 0
        for one, other in zip(x.split(sizes), y.split(sizes), strict=True):
            if one.shape[0] < plan.skips:
                continue
            h = body(one, other, w)
            rows.append(h)
            values.append(VALUES[plan.value](h, w))
            if plan.carries:
                total = total + h.tanh().sum()
        return rows, values, total

    def comprehended(x: Tensor, y: Tensor, w: Tensor, sizes: list[int]) -> Any:
        rows = [body(one, other, w) for one, other in zip(x.split(sizes), y.split(sizes), strict=True)]
        values = [VALUES[plan.value](h, w) for h in rows]
        total = sum([h.tanh().sum() for h in rows]) if plan.carries else 0
        return rows, values, total

    def program(x: Tensor, y: Tensor, w: Tensor, lengths: Tensor, targets: Tensor) -> Any:
        sizes = lengths.tolist()
        loop = appended if plan.spelling == "appended" else comprehended
        rows, values, total = loop(x, y, w, sizes)
        if plan.again:
            rows = [h - part.mean(0) for h, part in zip(rows, x.split(sizes), strict=plan.skips == 0)]
        return JOINS_OF_ROWS[plan.join_rows](rows), JOINS_OF_VALUES[plan.join_values](values), total

    return program
