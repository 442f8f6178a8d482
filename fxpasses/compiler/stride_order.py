"""Inductor orders the strides that it gave a tensor itself, also if they are expressions of the batch's sizes.

    grid = x[None, :, None]                             # [1, n, 1, 2], which backward needs
    y = conv2d(grid_sample(images, grid), weight)       # prefers channels last: [2 * n, 1, 2 * n, n] for `grid`

For a view that backward needs, in a graph with convolutions, Inductor asks whether `1 < n` of the expression itself:
"cannot determine truth value of Relational". Its own function can ask the shape environment instead, if it gets one.
Torch 2.15 passes it ([docs/upstream.md](../docs/upstream.md)).

Private names, checked on torch 2.11, 2.13 and 2.15: `ir.get_stride_order`, and `V.graph.sizevars.shape_env`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy

from fxpasses.base.patching import Patch


def _ir() -> Any:
    from torch._inductor import ir

    return ir


def _order(original: Callable[..., Sequence[int]]) -> Callable[..., Sequence[int]]:
    from torch._inductor.virtualized import V

    @functools.wraps(original)
    def order(seq: Sequence[Any], *others: Any, **named: Any) -> Sequence[int]:
        if not others and not named and any(isinstance(s, sympy.Expr) and s.free_symbols for s in seq):
            others = (V.graph.sizevars.shape_env,)
        return original(seq, *others, **named)

    return order


# Has strides ordered with the help of the shape environment while Inductor compiles a graph.
with_symbols = Patch("ordering strides that are expressions", _ir, get_stride_order=_order)
