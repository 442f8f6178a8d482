"""The body of a checkpoint that Dynamo is tracing.

Private names, checked on torch 2.11, 2.13 and 2.15: the `description` and the `parent` of a tracer of Dynamo's.
"""

from __future__ import annotations

from typing import Any

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
