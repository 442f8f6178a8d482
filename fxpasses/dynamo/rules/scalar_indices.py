"""`mask[rows, cols] = False` where `rows` is a tuple of integer tensors [], in one graph.

    rows, cols = zip(*pairs)                         before: Dynamo fails, as the index is not a tensor
    mask[rows, cols] = False                         after:  mask[torch.stack(rows), torch.stack(cols)] = False

Eager mode makes a tensor of such a list or tuple inside an index, and reads each element for it (UDOP: 72 reads per
step). A list that is itself the index, `x[[i, j]]`, means something else, and is left to Dynamo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.variables import TupleVariable
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.builder import SourcelessBuilder
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import TensorVariable

from fxpasses.dynamo.hints import BUILTIN, ITEM_WRITE, indexes_tensor
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.substitutions import TENSOR

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

handlers = Handlers()
_WITHOUT = "tuples of integer tensors in an index fail"


@handlers.at(method(TENSOR, "call_method"), order=7, without=_WITHOUT)
def tensor_method(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name not in ("__getitem__", "__setitem__") or not args or not _has_scalars(args[0]):
        return NOT_HANDLED
    return proceed(self, tx, name, [_stacked(tx, args[0]), *args[1:]], kwargs)


@handlers.at(ITEM_WRITE, order=7, without=_WITHOUT)
def write(trace: Trace, proceed: Proceed, self: Any, tx: Any, key: Any, value: Any) -> Any:
    return proceed(self, tx, _stacked(tx, key), value) if _has_scalars(key) else NOT_HANDLED


@handlers.at(method(BUILTIN, "call_function"), order=7, without=_WITHOUT)
def use(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if not indexes_tensor(self, args) or not _has_scalars(args[1]):
        return NOT_HANDLED
    return proceed(self, tx, [args[0], _stacked(tx, args[1]), *args[2:]], kwargs)


def _has_scalars(index: Any) -> bool:
    return type(index) is TupleVariable and any(map(_is_of_scalars, index.items))


def _is_of_scalars(part: Any) -> bool:
    if type(part) not in (ListVariable, TupleVariable) or not part.items:
        return False
    if not all(type(item) is TensorVariable for item in part.items):
        return False
    examples = [item.as_proxy().node.meta["example_value"] for item in part.items]
    return all(example.ndim == 0 and example.dtype is torch.int64 for example in examples)


def _stacked(tx: Any, index: Any) -> Any:
    stack = SourcelessBuilder.create(tx, torch.stack)
    parts = [
        stack.call_function(tx, [ListVariable(list(part.items), mutation_type=ValueMutationNew())], {})
        if _is_of_scalars(part)
        else part
        for part in index.items
    ]
    return TupleVariable(parts)
