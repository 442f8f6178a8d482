"""Batches: packed batches of varying numbers of sequences, without a new graph for each; and loading one batch ahead.

Dynamo unrolls `.tolist()`: a model that reads all lengths is traced for one number of sequences. Lengths that are
padded with zeros to one of a few sizes are traced once for each size; a sequence of length zero changes no mask.
`PrefetchLoader` starts the next batch's prologue before the step of the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from fxpasses.metadata.runtime.prefetch_loader import PrefetchLoader

__all__ = ["BucketCollator", "PrefetchLoader", "bucket_lengths"]


def bucket_lengths(lengths: Sequence[int] | torch.Tensor, buckets: Sequence[int] | None = None) -> torch.Tensor:
    """The lengths of the sequences in a packed batch, padded with zeros to the next bucket.

    lengths: n lengths in tokens, in order: integers, or an integer tensor [n]. buckets: the sizes to pad to, in any
    order; by default the powers of two. Returns an integer tensor [bucket], of the dtype and on the device of `lengths`
    (int64 on the CPU for integers). Raises `TypeError` for other dtypes, and `ValueError` for a negative length, for
    another number of dimensions, for wrong buckets, and for more sequences than the largest bucket holds.
    """
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.tensor(list(lengths)) if len(lengths) else torch.empty(0, dtype=torch.int64)
    given = lengths
    if given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool:
        raise TypeError(f"lengths are of dtype {given.dtype}; they count tokens, and must be integers")
    if given.ndim != 1:
        raise ValueError(f"lengths have the shape {list(given.shape)}; pass one dimension, a length for each sequence")
    if given.device.type == "cpu" and len(given) and int(given.min()) < 0:
        raise ValueError(f"lengths hold {int(given.min())}; a sequence has 0 tokens or more")
    size = _bucket(len(given), buckets)
    return torch.cat([given, given.new_zeros(size - len(given))])


def check_buckets(buckets: Any) -> None:
    """Raise `ValueError` for anything but None or sizes from 1 on."""
    if buckets is None:
        return
    is_list = isinstance(buckets, Sequence) and not isinstance(buckets, (str, bytes)) and len(buckets) > 0
    if not is_list or not all(isinstance(size, Integral) and int(size) > 0 for size in buckets):
        raise ValueError(f"buckets are {buckets!r}; pass numbers of sequences, from 1 on, such as [8, 16, 32]")


def _bucket(count: int, buckets: Sequence[int] | None) -> int:
    check_buckets(buckets)
    if buckets is None:
        return 1 << max(0, count - 1).bit_length()
    fitting = [size for size in buckets if size >= count]
    if not fitting:
        raise ValueError(f"the batch has {count} sequences, and the largest of the buckets {list(buckets)} is smaller")
    return min(fitting)


class BucketCollator:
    """A collator that adds `lengths`, padded to a bucket, to the batches of another collator.

    collate: makes a batch (a mapping) from features; by default transformers' `DataCollatorWithFlattening`, which packs
    them into one row. buckets: see `bucket_lengths`. Each feature is a mapping with `input_ids`.
    """

    def __init__(
        self,
        collate: Callable[[list[Mapping[str, Any]]], Mapping[str, Any]] | None = None,
        buckets: Sequence[int] | None = None,
    ) -> None:
        check_buckets(buckets)
        if collate is None:
            from transformers import DataCollatorWithFlattening

            collate = DataCollatorWithFlattening(return_tensors="pt")
        self.collate = collate
        self.buckets = buckets

    def __call__(self, features: list[Mapping[str, Any]]) -> dict[str, Any]:
        lengths = bucket_lengths([len(feature["input_ids"]) for feature in features], self.buckets)
        return {**self.collate(features), "lengths": lengths}
