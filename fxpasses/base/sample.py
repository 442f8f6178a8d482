"""What a batch looks like while a record is open: what its tokens are, and which tiles attention computes.

The first batch of a record is kept, as small plain numbers, for pictures of it. While no record is open, a step looks
at one empty list; a failure costs the record its pictures, with one warning, and the step runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fxpasses.base.containment import contained

MOST_TEXTS, MOST_RUNS, MOST_TILES = 64, 4096, 4096
LABELLED, READ, UNREAD = 0, 1, 2


@dataclass
class Sample:
    """texts: for each of the first texts, runs of tokens: a kind and a number of tokens, in turns.

    Kinds: `LABELLED`, the token's own result reaches the loss; `READ`, others read it, as they do a prompt; `UNREAD`,
    nothing does, as with padding. texts_left_out: how many more texts there are. rows, columns: of the mask of the
    first attention, of the first text and head. tiles: what it computes: from row, to row, from column, to column, and
    a `Kind` of `attention/runtime/plan.py`.
    """

    texts: list[list[int]] = field(default_factory=list)
    texts_left_out: int = 0
    rows: int = 0
    columns: int = 0
    tiles: list[list[int]] = field(default_factory=list)


_open: list[Sample] = []


def open_sample(sample: Sample) -> None:
    _open.append(sample)


def close_sample(sample: Sample) -> None:
    _open[:] = [other for other in _open if other is not sample]


def is_wanted() -> bool:
    return bool(_open)


def _for_records(take: Callable[..., None]) -> Callable[..., None]:
    """What a user's step calls: it does nothing while no record is open, and its failure is contained."""

    @functools.wraps(take)
    def taking(*args: Any) -> None:
        if is_wanted():
            with contained("keeping the first batch for a record", "The record lacks it."):
                take(*args)

    return taking


@_for_records
def take_texts(labelled: torch.Tensor, read: torch.Tensor) -> None:
    """Keep the kinds of a batch's tokens. labelled: bool [B, T]; read: bool [B, T], with the labelled ones."""
    for sample in _open:
        if not sample.texts and labelled.numel():
            kinds = torch.full(labelled.shape, UNREAD).masked_fill_(read, READ).masked_fill_(labelled, LABELLED)
            texts = [_runs(text) for text in kinds[:MOST_TEXTS]]
            if sum(map(len, texts)) <= MOST_RUNS:
                sample.texts, sample.texts_left_out = texts, max(0, len(kinds) - MOST_TEXTS)


def _runs(kinds: torch.Tensor) -> list[int]:
    """`[kind, tokens, kind, tokens, ...]` of int64 [T]."""
    values, counts = torch.unique_consecutive(kinds, return_counts=True)
    return torch.stack([values, counts], dim=1).view(-1).tolist()


@_for_records
def take_tiles(rows: int, columns: int, tiles: Iterable[Any]) -> None:
    """Keep the tiles of an attention; see `Sample`. tiles: `PlacedTile`s of `attention/runtime/plan.py`."""
    waiting = [sample for sample in _open if not sample.tiles]
    if not waiting:
        return
    first = [[t.start, t.stop, t.left, t.right, int(t.kind)] for t in tiles if t.b0 == t.h0 == 0]
    if len(first) <= MOST_TILES:
        for sample in waiting:
            sample.rows, sample.columns, sample.tiles = rows, columns, first


class Form(NamedTuple):
    """A tensor without its content."""

    shape: Sequence[Any]
    stride: Sequence[Any]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


# By the shape environment of a compilation: forms of the tensors, and the numbers, that its prologue provided for the
# first batch.
_provided: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


@_for_records
def take_provided(fakes: Sequence[Any], values: Sequence[Any]) -> None:
    """Keep the sizes of what a prologue provides. fakes: stand for `values` while a graph is compiled, and may be those
    that DDPOptimizer passes on, which say nothing."""
    shape_env = shape_env_of(fakes)
    if values is not fakes and shape_env is not None and shape_env not in _provided:
        _provided[shape_env] = [Form.of(v) if isinstance(v, torch.Tensor) else v for v in values]


def provided(shape_env: Any) -> list[Any] | None:
    """What `take_provided` kept for a compilation; None if no batch was seen."""
    return _provided.get(shape_env)


def shape_env_of(fakes: Sequence[Any]) -> Any:
    """The shape environment of fake tensors; None if there is none."""
    modes = (getattr(fake, "fake_mode", None) for fake in fakes)
    return next((mode.shape_env for mode in modes if mode is not None), None)
