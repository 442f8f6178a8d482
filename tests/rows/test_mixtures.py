"""Mixtures of experts, whose live tokens are sorted by expert, by the program or by `group_experts`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rows.models import WIDTH, Exit, Model
from tests.rows.test_live_rows import BATCHES, check, first_token, loss


class Mixture(Model):
    """Experts as transformers computes them: tokens sorted by expert, one product by groups, and back."""

    def __init__(self, exit: Exit, counted: bool = False, decoy: str = "") -> None:
        import transformers.integrations.moe  # noqa: F401

        super().__init__(exit)
        self.decoy = decoy
        self.router = torch.nn.Linear(WIDTH, 4)
        self.up = torch.nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)
        self.bias = torch.nn.Parameter(torch.randn(4, WIDTH))
        self.counted = counted

    def forward(self, ids: Tensor, seen: Tensor, labels: Tensor) -> Any:
        x = self.embedding(ids)
        x, _ = self.experts(self.layers[0](x, seen.bool()[:, None, None], False))
        x, counts = self.experts(self.layers[1](x, None, True))
        found = self.exit(self, x, seen, labels)
        return (found, counts * self.router.weight.sum()) if self.counted else found

    def experts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        grouped_mm = torch.ops.transformers.grouped_mm_fallback  # PyTorch's own takes no float64
        rows = x.view(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        weights /= weights.sum(-1, keepdim=True)
        flat = chosen.reshape(-1).clone()
        if self.decoy == "uncounted":
            flat.masked_fill_(weights.detach().reshape(-1) < 0.4, -1)
        experts, order = flat.sort(descending=self.decoy == "descending")
        counts = torch.histc(experts.float(), bins=4, min=0, max=3)
        if self.decoy == "moved":
            counts = counts.roll(1)
        elif self.decoy == "of another":
            counts = torch.histc(self.router(rows.sin()).topk(2)[1].reshape(-1).float(), bins=4, min=0, max=3)
        elif self.decoy == "changed":
            order = order.flip(0)
        elif self.decoy == "bools":
            counts = counts.bool()
        own = order // 2
        if self.decoy == "of one row":
            own.mul_(0)
        y = grouped_mm(rows[own], self.up, offs=counts.cumsum(0, dtype=torch.int32))
        y = (y + self.bias[experts]) * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        if self.decoy == "first places":
            back.clamp_(max=1)
        return x + y[back].view(*rows.shape[:1], 2, WIDTH).sum(1).view(x.shape), counts


@pytest.mark.quick(1)
@pytest.mark.parametrize("exit", [loss, first_token])
@pytest.mark.parametrize("dynamic", [None, True])
def test_mixtures(exit: Exit, dynamic: bool | None) -> None:
    check(Mixture(exit), BATCHES[:4], dynamic=dynamic)


@pytest.mark.parametrize(
    "decoy",
    ["descending", "moved", "of another", "changed", "uncounted", "bools", "of one row", "first places"],
)
def test_mixtures_in_which_rows_depend_on_others(decoy: str) -> None:
    check(Mixture(loss, decoy=decoy), BATCHES[:2], taken=False)


def test_a_mixture_whose_choices_are_counted_for_all_rows() -> None:
    check(Mixture(loss, counted=True), BATCHES[:3], taken=False)


class LoopMixture(Model):
    """A loop over experts, which `group_experts` has made one program before. kind: how the loop is written."""

    def __init__(self, exit: Exit, kind: str = "") -> None:
        super().__init__(exit)
        self.kind = kind
        self.router = torch.nn.Linear(WIDTH, 4)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.SiLU(), torch.nn.Linear(8, WIDTH)) for _ in range(4)
        )

    def forward(self, ids: Tensor, seen: Tensor, labels: Tensor) -> Any:
        x = self.embedding(ids)
        x = self.mixture(self.layers[0](x, seen.bool()[:, None, None], False))
        x = self.mixture(self.layers[1](x, None, True))
        return self.exit(self, x, seen, labels)

    def mixture(self, x: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            index, slot = torch.where(chosen == number)
            if self.kind == "skips" and index.numel() == 0:
                continue
            own = rows[index]
            if self.kind == "means":
                own = own - own.mean(0)
            out[index] += weights[index, slot, None] * expert(own)
        return x + out.view(x.shape)


@pytest.mark.quick(1)
@pytest.mark.parametrize("exit", [loss, first_token])
def test_loops_over_experts(exit: Exit) -> None:
    check(LoopMixture(exit), BATCHES[:4])


@pytest.mark.parametrize("kind", ["skips", "means"])
def test_loops_in_which_the_rows_of_an_expert_matter(kind: str) -> None:
    """An expert that only dead rows choose has a gradient of zeros, and none where it is skipped."""
    check(LoopMixture(loss, kind), BATCHES[:4], taken=False)
