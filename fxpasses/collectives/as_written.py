"""Runs a captured graph without a compiler, like eager mode: it saves the same tensors in the same places.

Eager mode stops a checkpoint's recomputation at the last tensor that backward needs, and issues no collective after it.
Dynamo's own operators recompute to the end (since torch 2.13 with new random numbers), and hide the tensors that a
user's function saves from a checkpoint:

    before:  out = tag_activation_checkpoint(body, x, use_reentrant=False)
             out = autograd_function_apply(forward, backward, x, saved_for_backward_idx=[0], ...)
    after:   out = run_checkpoint(body, x, use_reentrant=False)
             out = run_function(forward, backward, x, saved_for_backward_idx=[0], ...)

Checked on torch 2.11 and 2.13: the first operator takes `checkpoint`'s own keyword arguments, and `context_fn` is in
`body.meta["_checkpoint_context_fn"]`; the second operator's keyword arguments that `run_function` names; and
`torch._C._autograd._top_saved_tensors_default_hooks(ignore_is_tracing)`, the innermost hooks on saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from fxpasses.graph.collectives import communicates
from fxpasses.graph.copying import copy_graph_module
from fxpasses.graph.regions import CHECKPOINT, Region

FUNCTION = torch.ops.higher_order.autograd_function_apply


def uncompiled(gm: GraphModule) -> Callable[..., Any]:
    """A callable that runs a captured graph without a compiler: eager mode's collectives, and its random numbers."""
    replaced: dict[Any, Callable[..., Any]] = AS_WRITTEN if communicates(gm) else {CHECKPOINT: run_checkpoint}
    if not any(_calls(region, replaced) for region in Region(gm).walk()):
        return gm.forward
    copy = copy_graph_module(gm)
    for region in Region(copy).walk():
        for node in _calls(region, replaced):
            node.target = replaced[node.target]
        region.gm.recompile()
    return copy


def _calls(region: Region, targets: Collection[Any]) -> list[Node]:
    return [node for node in region.gm.graph.nodes if node.op == "call_function" and node.target in targets]


def is_in_checkpoint() -> bool:
    """Whether a checkpoint of eager mode is running its body, for the first time or again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


def run_checkpoint(body: GraphModule, *operands: Any, run: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Run a captured checkpoint as `torch.utils.checkpoint` does; `run` replaces the body."""
    if "_checkpoint_context_fn" in body.meta:
        options["context_fn"] = body.meta["_checkpoint_context_fn"]
    if _has_transforms(body):  # an early stop would leave them open
        options["early_stop"] = False
    return checkpoint(run or body, *operands, **options)


def run_function(
    forward_body: GraphModule,
    backward_body: GraphModule,
    *operands: Any,
    saved_for_backward_idx: Sequence[int],
    non_differentiable_idx: Sequence[int],
    dirty_idx: Sequence[int] = (),
    **_: Any,
) -> Any:
    """Run a captured `torch.autograd.Function`, saving the user's tensors with `ctx.save_for_backward`."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output, kept = forward_body(*inputs)
            ctx.save_for_backward(*(kept[place] for place in saved_for_backward_idx))
            ctx.others = [None if place in saved_for_backward_idx else value for place, value in enumerate(kept)]
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            ctx.mark_dirty(*(outputs[place] for place in dirty_idx))
            ctx.mark_non_differentiable(*(outputs[place] for place in non_differentiable_idx))
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            kept = list(ctx.others)
            for place, tensor in zip(saved_for_backward_idx, ctx.saved_tensors, strict=True):
                kept[place] = tensor
            return backward_body(*gradients, *kept)

    return Function.apply(*operands)


AS_WRITTEN: dict[Any, Callable[..., Any]] = {CHECKPOINT: run_checkpoint, FUNCTION: run_function}


def _has_transforms(body: GraphModule) -> bool:
    return any(getattr(node.target, "__name__", "").endswith("increment_nesting") for node in body.graph.nodes)
