"""The mask of an attention, as an operand of `sparse_attention` and of `attention_plan`.

In a row whose mask hides all keys, `sparse_attention` computes what `scaled_dot_product_attention` does: zeros if the
mask is -inf or False, and the mean of all values if it is the dtype's least value, which absorbs every score added to
it in float32 and bfloat16. Unfused attention gives the same mean, but NaN if the row is -inf throughout. So its mask
gets NaN in such rows, by which a plan recognises them. The least float16 does not absorb scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fxpasses.attention.building import AttentionBuilder, size_of
from fxpasses.attention.match import Attention, Mask
from fxpasses.attention.spelling import constant_of, same, shape_of
from fxpasses.graph.calls import argument, operator_of
from fxpasses.graph.refusals import Refused
from fxpasses.graph.traits import VIEWS
from fxpasses.report import Reason

_KEEP_VALUES = VIEWS | {"contiguous", "expand_as"}


def check_mask(attention: Attention) -> None:
    """Raise `Refused` for a mask that the operators do not support."""
    mask, out = (node.meta["example_value"] for node in (attention.mask.node, attention.node))
    if mask.ndim > 4 or mask.ndim == 0:
        raise Refused(Reason.NOT_BY_HEADS, f"its mask has {mask.ndim} dimensions", attention.mask.node)
    if attention.fused:
        if not (mask.dtype is torch.bool or mask.dtype.is_floating_point):
            raise Refused(Reason.NOT_BY_HEADS, f"its mask is of {mask.dtype}", attention.mask.node)
        return
    fill = attention.mask.fill
    if out.device.type != "cpu":  # only the CPU's operator computes blind rows as the unfused program does
        raise Refused(Reason.SCORES_CHANGED, f"the mask may hide a whole row, on {out.device.type}", attention.node)
    if fill is None:
        if out.dtype is torch.float16 or mask.dtype is torch.float16:
            raise Refused(Reason.SCORES_CHANGED, "the least float16 does not hide a score", attention.mask.node)
        return
    if mask.dtype is not torch.bool:
        raise Refused(Reason.NOT_BY_HEADS, f"its mask is of {mask.dtype}", attention.mask.node)
    least = torch.finfo(out.dtype).min
    if fill != -math.inf and (fill > least or out.dtype is torch.float16):
        raise Refused(Reason.SCORES_CHANGED, f"{fill:g} does not hide a score for certain", attention.mask.node)


def operand(emit: AttentionBuilder, attention: Attention, source: Callable[[Node], Any]) -> Node:
    """The mask operand of both operators: bool or additive, broadcast to the scores.

    source: the outer value of a checkpoint body's placeholder.
    """
    mask, dtype = attention.mask, attention.node.meta["example_value"].dtype
    if attention.fused:
        return mask.node
    added = _as_added(emit, mask, dtype)
    if not _is_finite(mask, source):
        added = _with_nan_for_rows_of_inf(emit, _of_all_keys(emit, attention, added))
    found = added.meta["example_value"].dtype
    if found is not dtype:
        if torch.finfo(dtype).min > torch.finfo(found).min:
            added = emit("clamp", (added,), {"min": torch.finfo(dtype).min})
        added = emit("to", (added, dtype))
    return _of_all_keys(emit, attention, added)


def _as_added(emit: AttentionBuilder, mask: Mask, dtype: torch.dtype) -> Node:
    if mask.fill is None:
        return mask.node
    fill = max(mask.fill, torch.finfo(dtype).min) if math.isfinite(mask.fill) else mask.fill
    first, second = (fill, 0.0) if mask.hides else (0.0, fill)
    other = emit(torch.full, ((), second), {"dtype": dtype, "device": mask.node.meta["example_value"].device})
    return emit(torch.where, (mask.node, first, other))


def _with_nan_for_rows_of_inf(emit: AttentionBuilder, added: Node) -> Node:
    hides_all = emit("all", (emit(torch.eq, (added, -math.inf)), -1, True))
    return emit("masked_fill", (added, hides_all, math.nan))


def _of_all_keys(emit: AttentionBuilder, attention: Attention, mask: Node) -> Node:
    """A view of the mask that covers all keys, in two dimensions or more."""
    keys, shape = emit.length(attention.key), shape_of(mask)
    if len(shape) > 1 and same(shape[-1], size_of(keys)):
        return mask
    return emit("expand", (mask, *([-1] * (len(shape) - 1) or [1]), keys))


def _is_finite(mask: Mask, source: Callable[[Node], Any]) -> bool:
    """Whether a mask is known not to contain -inf: `where(allowed, 0, least)`, `zeros.masked_fill(hidden, least)`."""
    if mask.fill is not None:
        return math.isfinite(mask.fill)
    node: Any = mask.node
    while isinstance(node := source(node), Node) and operator_of(node) in _KEEP_VALUES:
        node = node.args[0]
    if not isinstance(node, Node) or operator_of(node) != "where":
        return False
    numbers = [constant_of(argument(node, name)) for name in ("input", "other")]
    return all(number is not None and math.isfinite(number) for number in numbers)
