"""The cost of a tile of attention on the CPU, in nanoseconds of forward and backward together.

Measured with torch 2.13 in float32 on one thread of an AMD EPYC (Zen 5), head dimension 64: a pair of tokens takes
10.5 to 11.5 ns per head in tiles of 64 x 64 to 2048 x 2048, with or without a mask; in tiles under 192 rows it takes
12, as the kernel processes them in steps of 32 rows; the dense kernel with a mask takes 11.5 to 12.3. Each tile also
costs two calls with the views and copies around them, and per column the addition of its keys' and values' gradients.

Up to 2048 rows, a causal square is cheapest in bands of rows, each a tile: the kernel's own `is_causal` skips columns
in steps of 512. Per pair, masked pairs included, `is_causal` takes 8.4 ns at 1024 rows and 7.0 at 2048, like bands; at
4096 it takes 0.93 of the bands' time.
"""

from __future__ import annotations

import torch

CAUSAL_ROWS = 2048  # from here on the kernel's own `is_causal` is as fast as bands, or faster

PAIR = 11.2
PAIR_IN_SHORT_TILES = 12.1
PAIR_OF_CAUSAL_SQUARE = 7.0  # per pair, masked pairs included
SHORT = 192  # rows; the flash kernel's own threshold
CALL = 150_000.0  # forward 70_000, backward 80_000, or more if other processes use the caches too
COLUMN = 150.0
DENSE_PAIR = 12.0

WORTHWHILE = 0.9  # of the dense time: tiles that take longer do not justify another order of sums


def heads_in_sequence(heads: int) -> float:
    """The time of a call for `heads` heads, in units of one head's time: threads share the heads."""
    return heads / max(1, min(heads, torch.get_num_threads()))


def tile(rows: int, columns: int, heads: float) -> float:
    """The cost of a tile for `heads` heads in sequence."""
    pair = PAIR_IN_SHORT_TILES if rows < SHORT else PAIR
    return CALL + heads * columns * (COLUMN + pair * rows)


def causal_square(rows: int, heads: float) -> float:
    return CALL + heads * rows * rows * PAIR_OF_CAUSAL_SQUARE


def dense(rows: int, columns: int, heads: float) -> float:
    """The cost of all pairs, with the mask."""
    return CALL + heads * rows * columns * DENSE_PAIR
