"""Numbers that an autograd function reads in its forward, as fused losses do: `ctx.count = (labels >= 0).sum().item()`.

Dynamo traces the function's forward, and then runs the traced graph once more on fake tensors, to learn which results
need a gradient. That run reads the numbers again, as new symbols that nothing outside of it defines
("PendingUnbackedSymbolNotFound"), which would end the capture of the whole model. Only symbols in the sizes of results
are needed; the others are dropped here. If Dynamo still fails, as at a branch on an activation, or if the graph with
such numbers does not compile (`Feature.INSIDE`), the graph breaks at the function, as at other functions that Dynamo
does not support: the function runs uncompiled, the rest is captured, and one warning says so.

Private names, checked on torch 2.13, besides the handlers' sites: `ShapeEnv.pending_fresh_unbacked_symbols`, a list;
the `fwd_fn` of `AutogradFunctionApplyVariable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from fxpasses.base.once import warn_once
from fxpasses.dynamo.dynamo_names import DynamoNames, user_line
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.retracing import comes_of_capture
from fxpasses.graph.symbols import unbacked_symbols

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_FUNCTION = "torch._dynamo.variables.higher_order_ops.AutogradFunctionApplyVariable"

handlers = Handlers()


class _Numbers:
    """any: whether an autograd function reads a number that is captured."""

    def __init__(self, trace: Trace) -> None:
        self.any = False


@handlers.at(method(_FUNCTION, "call_function"))
def apply(trace: Trace, proceed: Proceed, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    names = DynamoNames.find()
    numbers = trace.state(_Numbers)
    before, numbers.any = numbers.any, False
    try:
        result = proceed(self, tx, *args, **kwargs)
    except Exception as error:
        passed_on = isinstance(error, (names.restart, names.skip, names.unsupported))
        if passed_on or trace.attempt.flags is None or not comes_of_capture(error):
            raise
        raise _break(self, names, error) from error
    if numbers.any and not trace.has(Feature.INSIDE):
        raise _break(self, names, None)
    if numbers.any:
        trace.suspects.add(Feature.INSIDE)
    numbers.any |= before
    return result


@handlers.at(method("torch._functorch.autograd_function.AutogradFunctionApply", "__call__"))
def run(trace: Trace, proceed: Proceed, *args: Any, **kwargs: Any) -> Any:
    if trace.graph is None:
        return NOT_HANDLED
    pending = trace.graph.output.shape_env.pending_fresh_unbacked_symbols
    before = list(pending)
    results = proceed(*args, **kwargs)
    known = set(before).union(*map(unbacked_symbols, pytree.tree_leaves(results)))
    trace.state(_Numbers).any |= len(pending) > len(before)
    pending[:] = [symbol for symbol in pending if symbol in known]
    return results


def _break(function: Any, names: DynamoNames, error: Exception | None) -> Exception:
    """The exception by which Dynamo breaks the graph at an autograd function."""
    name = getattr(function.fwd_fn, "__qualname__", "forward").rpartition(".")[0] or "an autograd function"
    name = name.rpartition("<locals>.")[2]
    why = "" if error is None else f" ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
    text = f"`{name}`, called at {user_line()}, needs a number in its forward that is known only when it runs{why}"
    warn_once(("function", name, user_line()), f"{text}. The graph breaks there, and the function runs uncompiled.")
    return names.unsupported(f"Number in an autograd function\n  Explanation: {text}.")
