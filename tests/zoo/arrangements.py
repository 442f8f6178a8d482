"""In which arrangements an architecture is run."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Tasks whose batches can be packed: positions begin anew with each sequence.
PACKS = ("causal",)


@dataclass(frozen=True)
class Arrangement:
    """layout: as in `batches.of_text`; experts: None for the model's default."""

    layout: str
    checkpoints: bool
    experts: str | None = None

    @property
    def key(self) -> str:
        parts = [self.layout, "checkpoints" * self.checkpoints, f"{self.experts} experts" * (self.experts is not None)]
        return ", ".join(filter(None, parts))


def arrangements(task: str, model: torch.nn.Module, experts: bool, every: bool) -> Iterator[Arrangement]:
    """Those that a model can run in: each setting of each factor, or with `every` all combinations of them."""
    can_pack = task in PACKS and "position_ids" in inspect.signature(model.forward).parameters
    can_checkpoint = bool(getattr(model, "supports_gradient_checkpointing", False))
    if every:
        layouts = ["packed"] * can_pack + ["left", "right"]
        for found in itertools.product(layouts, [False, True][: 1 + can_checkpoint], [None, "eager"][: 1 + experts]):
            yield Arrangement(*found)
        return
    if can_pack:
        yield Arrangement("packed", checkpoints=can_checkpoint)
    yield Arrangement("padded", checkpoints=can_checkpoint and not can_pack)
    if experts:
        if can_pack:
            yield Arrangement("packed", checkpoints=False, experts="eager")
        yield Arrangement("padded", checkpoints=can_checkpoint, experts="eager")
