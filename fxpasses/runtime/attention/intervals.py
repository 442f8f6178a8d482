"""What each row of a mask sees: its first and last column, and whether an interval says it all.

A mask is read once, in blocks of rows, so that one that is computed block by block is never held. Reading goes eight
columns at a time; `sum` and `argmax` over bool are 5 to 10 times as slow on the CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

_LANES = 8  # bytes of a word
_CHUNK = 128 * _LANES  # columns whose bytes add up to at most 128 in each lane


class Intervals(NamedTuple):
    """For rows [..., R] of a mask.

    first, last: int32; the row sees columns first to last - 1 at most, and none where both are 0.
    irregular: bool; the row has holes between them, or weights its columns by values other than 0.
    """

    first: torch.Tensor
    last: torch.Tensor
    irregular: torch.Tensor


def ruled_out(dtype: torch.dtype) -> float:
    """The largest additive value that surely leaves a pair no weight, where its row has a pair with value 0.

    Attention weighs by the exponential of scores: scores of one row would have to differ by more than this for a
    ruled-out pair to show. -1e4, which old models use, is kept as a value.
    """
    return max(-1e9, torch.finfo(dtype).min / 2)


def intervals_of(block: torch.Tensor) -> Intervals:
    """block: rows of a mask, bool (True: may attend) or additive, [..., R, K].

    A row of an additive mask that rules everything out by finite values sees everything: its weights come from the
    scores again, and that is what PyTorch computes. With -inf it sees nothing.
    """
    if block.dtype == torch.bool:
        first, last, count = _bounds(block)
        return Intervals(first, last, count != last - first)
    allowed = ~(block <= ruled_out(block.dtype))  # NaN is a value like any other
    first, last, count = _bounds(allowed)
    valued = ((block != 0) & allowed).any(-1)
    blind = count == 0
    if blind.any():
        allowed = allowed | (blind.unsqueeze(-1) & (block != float("-inf")))
        first, last, count = _bounds(allowed)
        valued = valued | (blind & (count > 0))
    return Intervals(first, last, valued | (count != last - first))


def has_blind_rows(rows: torch.Tensor) -> bool:
    """Whether one of the rows [..., K] of an additive mask is hidden by finite values throughout, but for -inf."""
    if not rows.numel():
        return False
    most = rows.amax(-1)
    return bool(((most <= ruled_out(rows.dtype)) & (most != float("-inf"))).any())


def _bounds(allowed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first column allowed, the one after the last, and how many: int32 [..., R]."""
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
