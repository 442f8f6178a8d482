"""transformers' recorded outputs: `output_router_logits=True` and the like, in one graph.

transformers collects the outputs of layers by forward hooks that append to a list of the model
(`utils/output_capturing.py`, seen in 5.23). Dynamo cannot trace this for three reasons:

- The hooks are installed under a lock when a model first records. They belong to submodules that Dynamo has not
  inspected yet, so they are installed here during the trace; Dynamo finds and guards them.
- In a checkpoint, appending to an outer list is a side effect that eager mode repeats in the recomputation, and
  compiled code does not. These hooks do not repeat it either, because the model has removed its list by then. So the
  side effect is allowed, which Dynamo permits to code that opts in.

- Models that use some hidden states of an encoder bind a call to the encoder's signature. Its parameters are in a
  `mappingproxy`, which Dynamo does not read once the program has changed any dict: the proxy might show that dict.
  But nothing else refers to the dict behind a signature's proxy.

Private names, checked on torch 2.11, 2.13 and 2.15, besides the handlers' sites: `MappingProxyVariable`'s `source` and
`dv_dict`;
`side_effects.allow_externally_visible_side_effects_in_subtracer`, by which a checkpoint returns the list's elements.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo.side_effects import allow_externally_visible_side_effects_in_subtracer

from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.rules.bodies import is_in_checkpoint
from fxpasses.dynamo.trace import Trace

_MODULE = "transformers.utils.output_capturing"

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
    if function.__name__ != "output_capturing_hook" or not is_in_checkpoint(tx):
        return NOT_HANDLED
    with allow_externally_visible_side_effects_in_subtracer(tx):
        return proceed(self, tx, args, kwargs)


@handlers.at(
    method("torch._dynamo.variables.dicts.MappingProxyVariable", "_check_mutation_guard", "call_method"),
    without="models that use some hidden states of an encoder break the graph",
)
def check_proxy(trace: Trace, proceed: Proceed, self: Any, tx: Any, *called: Any, **kwargs: Any) -> Any:
    if getattr(self.source, "member", "") != "_parameters":  # the attribute of `inspect.Signature`
        return NOT_HANDLED
    return (
        self.dv_dict.call_method(tx, *called, **kwargs) if called else None
    )  # torch 2.11 has the check in `call_method`
