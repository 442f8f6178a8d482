"""A training step as the cases time it: forward and backward, on a batch of new tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.case import Program

Batch = Mapping[str, Any]


def fresh(batch: Batch) -> dict[str, Any]:
    """The batch as a data loader gives it: new tensors. A result that is kept for a batch must not outlive its step."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}


def training_program(
    model: nn.Module,
    loss_of: Callable[[Batch], Tensor],
    batches: Sequence[Batch],
    figures: Callable[[], Mapping[str, float]] = dict,
) -> Program:
    """loss_of: the loss of a batch, by the model or its compiled form."""
    turns = itertools.cycle(batches)

    def step() -> None:
        loss_of(fresh(next(turns))).backward()
        model.zero_grad(set_to_none=True)

    def values() -> dict[str, float]:
        loss = loss_of(fresh(batches[0]))
        loss.backward()
        norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
        found = {"loss": loss.item(), "gradient_norm": torch.stack(norms).norm().item()}
        model.zero_grad(set_to_none=True)
        return found

    return Program(step, values, batches=len(batches), figures=figures)


def packings(count: int, tokens: int, entries: int = 8) -> list[list[int]]:
    """Lengths of the sequences of packed batches, from two to `entries` of them; the same in every process."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        sequences = int(torch.randint(2, entries + 1, (), generator=generator))
        cuts = (torch.randperm(tokens - 1, generator=generator)[: sequences - 1] + 1).sort().values.tolist()
        found.append([stop - start for start, stop in itertools.pairwise([0, *cuts, tokens])])
    return found
