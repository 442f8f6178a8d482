"""Calls that Dynamo cannot trace, and the Python code that it traces in their place.

    @substitute(handlers, torch.is_nonzero, when=is_metadata)
    def is_nonzero(input):
        return bool(input)

Dynamo traces the decorated function with the call's arguments, as if the program had called it. So the function may use
whatever Dynamo and the handlers of this package can trace. `when` gets the trace and the arguments (Dynamo's variables,
by their names in the decorated function), and says whether the call may be replaced; if not, the next handler gets the
call. `when` is not asked about a call that does not fit the signature.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._dynamo.variables.functions import UserFunctionVariable

from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

TENSOR = "torch._dynamo.variables.tensor.TensorVariable"
TORCH_FUNCTION = "torch._dynamo.variables.torch.TorchInGraphFunctionVariable"
_orders = itertools.count(8)  # after the handlers that look at every call; each substitution has its own function

Body = Callable[..., Any]
When = Callable[..., bool]


def substitute(handlers: Handlers, *called: Any, when: When, without: str = "") -> Callable[[Body], Body]:
    """Register the decorated function in place of functions of torch, and of methods (`torch.Tensor.bincount`).

    handlers: the feature's. when: as above. without: as in `Handlers.at`.
    """

    def register(body: Body) -> Body:
        signature = inspect.signature(body)

        def answer(trace: Trace, tx: Any, args: Any, kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return NOT_HANDLED
            if not when(trace, **{name: value.realize() for name, value in given.items()}):
                return NOT_HANDLED
            traced: Any = UserFunctionVariable(cast(FunctionType, body))
            return traced.call_function(tx, args, kwargs)

        def call(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            return answer(trace, tx, args, kwargs) if any(self.value is each for each in called) else NOT_HANDLED

        def call_method(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            return answer(trace, tx, [self, *args], kwargs) if name in methods else NOT_HANDLED

        order = next(_orders)
        names = {getattr(each, "__name__", "") for each in called}
        methods = {name for name in names if getattr(torch.Tensor, name, None) in called}
        handlers.at(method(TORCH_FUNCTION, "call_function"), order=order, without=without)(call)
        if methods:
            handlers.at(method(TENSOR, "call_method"), order=order, without=without)(call_method)
        return body

    return register


def example(variable: Any) -> torch.Tensor:
    """Dynamo's example of a tensor, a fake tensor."""
    return variable.as_proxy().node.meta["example_value"]


def are_tensors(*variables: Any) -> bool:
    return all(variable.is_tensor() for variable in variables)


def are_constants(*variables: Any) -> bool:
    return all(variable.is_python_constant() for variable in variables)
