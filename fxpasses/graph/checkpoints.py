"""A checkpoint's recomputation must route as its forward pass did: keep the choice and the sort, make neither again.

A recomputed router may round differently (another fusion, another kernel), choose another expert for a token that was
nearly even, and sort another order. What the choice and the order are made of is small, so a body in which a loop over
experts was rewritten saves it. Bodies with a policy of their own keep theirs.

Private name, checked on torch 2.11 and 2.13: the entry `_checkpoint_context_fn` of a checkpoint body's `meta`, which is
how Dynamo hands the `context_fn` of `torch.utils.checkpoint` on; its attribute `cache_hash` enters PyTorch's caches,
and the logger `torch._higher_order_ops.wrap` warns of one.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_KEPT = frozenset(
    {
        torch.ops.aten.topk.default,
        torch.ops.aten.sort.stable,
        torch.ops.aten.sort.default,
        torch.ops.aten.searchsorted.Tensor,
        torch.ops.aten._local_scalar_dense.default,
    }
)


def _keep_routing(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _is_worth_telling(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


_OURS = "fxpasses.save_routing.1"


def has_policy(body: GraphModule) -> bool:
    """Whether the user chose which operators' results the checkpoint of a body keeps."""
    contexts = body.meta.get("_checkpoint_context_fn")
    return contexts is not None and getattr(contexts, "cache_hash", None) != _OURS


def save_routing(body: GraphModule) -> None:
    """Let the checkpoint of a body save what routes its tokens."""
    if "_checkpoint_context_fn" not in body.meta:
        # PyTorch warns the user of a policy that the user did not give; adding a filter twice does nothing.
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_worth_telling)
        contexts: Any = functools.partial(create_selective_checkpoint_contexts, _keep_routing)
        contexts.cache_hash = _OURS
        body.meta["_checkpoint_context_fn"] = contexts
