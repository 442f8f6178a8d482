"""A checkpointed layer that writes to memory that outlives it is left to eager mode, which writes twice.

    def layer(x):
        self.load += count(x)                          # in forward, and again when backward recomputes the layer
        return F.batch_norm(self.linear(x), self.mean, self.variance, training=True)  # the same

    checkpoint(layer, x, use_reentrant=False)

A captured layer would write once, because its recomputation in backward has no effects; and backward would raise
"modified by an inplace operation" if the layer reads the memory that it has written. So the graph breaks at the
checkpoint, whose function then runs uncompiled. These are captured, as under stock PyTorch:

- a layer that is not recomputed, because no result has a gradient,
- everything under `fullgraph=True`,
- writes that change nothing when repeated, and that `hoist_writes` moves out of the checkpoint. If it turns out not to
  move them, the frame is traced again without this exception (`Feature.MOVED`).

Private names, checked on torch 2.11, 2.13 and 2.15, besides the handler's site: the `root_tracer` of an `OutputGraph`,
and its `nn_modules`, which hold the bodies of checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from fxpasses.base.containment import say
from fxpasses.base.once import warn_once
from fxpasses.dynamo.attempt import Left
from fxpasses.dynamo.dynamo_names import DynamoNames, in_short, user_place
from fxpasses.dynamo.failures import FeatureRejected, is_ours
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.interceptions import Handlers, Proceed, method
from fxpasses.graph.provenance import where
from fxpasses.graph.regions import CHECKPOINT
from fxpasses.metadata.checkpoint_writes import inputs, is_idempotent, is_recomputed, remaining, writes

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_CHECKPOINT = "torch._dynamo.variables.higher_order_ops.CheckpointHigherOrderVariable"

handlers = Handlers()


class _Found:
    """any: whether a captured checkpoint has writes that a pass must move out of it."""

    def __init__(self, trace: Trace) -> None:
        self.any = False


def check(trace: Trace, gm: GraphModule | None, rewritten: GraphModule | None) -> None:
    if rewritten is not None and trace.state(_Found).any:
        write = remaining(rewritten, trace.graph.output.fake_mode if trace.graph is not None else None)
        if write is not None:
            raise FeatureRejected(Feature.MOVED, f"`{write.name}` at {where(write)} stays in a checkpoint")


def have_been_found(trace: Trace) -> bool:
    """Whether a checkpoint of the trace writes to memory that outlives it."""
    return trace.state(_Found).any


@handlers.at(method(_CHECKPOINT, "_call_function", "call_function"))
def call(trace: Trace, proceed: Proceed, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    result = proceed(self, tx, *args, **kwargs)
    output = tx.output
    made = output.graph.find_nodes(op="call_function", target=CHECKPOINT)[-1]
    if trace.attempt.flags is None or not torch.is_grad_enabled() or not is_recomputed(made):
        return result
    body = output.nn_modules[made.args[0].target]
    try:
        with trace.paused():
            found = list(writes(body, inputs(output.root_tracer.graph), output.fake_mode))
    except Exception as error:  # without this feature, the checkpoint's writes, if any, would happen once
        if trace.attempt.strict or not is_ours(error):
            raise
        say("finding what a checkpoint writes", error, "The graph breaks at it, and it runs uncompiled.")
        raise DynamoNames.find().unsupported("The writes of a checkpoint are unknown.") from None
    unmoved = [write for write in found if not (trace.has(Feature.MOVED) and trace.given and is_idempotent(write))]
    if unmoved:
        _leave(trace, unmoved[0])
    trace.state(_Found).any |= bool(found)
    return result


def _leave(trace: Trace, write: Node) -> None:
    """Break the graph at the checkpoint that is being traced."""
    place = in_short(*user_place())
    text = f"`{write.name}` at {where(write)} writes to memory that outlives the checkpoint at {place}"
    text += ", in eager mode once more when backward recomputes it"
    trace.left.add(Left(write.name, text, place))
    warn_once(("left", place), f"{text}. So the graph breaks there, and the checkpoint runs uncompiled.")
    raise DynamoNames.find().unsupported(f"Write in a checkpoint\n  Explanation: {text}.")
