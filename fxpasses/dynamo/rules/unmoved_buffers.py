"""`self.table = self.table.to(x.device, x.dtype)` for a buffer that is there already, in one graph.

Eager mode returns the buffer itself, and the assignment changes nothing. Dynamo makes another tensor, which has the
marks of a buffer and not its attributes, and breaks the graph at the assignment (CTRL's table of positions).

Private names, checked on torch 2.11, 2.13 and 2.15: `_is_buffer`, by which `isinstance(tensor, nn.Buffer)` tells, and
`GuardBuilder.CONSTANT_MATCH`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable

from fxpasses.dynamo.hints import TENSOR
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

handlers = Handlers()


@handlers.at(method(TENSOR, "call_method"), order=6)
def to(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name != "to" or not _is_buffer(self) or set(kwargs) - {"device", "dtype"}:
        return NOT_HANDLED
    given = [*args, *kwargs.values()]
    if not all(value.is_python_constant() for value in given):
        return NOT_HANDLED
    constants = [value.as_python_constant() for value in given]
    example = self.as_proxy().node.meta["example_value"]
    return self if all(_is_its_own(example, constant) for constant in constants) else NOT_HANDLED


@handlers.at(method(TENSOR, "var_getattr"))
def attribute(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, *args: Any) -> Any:
    if name != "persistent" or not _is_buffer(self):
        return NOT_HANDLED
    persistent = getattr(self.as_proxy().node.meta["example_value"], name, None)
    if not isinstance(persistent, bool):
        return NOT_HANDLED
    install_guard(AttrSource(self.source, name).make_guard(GuardBuilder.CONSTANT_MATCH))
    return ConstantVariable.create(persistent)


def _is_buffer(tensor: Any) -> bool:
    example = tensor.as_proxy().node.meta.get("example_value")
    return getattr(tensor, "source", None) is not None and getattr(example, "_is_buffer", False)


def _is_its_own(tensor: torch.Tensor, wanted: Any) -> bool:
    """Whether `wanted` is the dtype or the device of a tensor, or None."""
    if isinstance(wanted, torch.dtype):
        return tensor.dtype == wanted
    if isinstance(wanted, str):
        return str(tensor.device) == wanted
    return wanted is None or wanted == tensor.device
