"""Small programs that the tests of records compile, with the eager lowering."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect
from fxpasses.inspect import Record
from tests.support import compiled


def layer(x: Any, lengths: Any) -> Any:
    mask = torch.zeros(x.shape[0], x.shape[0])
    mask[:, : lengths.max().item()] = 1
    return torch.tanh(mask @ x)


def model(x: Any, lengths: Any) -> Any:
    for _ in range(3):
        x = checkpoint(layer, x, lengths, use_reentrant=False)
    return x


def refused(x: Any, lengths: Any, weight: Any) -> Any:
    """A host read that depends on a float input, in each of two layers."""
    for _ in range(2):
        x = x * int((lengths * weight).sum().item()) + lengths.max().item()
    return x


def inputs() -> tuple[Any, Any]:
    return torch.randn(8, 4, requires_grad=True), torch.tensor([3, 5])


def recorded(program: Any = model, *given: Any, **options: Any) -> Record:
    """Under one pass: the others have nothing to do here."""
    options.setdefault("passes", ["hoist_metadata"])
    with fxpasses.inspect.record() as record:
        compiled(program, **options)(*(given or inputs()))
    return record
