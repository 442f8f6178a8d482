"""What checkpoints save: the user's policies, and the router's choice.

A recomputed router may round differently (another fusion, another kernel) and so choose another expert for a token with
nearly equal scores, which changes the order of the sort. The choice and the order are small, so a body in which a loop
over experts was rewritten saves them: the recomputation routes as forward did. A body with the user's own policy keeps
that policy.

Private name, checked on torch 2.11, 2.13 and 2.15: the entry `_checkpoint_context_fn` of a checkpoint body's `meta`, in
which Dynamo passes on the `context_fn` of `torch.utils.checkpoint`; its attribute `cache_hash` is part of the keys of
PyTorch's caches, and the logger `torch._higher_order_ops.wrap` warns about a `context_fn`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable
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
_KEPT_NAMES = frozenset({"fxpasses.offsets_on_host.default"})  # the runtime registers it


def _keep_routing(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in _KEPT or str(operator) in _KEPT_NAMES
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_other_warning(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


_OURS = "fxpasses.save_routing.2"


def has_policy(body: GraphModule) -> bool:
    """Whether the user chose which results the checkpoint of a body saves."""
    contexts = body.meta.get("_checkpoint_context_fn")
    return contexts is not None and getattr(contexts, "cache_hash", None) != _OURS


def policy_of(body: GraphModule) -> Hashable:
    """A key that is equal for bodies whose checkpoints save alike; None for a body that saves only its inputs.

    Dynamo makes a new `functools.partial` for each checkpoint, even of a policy that the program makes once. So two of
    them are equal if their parts are.
    """
    contexts = body.meta.get("_checkpoint_context_fn")
    return None if contexts is None else getattr(contexts, "cache_hash", None) or _parts(contexts)


def _parts(value: Any) -> Hashable:
    if isinstance(value, functools.partial):
        return functools.partial, _parts(value.func), _parts(value.args), _parts(value.keywords)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_parts, value))
    if isinstance(value, dict):
        return dict, tuple((_parts(key), _parts(item)) for key, item in value.items())
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), repr(value)
    return id(value)  # an operator, or a function


def save_routing(body: GraphModule) -> None:
    """Have the checkpoint of a body save the routing of its tokens."""
    if "_checkpoint_context_fn" not in body.meta:
        # PyTorch would warn the user about a policy that is not the user's; adding a filter twice has no effect.
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_other_warning)
        contexts: Any = functools.partial(create_selective_checkpoint_contexts, _keep_routing)
        contexts.cache_hash = _OURS
        body.meta["_checkpoint_context_fn"] = contexts
