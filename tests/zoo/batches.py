"""Batches of text for each task and layout, drawn from a seed.

Two batches of one layout have the same shapes and keys and differ in their lengths, so that nothing needs to compile
again for the second.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.zoo.tiny import FIRST, LAST, SPECIAL

IGNORED = -100  # the label of a token that has none
ROWS, LENGTH = 3, 16
PACKED_LENGTHS = [(5, 8, 7, 4), (9, 3, 4, 8)]
PADDED_LENGTHS = [(16, 9, 12), (7, 16, 10)]
TARGET_LENGTH = 10

Batch = dict[str, torch.Tensor]


def text(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Identifiers of tokens, int64."""
    return torch.randint(FIRST, LAST + 1, shape, generator=torch.Generator().manual_seed(seed))


def packed(number: int) -> Batch:
    """Four sequences in one row [1, 24]: the positions, from 0 in each, tell where one begins."""
    lengths = PACKED_LENGTHS[number]
    ids = text((1, sum(lengths)), number)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = torch.where(positions == 0, IGNORED, ids)
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def padded(number: int, side: str) -> Batch:
    """Three sequences [3, 16] that are padded on a side, with a mask [3, 16]."""
    lengths = torch.tensor(PADDED_LENGTHS[number])[:, None]
    places = torch.arange(LENGTH)[None]
    real = places >= LENGTH - lengths if side == "left" else places < lengths
    ids = torch.where(real, text((ROWS, LENGTH), number), SPECIAL["pad"])
    return {"input_ids": ids, "attention_mask": real.long(), "labels": torch.where(real, ids, IGNORED)}


def of_text(task: str, layout: str, number: int) -> Batch:
    """layout: "packed", "padded" (the first batch left, the second right), "left" or "right"."""
    if layout == "packed":
        return packed(number)
    side = ("left", "right")[number] if layout == "padded" else layout
    batch = padded(number, side)
    if task == "classification":
        # Encoder-decoder pairs read the class at the token that ends a sequence.
        ids, real = batch["input_ids"], batch["attention_mask"]
        places = torch.arange(LENGTH) * real
        batch["input_ids"] = ids.scatter(1, places.argmax(1, keepdim=True), SPECIAL["eos"])
        batch["labels"] = torch.tensor([0, 1, 0]) if number == 0 else torch.tensor([1, 1, 0])
    elif task == "seq2seq":
        batch["labels"] = text((ROWS, TARGET_LENGTH), 100 + number)
    return batch


def accepted(model: torch.nn.Module, batch: Batch) -> dict[str, Any]:
    """The batch with what this model's forward takes, without a cache."""
    parameters = inspect.signature(model.forward).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    kept: dict[str, Any] = {name: value for name, value in batch.items() if anything or name in parameters}
    if "use_cache" in parameters:
        kept["use_cache"] = False
    return kept
