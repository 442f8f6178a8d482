"""A loop over chunks, `for start in range(0, n, 64):`, in one graph for all n with as many chunks.

Dynamo assumes n. But the number of chunks determines all numbers of the range: here the range ends where the last chunk
ends, so the graph assumes only the number of chunks. The program still reads the end that it gave (`.stop`), and so
does code that takes the range from the compiled frame.

Private names, checked on torch 2.11, 2.13 and 2.15: those of the handlers' sites, and `RangeVariable.items`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.lists import RangeVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Place, Proceed, Site, method
from fxpasses.dynamo.trace import Trace

_RANGE = "torch._dynamo.variables.lists.RangeVariable"

handlers = Handlers()


class _Ends(dict[Any, Any]):
    """By range over chunks: the end that the program gave."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()


@handlers.at(method("torch._dynamo.variables.builtin.BuiltinVariable", "call_function"), order=6)
def call(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    end = _end(trace, args) if self.fn is range else None
    if end is None:
        return NOT_HANDLED
    made = proceed(self, tx, [args[0], ConstantVariable.create(end), args[2]], kwargs)
    trace.state(_Ends)[made] = args[1]
    return made


def _attributes() -> Iterator[Place]:
    """Where `.stop` is read: in a table from torch 2.15 on, and in a method before."""
    members = getattr(RangeVariable, "tp_members", {})
    if "stop" in members:
        yield members["stop"], "getter"
    else:
        yield RangeVariable, "var_getattr"


@handlers.at(Site(f"{_RANGE}.var_getattr", _attributes))
def attribute(trace: Trace, proceed: Proceed, self: Any, tx: Any, /, *args: Any, **kwargs: Any) -> Any:
    """args, kwargs: the name; none where the table has an entry for each."""
    is_end = (not args and not kwargs) or "stop" in (*args, *kwargs.values())
    return trace.state(_Ends).get(self, NOT_HANDLED) if is_end else NOT_HANDLED


@handlers.at(method(_RANGE, "reconstruct"))
def reconstruct(trace: Trace, proceed: Proceed, self: Any, codegen: Any) -> Any:
    if self in trace.state(_Ends):
        self.items[1] = trace.state(_Ends)[self]
    return NOT_HANDLED


def _end(trace: Trace, args: Any) -> int | None:
    """Where the last chunk ends; None if this is not a range over chunks."""
    if len(args) != 3 or not isinstance(args[1], SymNodeVariable):
        return None
    if not all(bound.is_python_constant() for bound in (args[0], args[2])):
        return None
    start, stop, step = args[0].as_python_constant(), args[1].sym_num, args[2].as_python_constant()
    value = trace.number(stop.node.expr) if isinstance(stop, torch.SymInt) and step > 1 else None
    if value is None:
        return None
    end = start + step * len(range(start, int(value), step))
    if (end > start and not stop > end - step) or stop > end:
        return None
    return end
