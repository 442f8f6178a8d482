"""A checkpoint of eager mode recomputes a compiled graph to its end; eager code it stops after the last needed tensor.

    checkpoint(compiled_block, x)        the block ends with y = x + all_reduce(h), of which nothing is saved
    eager mode's recomputation:          ... up to the last saved tensor
    the compiled block's:                ..., all_reduce(h)

If this matters for a graph, it runs uncompiled there. A checkpoint inside a compiled graph is not affected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from fxpasses.collectives.as_written import is_in_checkpoint, uncompiled
from fxpasses.collectives.eager_sequences import Issued, eager_sequences
from fxpasses.graph.collectives import communicates


def with_checkpoints_around(gm: GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, made of `gm`; or `gm` itself in a checkpoint that would issue other collectives."""
    if not communicates(gm):
        return compiled
    captured = uncompiled(gm)
    differs: bool | None = None  # not known yet

    def run(*inputs: Any) -> Any:
        nonlocal differs
        if not torch.is_grad_enabled() or not is_in_checkpoint():
            return compiled(*inputs)
        if differs is None:
            differs = _differs(gm)
            if differs:
                warnings.warn(
                    "fxpasses: a graph with collectives runs uncompiled in a checkpoint, whose recomputation would "
                    "issue more of them than in eager mode. Compile the checkpoint together with its body.",
                    stacklevel=2,
                )
        return captured(*inputs) if differs else compiled(*inputs)

    return run


def _differs(gm: GraphModule) -> bool:
    plain, eager = eager_sequences(gm), eager_sequences(gm, in_checkpoint=True)
    again = [Issued(operator, place) for place, operator in enumerate(plain.forward)]
    return eager.backward != [*again, *plain.backward]
