"""Expert parallel layers in torchtitan's manner: tokens go to the process that has their expert, and come back.

`Dispatcher` is torchtitan's `ExpertParallel`, `sorted_rows` its `_permute` with padding; each is written here in few
lines, with the same reads: the splits of two all-to-alls, and the counts of the local experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, EXPERTS, TOP, ALIGN = 16, 32, 4, 2, 4


class Dispatcher:
    """Stores the splits on itself, for the way back."""

    input_splits: Any = None
    output_splits: Any = None

    def dispatch(self, module: nn.Module, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rows, counts = inputs
        with torch.no_grad():
            arriving = all_to_all_single(counts, None, None, group=dist.group.WORLD)
            arriving = torch.ops._c10d_functional.wait_tensor(arriving)
            ranks = dist.get_world_size()
            input_splits = counts.view(ranks, -1).sum(dim=1).to("cpu", non_blocking=True)
            output_splits = arriving.view(ranks, -1).sum(dim=1).to("cpu", non_blocking=False)
            self.input_splits = input_splits.tolist()
            self.output_splits = output_splits.tolist()
        rows = all_to_all_single_autograd(rows, self.output_splits, self.input_splits, dist.group.WORLD)
        return rows, arriving

    def combine(self, module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        return all_to_all_single_autograd(out, self.input_splits, self.output_splits, dist.group.WORLD)


def sorted_rows(rows: Tensor, counts: Tensor, local: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows by local expert, each expert's padded with zeros; where each came from; how many each expert has now."""
    ends = counts.cumsum(0)
    places = torch.arange(rows.shape[0])
    segment = torch.searchsorted(ends, places, right=True)
    matrix = counts.view(-1, local)
    sizes = ((matrix.sum(0).clamp(min=ALIGN) + ALIGN - 1) // ALIGN * ALIGN).to(torch.int32)
    starts = (sizes.cumsum(0) - sizes) + (matrix.cumsum(0) - matrix)
    target = starts.view(-1)[segment] + places - (ends - counts)[segment]
    source = places.new_full((rows.shape[0] + local * ALIGN,), -1).index_put((target,), places)
    return torch.vstack((rows, rows.new_zeros(rows.shape[-1])))[source], source, sizes


class Experts(nn.Module):
    """torchtitan's `GroupedExperts` with `use_grouped_mm = False`."""

    def __init__(self, local: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(local, HIDDEN, WIDTH) * 0.2)
        self.w2 = nn.Parameter(torch.randn(local, WIDTH, HIDDEN) * 0.2)
        self.w3 = nn.Parameter(torch.randn(local, HIDDEN, WIDTH) * 0.2)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        received = rows.shape[0]
        rows, source, counts = sorted_rows(rows, counts, self.w1.shape[0])
        out = rows.new_zeros((received + 1, WIDTH))
        out[source] = self.run(rows, counts)
        return out[:-1]

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        sizes = counts.tolist()
        padding = rows.shape[0] - sum(sizes)
        parts = torch.split(rows[: sum(sizes)], split_size_or_sections=sizes, dim=0)
        out = torch.cat([self.expert(e, part) for e, part in enumerate(parts)], dim=0)
        return torch.vstack((out, out.new_zeros((padding, out.shape[-1]))))

    def expert(self, e: int, rows: Tensor) -> Tensor:
        h = F.silu(torch.matmul(rows, self.w1[e].transpose(-2, -1)))
        h = h * torch.matmul(rows, self.w3[e].transpose(-2, -1))
        return torch.matmul(h, self.w2[e].transpose(-2, -1))


class ListedExperts(Experts):
    """A module for each expert."""

    def __init__(self, local: int) -> None:
        super().__init__(local)
        self.listed = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(local)
        )

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return self.listed[e](rows)


class Block(nn.Module):
    """A router, the dispatch, this process's experts and the way back, around rows [T, 16]."""

    def __init__(self, experts: type[Experts]) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts, self.dispatcher = experts(EXPERTS // dist.get_world_size()), Dispatcher()
        self.experts.register_forward_pre_hook(self.dispatcher.dispatch)
        self.experts.register_forward_hook(self.dispatcher.combine)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scores, ids = torch.topk(torch.softmax(self.gate(h), dim=1), k=TOP, dim=1)
        counts = torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS).to(torch.int64)
        order = torch.argsort(ids.view(-1), stable=True)
        tokens = (order // TOP).reshape(-1, 1).expand(-1, WIDTH)
        rows = torch.gather(h, 0, tokens) * scores.view(-1)[order].reshape(-1, 1)
        return x + torch.zeros_like(h).scatter_add(0, tokens, self.experts(rows, counts))


class Model(nn.Module):
    def __init__(self, experts: type[Experts], checkpoints: bool, layers: int) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.layers = nn.ModuleList(Block(experts) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x
