"""The body of a checkpoint that Dynamo is tracing.

Private names, checked on torch 2.11, 2.13 and 2.15: the `description` and the `parent` of a tracer of Dynamo's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from fxpasses.dynamo.whole_program import is_part_of_frame
from fxpasses.graph.regions import CHECKPOINT

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_CHECKPOINT = "torch.utils.checkpoint.checkpoint"


def is_in_checkpoint(tx: Any) -> bool:
    """Whether the innermost body that is being traced, including its calls, is a checkpoint's."""
    return _is_of_checkpoint(tx.output.current_tracer)


def outer_body(tx: Any) -> Any:
    """The tracer of the checkpoint's body that is being traced; None outside, and in a body inside another."""
    tracer = tx.output.current_tracer
    return tracer if _is_of_checkpoint(tracer) and tracer.parent.parent is None else None


def is_in_another_body(tx: Any) -> bool:
    """Whether the traced code is in the body of a higher-order operator that is no checkpoint."""
    tracer = tx.output.current_tracer
    while _is_of_checkpoint(tracer):
        tracer = tracer.parent
    return tracer.parent is not None


def _is_of_checkpoint(tracer: Any) -> bool:
    return getattr(tracer, "description", None) == _CHECKPOINT and tracer.parent is not None


def store_conflict(trace: Trace, stores: Any, gm: GraphModule | None) -> str:
    """Why a captured store in a checkpoint, on an object or in a dict, would be visible; "" if it is not."""
    if not stores.any:
        return ""
    calls = gm.graph.find_nodes(op="call_function", target=CHECKPOINT) if gm is not None else []
    if any(call.kwargs.get("preserve_rng_state") is False for call in calls):
        return "a recomputation draws other random numbers"
    if gm is not None and (trace.graph is None or is_part_of_frame(trace.graph.output)):
        return "the graph breaks in the frame"
    return stores.conflict(gm) if gm is not None else next(iter(stores.conflicts), "")
