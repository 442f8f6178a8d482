"""`Function.apply(mask, mask, q, k)`: an autograd function that is given one tensor twice, in one graph.

Dynamo breaks the graph there, because it tells the operands' gradients apart by the operands. So the second of them is
given as a view of the tensor, `mask.view_as(mask)`: the same memory, and autograd adds up the gradients of both. YOSO
does so in each layer.

A function that may tell the two apart is left to Dynamo: one whose code compares by `is`, or that marks an operand as
written to, or an output as not differentiable.

Private names, checked on torch 2.11, 2.13 and 2.15: the handler's site, and `fn_cls`, the function's class.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from typing import TYPE_CHECKING, Any

import torch

from fxpasses.capture.interceptions import NOT_HANDLED, Handlers, Proceed, method

if TYPE_CHECKING:
    from fxpasses.capture.trace import Trace

handlers = Handlers()
_FUNCTION = "torch._dynamo.variables.misc.AutogradFunctionVariable"
_MARKS = frozenset({"mark_dirty", "mark_non_differentiable"})


@handlers.at(method(_FUNCTION, "call_apply"), without="one tensor for two operands of an autograd function breaks it")
def apply(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    repeats = [_is_among(argument, args[:number]) for number, argument in enumerate(args)]
    if not any(repeats) or _may_tell_apart(self.fn_cls):
        return NOT_HANDLED
    pairs = zip(args, repeats, strict=True)
    given = [argument.call_method(tx, "view_as", [argument], {}) if again else argument for argument, again in pairs]
    return proceed(self, tx, given, kwargs)


def _is_among(argument: Any, others: Any) -> bool:
    return argument.is_tensor() and any(_example(argument) is _example(other) for other in others if other.is_tensor())


def _example(tensor: Any) -> Any:
    return tensor.as_proxy().node.meta["example_value"]


def _may_tell_apart(function: type[torch.autograd.Function]) -> bool:
    for part in (function.forward, function.setup_context, function.backward):
        code = getattr(inspect.unwrap(part), "__code__", None)
        if code is None or _MARKS.intersection(code.co_names):
            return True
        for before, instruction in itertools.pairwise(dis.get_instructions(code)):
            if instruction.opname == "IS_OP" and before.argval is not None:
                return True
    return False
