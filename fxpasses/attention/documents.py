"""Warns the user about packed texts that see each other, because nothing separates them in attention.

    position_ids = [[0, 1, 2, 0, 1]]                         # two texts in a row
    out = scaled_dot_product_attention(q, k, v, is_causal=True)     # the second text attends to the first

A program may intend that, but nearly always something was forgotten: transformers makes the mask from such positions
only if `use_cache=False` is passed, and silently mixes the texts otherwise, in eager mode too (seen in 5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxpasses.attention.fused import is_fused_attention
from fxpasses.base.once import warn_once
from fxpasses.graph.bodies import nodes_in
from fxpasses.graph.calls import argument
from fxpasses.graph.provenance import in_program, source, where
from fxpasses.graph.reachability import reached
from fxpasses.report import Reason, Refusal, Report


def report(gm: GraphModule, inputs: Callable[[Sequence[int]], Sequence[Any]]) -> Report | None:
    """A report, besides one warning, if positions restart in the batch at hand and no mask of attention knows of them.

    inputs: returns the batch's tensors at some positions of the graph's inputs.
    """
    attentions = [node for node in nodes_in(gm) if is_fused_attention(node)]
    if not attentions or not all(map(_is_of_any_batch, attentions)):
        return None
    placeholders = gm.graph.find_nodes(op="placeholder")
    candidates = [at for at, node in enumerate(placeholders) if _may_be_positions(node)]
    for at, positions in zip(candidates, inputs(candidates) if candidates else (), strict=True):
        if restarts(positions):
            name = in_program(source(placeholders[at])) or placeholders[at].name
            text = f"`{name}` restarts within a row, as for several texts, and no mask of attention knows of them"
            warn_once(
                ("documents", name),
                f"{text}: each text attends to those before it, in eager mode too. transformers makes the mask from "
                "position_ids if it is called with use_cache=False; other models need a mask that separates the texts.",
            )
            refusal = Refusal(placeholders[at].name, Reason.TEXTS_MIX, text, where(attentions[0]))
            return Report("documents", refusals=[refusal])
    return None


def restarts(positions: torch.Tensor) -> bool:
    """Whether each row [..., T] only counts on or restarts at 0, and some row has two texts of two tokens or more."""
    if type(positions) is not torch.Tensor or positions.ndim == 0 or positions.shape[-1] < 4:
        return False  # a fake tensor has no values
    before, after = positions[..., :-1], positions[..., 1:]
    if not bool(((after == before + 1) | (after == 0)).all()):
        return False
    starts = (after[..., :-1] == 0) & (before[..., :-1] > 0) & (after[..., 1:] == 1)
    return bool(starts.any())


def _is_of_any_batch(attention: Node) -> bool:
    """Whether it is causal without a mask, or its mask is the same for every batch of that size."""
    mask = argument(attention, "attn_mask")
    if not isinstance(mask, Node):
        return argument(attention, "is_causal") is True
    return not any(_is_of_the_batch(node) for node in reached([mask], lambda node: node.all_input_nodes))


def _is_of_the_batch(node: Node) -> bool:
    is_tensor = isinstance(node.meta.get("example_value"), torch.Tensor)
    return node.op == "placeholder" and is_tensor and "_buffers" not in (source(node) or "")


def _may_be_positions(placeholder: Node) -> bool:
    example = placeholder.meta.get("example_value")
    is_integer = isinstance(example, torch.Tensor) and example.dtype in (torch.int32, torch.int64)
    return "grapharg" in placeholder.meta and is_integer and "pos" in (source(placeholder) or placeholder.name).lower()
