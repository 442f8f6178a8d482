"""Where activations are moved, a graph knows which of its inputs are leaves, and is run for such inputs alone.

Dynamo's guards tell whether a tensor requires a gradient, and not whether it is a leaf. Blocks that are compiled one by
one share their graphs: if the first block is given a leaf (embeddings, under `enable_input_require_grads`), which stays
with its owner, the activations of all others would stay as well; and the other way round, leaves would be moved.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from fxpasses.capture.dynamo_names import MissingName, add_guard
from fxpasses.graph.provenance import input_sources

log = logging.getLogger(__name__)


def guard(gm: GraphModule, examples: Sequence[object]) -> None:
    """Called while Dynamo compiles `gm`: have it trace anew where other inputs are leaves than in `examples`."""
    context = torch._guards.TracingContext.try_get()
    found = {
        source: example.is_leaf
        for source, example in zip(input_sources(gm), examples, strict=False)
        if source and isinstance(example, torch.Tensor) and _may_be_either(example)
    }
    if context is None or not found:
        return
    expected = list(found.values())

    def are_as_before(*values: torch.Tensor) -> bool:
        return [value.is_leaf for value in values] == expected

    texts = [f"{source}.is_leaf is {leaf}" for source, leaf in found.items()]
    try:
        add_guard(context.guards_context.dynamo_guards, are_as_before, list(found), texts)
    except MissingName as missing:
        log.debug("leaves and activations share graphs: %s", missing)


def _may_be_either(example: torch.Tensor) -> bool:
    return example.requires_grad and not isinstance(example, torch.nn.Parameter)
