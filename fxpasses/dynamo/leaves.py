"""Guard which inputs of a graph are leaves, if activations are offloaded.

Dynamo guards whether a tensor requires a gradient, but not whether it is a leaf. Blocks that are compiled one by one
share graphs. If the first block's input is a leaf (embeddings, under `enable_input_require_grads`), it must not be
offloaded, and a shared graph would not offload the other blocks' inputs either; in the opposite case, it would offload
leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from fxpasses.dynamo.checks import Check
from fxpasses.dynamo.dynamo_names import MissingName, guard_compiled_graph
from fxpasses.graph.provenance import input_sources

log = logging.getLogger(__name__)


def guard(gm: GraphModule, examples: Sequence[object]) -> None:
    """Called while Dynamo compiles `gm`: guard that exactly the inputs that are leaves in `examples` are leaves."""
    found = {
        source: example.is_leaf
        for source, example in zip(input_sources(gm), examples, strict=False)
        if source and isinstance(example, torch.Tensor) and _may_be_either(example)
    }
    if not found:
        return
    expected = list(found.values())

    def are_as_before(*values: torch.Tensor) -> bool:
        return [value.is_leaf for value in values] == expected

    text = "; ".join(f"{source}.is_leaf is {leaf}" for source, leaf in found.items())
    try:
        check = Check(are_as_before, None, None, "which inputs are leaves")
        guard_compiled_graph(check, list(found), text)
    except MissingName as missing:
        log.debug("leaves and activations share graphs: %s", missing)


def _may_be_either(example: torch.Tensor) -> bool:
    return example.requires_grad and not isinstance(example, torch.nn.Parameter)
