"""Inputs of a graph that are activations: another graph computes them, and only autograd keeps them for backward.

If blocks are compiled one by one, each with a checkpoint inside, a block saves only its input. The input moves like an
activation of the block, and its memory is free as soon as the caller releases it:

    before    y = block(x);                                                return y, x
    after     h = offload(x); y = block(x); settle(h, x, after=y);         return y, h

Inputs that have an owner stay: parameters, buffers, leaves, metadata, and inputs that the graph mutates.

Private names, checked on torch 2.11 and 2.13: AOTAutograd's descriptions of inputs and outputs in `node.meta["desc"]`,
among them the class `PlainAOTInput` and the attributes `idx`, `base`, `attr` and `mutated_input`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule


def activations(examples: Sequence[object]) -> frozenset[int]:
    """The positions, among the inputs of a captured graph, of tensors with an autograd history."""
    return frozenset(
        position
        for position, example in enumerate(examples)
        if isinstance(example, torch.Tensor) and example.requires_grad and not example.is_leaf
    )


def movable(joint: GraphModule, positions: Iterable[int], outputs: int) -> frozenset[str]:
    """The names, in a joint graph and in those partitioned from it, of the inputs at `positions` of the captured graph.

    Excluded are inputs whose new values are among the first `outputs` results, for the caller, and the bases that
    AOTAutograd makes for inputs that share memory. Empty if this torch does not describe inputs and outputs.
    """
    described = joint.graph.output_node().meta.get("desc")
    if not isinstance(described, (list, tuple)) or None in described[:outputs]:
        return frozenset()
    changed = {_position(getattr(result, "mutated_input", None)) for result in described[:outputs]}
    wanted = set(positions) - changed
    placeholders = joint.graph.find_nodes(op="placeholder")
    return frozenset(node.name for node in placeholders if _position(node.meta.get("desc")) in wanted)


def operands_of(joint: GraphModule) -> dict[str, int | None]:
    """For each input of a joint graph, by name, the position of the captured graph's input; None for others."""
    return {node.name: _position(node.meta.get("desc")) for node in joint.graph.find_nodes(op="placeholder")}


def results_of(joint: GraphModule, outputs: int) -> list[int | None]:
    """For each output of a joint graph's forward, the position of the captured graph's result; None for others."""
    described = joint.graph.output_node().meta.get("desc") or [None] * outputs
    return [each.idx if type(each).__name__ == "PlainAOTOutput" else None for each in described[:outputs]]


def _position(described: Any) -> int | None:
    """The position of the described input of the captured graph, or of the subclass, such as DTensor, that holds it."""
    while hasattr(described, "attr") and hasattr(described, "base"):
        described = described.base
    return described.idx if type(described).__name__ == "PlainAOTInput" else None
