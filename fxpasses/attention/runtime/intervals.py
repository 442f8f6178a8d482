"""The columns that each row of a mask attends to: first, last, and whether the interval between them is exact.

A mask is read once, in blocks of rows, so a mask that is computed block by block never exists as a whole. Eight columns
are read at a time; `sum` and `argmax` over bool are 5 to 10 times slower on the CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

_LANES = 8  # bytes of a word
_CHUNK = 128 * _LANES  # columns whose bytes add up to at most 128 in each lane


class Intervals(NamedTuple):
    """For rows [..., R] of a mask.

    first, last: int32; the row attends to columns within [first, last), and to none if both are 0.
    irregular: bool; the row has holes in that interval, or adds values other than 0 to its columns.
    """

    first: torch.Tensor
    last: torch.Tensor
    irregular: torch.Tensor


def ruled_out(dtype: torch.dtype) -> float:
    """The largest additive value that certainly gives a pair no weight if its row has a pair with value 0.

    Attention weighs pairs by the exponential of their scores: a ruled-out pair gets a weight only if two scores of its
    row differ by more than this. -1e4, which old models use, counts as a value.
    """
    return max(-1e9, torch.finfo(dtype).min / 2)


def intervals_of(block: torch.Tensor) -> Intervals:
    """block: rows of a mask, bool (True: may attend) or additive, [..., R, K].

    A row of an additive mask that rules out everything by finite values attends to everything, as in PyTorch: its
    weights depend only on the scores. A row of -inf attends to nothing.
    """
    if block.dtype == torch.bool:
        first, last, count = _bounds(block)
        return Intervals(first, last, count != last - first)
    allowed = ~(block <= ruled_out(block.dtype))  # NaN counts as a value
    first, last, count = _bounds(allowed)
    valued = ((block != 0) & allowed).any(-1)
    blind = count == 0
    if blind.any():
        allowed = allowed | (blind.unsqueeze(-1) & (block != float("-inf")))
        first, last, count = _bounds(allowed)
        valued = valued | (blind & (count > 0))
    return Intervals(first, last, valued | (count != last - first))


def has_blind_rows(rows: torch.Tensor) -> bool:
    """Whether NaN, or finite values perhaps with -inf, rule out a whole row among rows [..., K] of an additive mask."""
    if not rows.numel():
        return False
    most = rows.amax(-1)
    return bool((most.isnan() | ((most <= ruled_out(rows.dtype)) & (most != float("-inf")))).any())


def _bounds(allowed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first allowed column, the end of the last, and the number of allowed columns: int32 [..., R]."""
    columns = allowed.shape[-1]
    if columns == 0:
        none = torch.zeros(allowed.shape[:-1], dtype=torch.int32, device=allowed.device)
        return none, none, none
    padded = F.pad(allowed.view(torch.uint8), (0, -columns % _CHUNK)).contiguous()
    words = padded.view(torch.int64)
    count = words.unflatten(-1, (-1, _CHUNK // _LANES)).sum(-1).view(torch.uint8).sum(-1, dtype=torch.int32)
    seen = (words != 0).view(torch.uint8)
    word = seen.argmax(-1, keepdim=True)
    first = word * _LANES + words.gather(-1, word).view(torch.uint8).argmax(-1, keepdim=True)
    word = seen.shape[-1] - 1 - seen.flip(-1).argmax(-1, keepdim=True)
    last = (word + 1) * _LANES - words.gather(-1, word).view(torch.uint8).flip(-1).argmax(-1, keepdim=True)
    some = count > 0
    first, last = (torch.where(some, bound.squeeze(-1), 0).to(torch.int32) for bound in (first, last))
    return first, last, count
