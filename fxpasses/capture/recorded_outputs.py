"""transformers' recorded outputs: `output_router_logits=True` and its like, in one graph.

transformers collects what layers give by forward hooks that append to a list of the model (`utils/output_capturing.py`,
seen in 5.23). Two things keep Dynamo from tracing that:

- The hooks are put on when a model is first asked to record, under a lock. They go onto modules below that model, which
  Dynamo has not looked into yet, so they are put on while it traces; it finds them there, and guards them.
- Under a checkpoint, to append to a list outside is a side effect that eager mode repeats in the recomputation, and
  compiled code does not. These hooks do not repeat it either: by then the model has taken its list away. So Dynamo may
  do without, as it offers for code that says so of itself.

Private names, checked on torch 2.11, 2.13 and 2.15: `UserFunctionVariable.call_function`, the `description` of a
tracer, and `side_effects.allow_externally_visible_side_effects_in_subtracer`, by which a checkpoint returns what such a
list holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch._dynamo import side_effects
from torch._dynamo.variables.functions import UserFunctionVariable

from fxpasses.capture.hints import hints_for

_MODULE = "transformers.utils.output_capturing"
_CHECKPOINT = "torch.utils.checkpoint.checkpoint"


def recording_patches() -> Iterator[tuple[Any, str, Any]]:
    """What is put into Dynamo for the time of a trace. Raises where torch lacks a name."""
    allowed = side_effects.allow_externally_visible_side_effects_in_subtracer
    yield UserFunctionVariable, "call_function", _call(UserFunctionVariable.call_function, allowed)


def _call(original: Callable[..., Any], allowed: Callable[[Any], Any]) -> Callable[..., Any]:
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function = self.fn
        if getattr(function, "__module__", None) != _MODULE or hints_for(tx.output) is None:
            return original(self, tx, args, kwargs)
        if function.__name__ == "maybe_install_capturing_hooks":
            model = getattr(args[0], "value", None) if args else None
            if isinstance(model, nn.Module):
                function(model)
        if function.__name__ == "output_capturing_hook" and _under_checkpoint(tx):
            with allowed(tx):
                return original(self, tx, args, kwargs)
        return original(self, tx, args, kwargs)

    return call_function


def _under_checkpoint(tx: Any) -> bool:
    return getattr(tx.output.current_tracer, "description", None) == _CHECKPOINT
