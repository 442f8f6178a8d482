"""transformers' recorded outputs: `output_router_logits=True` and its like, in one graph.

transformers collects what layers give by forward hooks that append to a list of the model (`utils/output_capturing.py`,
seen in 5.23). Two things keep Dynamo from tracing that:

- The hooks are put on when a model is first asked to record, under a lock. They go onto modules below that model, which
  Dynamo has not looked into yet, so they are put on while it traces; it finds them there, and guards them.
- Under a checkpoint, to append to a list outside is a side effect that eager mode repeats in the recomputation, and
  compiled code does not. These hooks do not repeat it either: by then the model has taken its list away. So Dynamo may
  do without, as it offers for code that says so of itself.

Private names, checked on torch 2.11, 2.13 and 2.15, besides the handler's site: the `description` of a tracer, and
`side_effects.allow_externally_visible_side_effects_in_subtracer`, by which a checkpoint returns what such a list holds.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo.side_effects import allow_externally_visible_side_effects_in_subtracer

from fxpasses.capture.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.capture.trace import Trace

_MODULE = "transformers.utils.output_capturing"
_CHECKPOINT = "torch.utils.checkpoint.checkpoint"


handlers = Handlers()


@handlers.at(method("torch._dynamo.variables.functions.UserFunctionVariable", "call_function"))
def call(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    function = self.fn
    if getattr(function, "__module__", None) != _MODULE:
        return NOT_HANDLED
    if function.__name__ == "maybe_install_capturing_hooks":
        model = getattr(args[0], "value", None) if args else None
        if isinstance(model, nn.Module):
            function(model)
    if function.__name__ != "output_capturing_hook" or not _under_checkpoint(tx):
        return NOT_HANDLED
    with allow_externally_visible_side_effects_in_subtracer(tx):
        return proceed(self, tx, args, kwargs)


def _under_checkpoint(tx: Any) -> bool:
    return getattr(tx.output.current_tracer, "description", None) == _CHECKPOINT
