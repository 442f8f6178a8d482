"""FLOPs of this package's operators, for `torch.utils.flop_counter` and whoever counts with it.

Attention by a plan counts all pairs: which of them are computed depends on the batch (`fxpasses.attention_stats()`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils import flop_counter

Shape = Sequence[int]


@functools.cache
def register() -> None:
    """Register the formulas with PyTorch, once per process."""
    own, aten = torch.ops.fxpasses, torch.ops.aten
    formulas: dict[Any, Any] = {
        own.sparse_attention_forward: _attention,
        own.sparse_attention_backward: _attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        own.grouped_mm: _grouped_mm,
        own.grouped_mm_covering: _grouped_mm,
        own.grouped_mm_list: _grouped_mm_list,
        own.grouped_outer: _grouped_outer,
        own.grouped_outer_covering: _grouped_outer,
        own.grouped_outer_list: _grouped_outer,
        own.loss_in_chunks: _loss_in_chunks,
        own.values_of_rows: _values_of_rows,
        own.gradients_of_rows: _gradients_of_rows,
    }
    for operator, formula in formulas.items():
        if operator not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(operator)(formula)


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Two products. [B, H, Tq, D], [B, Hkv, Tk, D], [B, Hkv, Tk, Dv]."""
    return 2 * prod(query[:3]) * key[2] * (query[3] + value[3])


def _attention_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Five products: the scores again, and gradients of weights, value, query and key."""
    return 2 * prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


def _grouped_mm(rows: Shape, weights: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    return 2 * prod(rows) * out_shape[-1]


def _grouped_mm_list(rows: Shape, weights: Sequence[Shape], *_: Any, out_shape: Shape, **__: Any) -> int:
    return 2 * prod(rows) * out_shape[-1]


def _grouped_outer(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(left) * right[-1]


def _values_of_rows(program: str, xs: Sequence[Shape], ws: Sequence[Shape], *_: Any, **__: Any) -> int:
    return sum(2 * prod(x) * w[0] for x, w in zip(xs, ws, strict=True))


def _gradients_of_rows(
    program: str,
    xs: Sequence[Shape],
    ws: Sequence[Shape],
    rows: Any,
    shared: Any,
    cotangents: Any,
    needs: Sequence[bool],
    *_: Any,
    **__: Any,
) -> int:
    """The logits, and the gradients that are wanted of rows and of weights."""
    count = len(xs)
    wanted = zip(xs, ws, needs[:count], needs[count : 2 * count], strict=True)
    return sum(2 * prod(x) * w[0] * (1 + of_rows + of_weight) for x, w, of_rows, of_weight in wanted)


_loss_in_chunks = _gradients_of_rows
