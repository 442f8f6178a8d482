"""Inputs of a graph that are activations: another graph has computed them, and autograd alone keeps them for backward.

Where blocks are compiled one by one, each with a checkpoint in it, all that a block saves is its own input. It is moved
like what the block computes, and its memory goes as soon as its caller lets go of it:

    before    y = block(x);                                                return y, x
    after     h = offload(x); y = block(x); settle(h, x, after=y);         return y, h

What has an owner stays: parameters, buffers, leaves, metadata, and what the caller is to see changed.

Private names, checked on torch 2.11 and 2.13: AOTAutograd's words for inputs and outputs in `node.meta["desc"]`, among
them the class `PlainAOTInput` and the attributes `idx`, `base`, `attr` and `mutated_input`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule


def activations(examples: Sequence[object]) -> frozenset[int]:
    """The positions, among the inputs of a captured graph, of what autograd has computed."""
    return frozenset(
        position
        for position, example in enumerate(examples)
        if isinstance(example, torch.Tensor) and example.requires_grad and not example.is_leaf
    )


def movable(joint: GraphModule, positions: Iterable[int], outputs: int) -> frozenset[str]:
    """The names, in a joint graph and in those partitioned from it, of the inputs at `positions` of the captured graph.

    Not among them: inputs whose new values are among the first `outputs` results, for the caller, and what AOTAutograd
    made of several inputs on one memory. Empty where this torch does not describe inputs and outputs.
    """
    described = joint.graph.output_node().meta.get("desc")
    if not isinstance(described, (list, tuple)) or None in described[:outputs]:
        return frozenset()
    changed = {_position(getattr(result, "mutated_input", None)) for result in described[:outputs]}
    wanted = set(positions) - changed
    placeholders = joint.graph.find_nodes(op="placeholder")
    return frozenset(node.name for node in placeholders if _position(node.meta.get("desc")) in wanted)


def _position(described: Any) -> int | None:
    """The input of the captured graph that is described, or holds what is described, as a DTensor does."""
    while hasattr(described, "attr") and hasattr(described, "base"):
        described = described.base
    return described.idx if type(described).__name__ == "PlainAOTInput" else None
