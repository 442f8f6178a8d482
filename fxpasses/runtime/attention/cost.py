"""What a tile of attention costs on the CPU, in nanoseconds of forward and backward together.

Measured with torch 2.13 in float32 on one thread of an AMD EPYC (Zen 5), head dimension 64: a pair of tokens takes
10.5 to 11.5 ns a head in tiles of 64 x 64 to 2048 x 2048, with or without a mask; tiles under 192 rows take 12, as the
kernel goes through them in steps of 32 rows; the dense kernel with a mask takes 11.5 to 12.3. A tile besides takes time
of its own for two calls and the views and copies around them, and per column for adding the gradients of its keys and
values.

A causal square is cheapest in bands of rows, each a tile, up to 2048 rows: the kernel's own `is_causal` skips columns
in steps of 512. It takes 8.4 ns for each of all pairs at 1024 rows; 7.0 at 2048, as bands do; and 0.93 of the bands'
time at 4096.
"""

from __future__ import annotations

import torch

CAUSAL_ROWS = 2048  # from here on the kernel's own `is_causal` is as fast as bands, or faster

PAIR = 11.2
PAIR_IN_SHORT_TILES = 12.1
PAIR_OF_CAUSAL_SQUARE = 7.0  # for each of all its pairs
SHORT = 192  # rows; the flash kernel's own threshold
CALL = 150_000.0  # 70 forward, 80 and more backward, where other processes use the caches too
COLUMN = 150.0
DENSE_PAIR = 12.0

WORTHWHILE = 0.9  # tiles that take more of the dense time than this are not worth another order of sums


def heads_in_sequence(heads: int) -> float:
    """By how many heads a call takes longer than one head: threads share them."""
    return heads / max(1, min(heads, torch.get_num_threads()))


def tile(rows: int, columns: int, heads: float) -> float:
    """A tile for so many heads, one after another."""
    pair = PAIR_IN_SHORT_TILES if rows < SHORT else PAIR
    return CALL + heads * columns * (COLUMN + pair * rows)


def causal_square(rows: int, heads: float) -> float:
    return CALL + heads * rows * rows * PAIR_OF_CAUSAL_SQUARE


def dense(rows: int, columns: int, heads: float) -> float:
    """All pairs, with the mask."""
    return CALL + heads * rows * columns * DENSE_PAIR
