"""The plan of a mask whose rows are computed when they are read."""

from __future__ import annotations

from typing import Any

import torch

from fxpasses.attention.runtime.operators import plan_in_blocks
from fxpasses.attention.runtime.plan import four_dimensional


class PlanByRows(torch.nn.Module):
    """Makes the plan of a mask from the mask's program.

    rows: maps start, stop and operands to the rows [start, stop) of a bool mask of 2 to 4 dimensions.
    """

    def __init__(self, rows: torch.nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanByRows, (self.rows,)

    def forward(self, heads: int, count: int, repeated: tuple[bool, bool], *operands: Any) -> torch.Tensor:
        """heads, count: `heads` and `rows` of `attention_plan`.

        repeated: whether all elements of the batch, and all heads, have one mask, which is then read once.
        """
        batch, head = (slice(0, 1) if is_repeated else slice(None) for is_repeated in repeated)

        def rows(start: int, stop: int) -> torch.Tensor:
            return four_dimensional(self.rows(start, stop, *operands))[batch, head]

        elements, own_heads, _, columns = four_dimensional(self.rows(0, 1, *operands)).shape
        for size, is_repeated in zip((elements, own_heads), repeated, strict=True):
            heads *= size if is_repeated else 1
        shape = (1 if repeated[0] else elements, 1 if repeated[1] else own_heads, count, columns)
        return plan_in_blocks(rows, shape, heads)
