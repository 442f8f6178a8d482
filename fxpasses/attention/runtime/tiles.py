"""Cuts the rows of one mask into tiles, each with the columns that any of its rows attends to.

Every row is in one tile, so that one call computes its softmax; rows that attend to nothing may be in none. Documents
with a causal mask give a staircase of bands, windows a band of parallelograms, padding one rectangle, a prefix a
rectangle and a staircase; a long causal document stays whole.

Rows are lists: reading each element from a tensor would be a host read.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from fxpasses.attention.runtime import cost

SHORTEST = 16  # the least number of rows between two cuts; it bounds the number of tiles that a plan has room for
_STEP = 64  # rows between regular cuts
_LONGEST = 256  # rows of a tile that is not a rectangle; longer tiles compute more ruled-out pairs


class Tile(NamedTuple):
    """Rows [start, stop) times columns [left, right) of a mask."""

    start: int
    stop: int
    left: int
    right: int


def most_tiles(rows: int) -> int:
    """The largest number of tiles that `cut` makes of `rows` rows, which may be symbolic."""
    return rows // SHORTEST + 1


def cut(first: list[int], last: list[int], heads: float) -> list[Tile]:
    """The tiles of least cost, in order. first, last: each row's, as in `Intervals`. heads: how many share a tile."""
    cuts = _candidates(first, last)
    whole = {begin for begin, end in itertools.pairwise(cuts) if _is_long_document(begin, end, first, last)}
    spans = _spans(first, last, cuts)
    best = [0.0] + [float("inf")] * (len(cuts) - 1)
    origin = [0] * len(cuts)
    for end in range(1, len(cuts)):
        left, right = spans[end - 1]
        for begin in range(end - 1, -1, -1):
            rows = cuts[end] - cuts[begin]
            if rows > _LONGEST and begin < end - 1:
                break
            left, right = min(left, spans[begin][0]), max(right, spans[begin][1])
            total = best[begin]
            if begin == end - 1 and cuts[begin] in whole:
                total += cost.causal_square(rows, heads)
            elif right > left:
                total += cost.tile(rows, right - left, heads)
            if total < best[end]:
                best[end], origin[end] = total, begin
    chosen = [len(cuts) - 1]
    while chosen[-1] > 0:
        chosen.append(origin[chosen[-1]])
    chosen.reverse()
    tiles = []
    for begin, end in itertools.pairwise(chosen):
        left = min(span[0] for span in spans[begin:end])
        right = max(span[1] for span in spans[begin:end])
        if right > left:
            tiles.append(Tile(cuts[begin], cuts[end], left, right))
    return _join_rectangles(tiles, first, last)


def price(tile: Tile, heads: float, causal: bool) -> float:
    rows = tile.stop - tile.start
    return cost.causal_square(rows, heads) if causal else cost.tile(rows, tile.right - tile.left, heads)


def is_full(tile: Tile, first: list[int], last: list[int]) -> bool:
    """Whether the interval of each row is the tile's full width."""
    rows, count = slice(tile.start, tile.stop), tile.stop - tile.start
    return first[rows].count(tile.left) == count == last[rows].count(tile.right)


def is_causal(tile: Tile, first: list[int], last: list[int]) -> bool:
    """Whether the tile is a long causal document, which the kernel takes without a mask."""
    if tile[:2] != tile[2:]:
        return False
    return _is_long_document(tile.start, tile.stop, first, last)


def _is_long_document(begin: int, end: int, first: list[int], last: list[int]) -> bool:
    if end - begin < cost.CAUSAL_ROWS:
        return False
    return first[begin:end].count(begin) == end - begin and last[begin:end] == list(range(begin + 1, end + 1))


def _candidates(first: list[int], last: list[int]) -> list[int]:
    """Where a cut may lie: where a row's interval jumps, and at every `_STEP` rows between two jumps.

    Regular cuts are counted from the next jump: bands of one height then end in the same triangle, and share one mask.
    """
    rows = len(first)
    jumps = [r for r in range(1, rows) if abs(first[r] - first[r - 1]) > 1 or abs(last[r] - last[r - 1]) > 1]
    cuts = [0]
    for jump in [*jumps, rows]:
        if jump < rows and (jump - cuts[-1] < SHORTEST or rows - jump < SHORTEST):
            continue
        begin = cuts[-1]
        if not _is_long_document(begin, jump, first, last):
            cuts.extend(range(jump - (jump - begin - SHORTEST) // _STEP * _STEP, jump, _STEP))
        cuts.append(jump)
    return cuts


def _spans(first: list[int], last: list[int], cuts: list[int]) -> list[tuple[int, int]]:
    """The columns that any row between two cuts attends to; an empty interval at infinity if there are none."""
    spans = []
    for begin, end in itertools.pairwise(cuts):
        seen = [row for row in range(begin, end) if last[row] > first[row]]
        spans.append((min((first[row] for row in seen), default=2**31), max((last[row] for row in seen), default=0)))
    return spans


def _join_rectangles(tiles: list[Tile], first: list[int], last: list[int]) -> list[Tile]:
    joined: list[Tile] = []
    previous_is_full = False
    for tile in tiles:
        full = is_full(tile, first, last)
        before = joined[-1] if joined else None
        if before and full and previous_is_full and before.stop == tile.start and before[2:] == tile[2:]:
            joined[-1] = before._replace(stop=tile.stop)
        else:
            joined.append(tile)
        previous_is_full = full
    return joined
