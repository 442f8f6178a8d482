"""Batches with sound or images beside their text: whichever of the usual formats a model accepts."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.batches import accepted, of_text


def batch(task: str, model: torch.nn.Module, layout: str, number: int) -> dict[str, Any]:
    """A batch for a task in a layout; the number tells apart the batches of a layout."""
    return accepted(model, of_text(task, layout, number))
