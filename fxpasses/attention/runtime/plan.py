"""A plan: one int32 tensor on the CPU that describes in tiles which pairs a mask allows. It refers to nothing else.

| words | content |
|---|---|
| 8 | `Header` |
| `most_tiles(rows) * B * H` x 9 | tiles: elements, heads, rows and columns as [from, to), and a `Kind` |
| B x H x rows x 2 | the interval of columns that each row attends to |
| B x H x rows x columns / 32 | only in a plan made in blocks: the bits of irregular rows |

Its size depends only on the mask's, so no batch recompiles. The system allocates the memory of the bits when it is
written to: documents and windows never touch it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from fxpasses.attention.runtime import cost, tiles
from fxpasses.attention.runtime.cost import heads_in_sequence
from fxpasses.attention.runtime.intervals import Intervals, has_blind_rows, intervals_of

Rows = Callable[[int, int], torch.Tensor]
_BLOCK = 1 << 21  # pairs of a mask that are read together
_BITS = 32


class Kind(IntEnum):
    FULL = 0  # each row attends to every column
    INTERVALS = 1  # each row attends to its interval
    VALUES = 2  # the mask itself decides, or the bits
    CAUSAL = 3  # a square; each row attends to the columns up to its own


class Header(NamedTuple):
    """tiled: 0 for a dense plan, which has neither tiles nor sizes. in_blocks: whether bits follow.

    blind: whether finite values of an additive mask, or NaN, rule out all of some row.
    """

    tiled: int
    tiles: int
    batch: int
    heads: int
    rows: int
    columns: int
    in_blocks: int
    blind: int = 0


class PlacedTile(NamedTuple):
    """A tile of the elements [b0, b1) of the batch and the heads [h0, h1)."""

    b0: int
    b1: int
    h0: int
    h1: int
    start: int
    stop: int
    left: int
    right: int
    kind: int

    def pairs(self, batch: int, heads: int) -> int:
        """The pairs that the tile computes if each element and head of the plan stands for `batch` and `heads` ones."""
        rows, columns = self.stop - self.start, self.right - self.left
        pairs = rows * (rows + 1) // 2 if self.kind == Kind.CAUSAL else rows * columns
        return (self.b1 - self.b0) * batch * (self.h1 - self.h0) * heads * pairs


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan's numbers. first, last: int32 [B, H, rows]. bits: int32 [B, H, rows, words] if it was made in blocks."""

    header: Header
    tiles: tuple[PlacedTile, ...]
    first: torch.Tensor
    last: torch.Tensor
    bits: torch.Tensor | None

    @property
    def is_dense(self) -> bool:
        return not self.header.tiled


def plan_size(batch: int, heads: int, rows: int, columns: int, in_blocks: bool = False) -> int:
    """The number of words in a plan; sizes may be symbolic."""
    table = tiles.most_tiles(rows) * len(PlacedTile._fields)
    bits = rows * ((columns + _BITS - 1) // _BITS) if in_blocks else 0
    return len(Header._fields) + batch * heads * (table + 2 * rows + bits)


def words_of_bits(words: int, rows: int, columns: int) -> int:
    """How many words of a plan that was made in blocks are bits. words: in all."""
    elements = (words - len(Header._fields)) // (plan_size(1, 1, rows, columns, in_blocks=True) - len(Header._fields))
    return words - plan_size(elements, 1, rows, columns)


def four_dimensional(mask: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """A mask of 2 to 4 dimensions as [B or 1, H or 1, rows, columns], as SDPA broadcasts it."""
    if not 2 <= mask.dim() <= 4:
        raise ValueError(f"a mask has 2 to 4 dimensions, but this one is {tuple(mask.shape)}")
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask if rows is None else mask.expand(-1, -1, rows, -1)


def plan_of(mask: torch.Tensor, heads: int) -> torch.Tensor:
    """The plan of a mask [B, H, rows, columns]: bool (True: may attend) or additive, on the CPU; any strides.

    heads: the number of heads that share one head of the mask. The plan is dense if tiles would save less than a tenth.
    """
    # An expanded dimension is read once; the plan holds for all of it.
    batch, mask_heads, rows, columns = mask.shape
    once = mask[: 1 if mask.stride(0) == 0 else batch, : 1 if mask.stride(1) == 0 else mask_heads]
    repeated = rows > 1 and mask.stride(2) == 0
    if repeated:
        once = once[:, :, :1]
    blind = False

    def check(start: int, block: torch.Tensor, irregular: torch.Tensor) -> None:
        nonlocal blind
        if not blind and block.dtype != torch.bool:
            blind = has_blind_rows(block[irregular])

    intervals = _read(lambda start, stop: once[:, :, start:stop], (*once.shape[:2], once.shape[2], columns), check)
    if repeated:
        intervals = Intervals(*(part.expand(*part.shape[:2], rows) for part in intervals))
    placed = _place(intervals, (batch, mask_heads), heads)
    computed = sum(_price(tile, heads) for tile in placed)
    all_heads = heads_in_sequence(heads * batch * mask_heads)
    worthwhile = computed <= cost.WORTHWHILE * cost.dense(rows, columns, all_heads)
    plan = torch.zeros(plan_size(batch, mask_heads, rows, columns), dtype=torch.int32)
    if worthwhile:
        _write(plan, Header(1, len(placed), batch, mask_heads, rows, columns, 0, blind), placed, intervals)
    else:
        plan[Header._fields.index("blind")] = blind
    return plan


def plan_in_blocks(rows: Rows, shape: tuple[int, int, int, int], heads: int) -> torch.Tensor:
    """The plan of a mask that never exists as a whole.

    rows: `rows(start, stop)` returns bool [B, H, stop - start, columns]. shape: [B, H, rows, columns] of the mask. Such
    a plan is never dense, so nothing needs the mask.
    """
    plan = _untouched(plan_size(*shape, in_blocks=True))
    words = (shape[3] + _BITS - 1) // _BITS
    bits = plan[plan_size(*shape) :].view(*shape[:3], words)

    def keep(start: int, block: torch.Tensor, irregular: torch.Tensor) -> None:
        if irregular.any():
            bits[:, :, start : start + block.shape[2]][irregular] = pack(block[irregular])

    intervals = _read(rows, shape, keep)
    placed = _place(intervals, shape[:2], heads)
    _write(plan, Header(1, len(placed), *shape, 1), placed, intervals)
    return plan


def read(plan: torch.Tensor) -> Plan:
    """A plan's numbers; its intervals and bits are views."""
    header = Header(*plan[: len(Header._fields)].tolist())
    fields = len(PlacedTile._fields)
    begin = len(Header._fields)
    table = plan[begin : begin + header.tiles * fields].view(header.tiles, fields)
    shape = (header.batch, header.heads, header.rows)
    begin += header.batch * header.heads * tiles.most_tiles(header.rows) * fields
    end = begin + 2 * header.batch * header.heads * header.rows
    first, last = plan[begin:end].view(2, *shape)
    bits = plan[end:].view(*shape, -1) if header.in_blocks else None
    return Plan(header, tuple(PlacedTile(*row) for row in table.tolist()), first, last, bits)


def pack(block: torch.Tensor) -> torch.Tensor:
    """bool [..., columns] -> int32 [..., words], the first column in the lowest bit."""
    padded = torch.nn.functional.pad(block, (0, -block.shape[-1] % _BITS))
    weights = torch.ones(_BITS, dtype=torch.int64, device=block.device) << torch.arange(_BITS, device=block.device)
    return (padded.unflatten(-1, (-1, _BITS)) * weights).sum(-1).to(torch.int32)


def unpack(bits: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """Columns [left, right) of int32 [..., words], as bool."""
    words = bits[..., left // _BITS : (right + _BITS - 1) // _BITS]
    shifts = torch.arange(_BITS, dtype=torch.int32, device=bits.device)
    columns = ((words.unsqueeze(-1) >> shifts) & 1).flatten(-2).bool()
    return columns[..., left % _BITS : left % _BITS + right - left]


def _read(rows: Rows, shape: tuple[int, ...], keep: Callable[..., None] | None = None) -> Intervals:
    batch, heads, count, columns = shape
    # Written in place, not concatenated: small tensors that stay alive would fragment the heap between the blocks.
    bounds = torch.empty(2, batch, heads, count, dtype=torch.int32)
    first, last = bounds
    intervals = Intervals(first, last, torch.empty(batch, heads, count, dtype=torch.bool))
    for start, stop in _steps(count, max(1, _BLOCK // max(1, batch * heads * columns))):
        block = rows(start, stop)
        for whole, part in zip(intervals, intervals_of(block), strict=True):
            whole[..., start:stop] = part
        if keep is not None:
            keep(start, block, intervals.irregular[..., start:stop])
    return intervals


def _steps(count: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, step):
        yield start, min(count, start + step)


def _place(intervals: Intervals, extent: tuple[int, int], heads: int) -> list[PlacedTile]:
    """The tiles of each run of elements and heads with equal rows. extent: elements and heads of the mask itself."""
    lists = [part.tolist() for part in intervals]
    rows = [[_Rows(*head) for head in zip(*element, strict=True)] for element in zip(*lists, strict=True)]
    placed = []
    for b0, b1, h0, h1 in _equal_ranges(rows):
        first, last, irregular = rows[b0][h0]
        where = (b0, extent[0] if len(rows) == 1 else b1, h0, extent[1] if len(rows[0]) == 1 else h1)
        share = heads * (where[1] - where[0]) * (where[3] - where[2])
        for tile in tiles.cut(first, last, heads_in_sequence(share)):
            if True in irregular[tile.start : tile.stop]:
                kind = Kind.VALUES
            elif tiles.is_causal(tile, first, last):
                kind = Kind.CAUSAL
            else:
                kind = Kind.FULL if tiles.is_full(tile, first, last) else Kind.INTERVALS
            placed.append(PlacedTile(*where, *tile, kind))
    return placed


class _Rows(NamedTuple):
    """The `Intervals` of one element and head as lists."""

    first: list[int]
    last: list[int]
    irregular: list[bool]

    def equals(self, other: _Rows) -> bool:
        """Whether both have the same intervals and no irregular rows."""
        return True not in self.irregular and True not in other.irregular and self == other


def _equal_ranges(rows: list[list[_Rows]]) -> Iterator[tuple[int, int, int, int]]:
    """Runs of equal neighbours: ranges of elements, or of the heads within each element."""
    heads = len(rows[0]) if rows else 0
    if heads == 1 or all(head.equals(element[0]) for element in rows for head in element):
        for b0, b1 in _runs([element[0] for element in rows]):
            yield b0, b1, 0, heads
        return
    for b, element in enumerate(rows):
        for h0, h1 in _runs(element):
            yield b, b + 1, h0, h1


def _runs(rows: list[_Rows]) -> Iterator[tuple[int, int]]:
    start = 0
    for stop in range(1, len(rows) + 1):
        if stop == len(rows) or not rows[start].equals(rows[stop]):
            yield start, stop
            start = stop


def _price(placed: PlacedTile, heads: int) -> float:
    share = heads_in_sequence(heads * (placed.b1 - placed.b0) * (placed.h1 - placed.h0))
    return tiles.price(tiles.Tile(*placed[4:8]), share, placed.kind == Kind.CAUSAL)


def _write(plan: torch.Tensor, header: Header, placed: list[PlacedTile], intervals: Intervals) -> None:
    """Fill in a plan of zeros."""
    fields, begin = len(PlacedTile._fields), len(Header._fields)
    plan[:begin] = torch.tensor(header, dtype=torch.int32)
    if placed:
        plan[begin : begin + len(placed) * fields] = torch.tensor(placed, dtype=torch.int32).flatten()
    shape = (header.batch, header.heads, header.rows)
    begin += header.batch * header.heads * tiles.most_tiles(header.rows) * fields
    words = plan[begin : begin + 2 * math.prod(shape)]
    words.view(2, *shape).copy_(torch.stack(intervals[:2]))


def _untouched(words: int) -> torch.Tensor:
    """Zeros that occupy no memory until they are written."""
    return torch.frombuffer(mmap.mmap(-1, 4 * words), dtype=torch.int32)
