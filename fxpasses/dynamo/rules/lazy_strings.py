"""f-strings with sizes that are never read, such as the message of a check that holds.

    check(n * width == features.numel(), f"tokens: {n}, features: {features.shape[0]}")

Dynamo formats a size only when the string is read. But it reads every part when it joins them, and so specialises the
frame for this one size: a vision-language model would be compiled for each number of image tokens. Here the parts are
joined when the string is read.

Private names, checked on torch 2.13, besides the handler's site: `LazySymNodeFormatString`, `LazyCache`, and
`LazyVariableTracker.is_realized` and `peek_value`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch._dynamo.variables import StringFormatVariable
from torch._dynamo.variables.lazy import LazyCache, LazySymNodeFormatString, LazyVariableTracker

from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, opcodes

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

handlers = Handlers()


class _Joined(LazyCache):
    """A string that is joined when it is read. value: one of its parts, which tells Dynamo that it is a string."""

    def __init__(self, value: LazySymNodeFormatString, join: Callable[[], Any]) -> None:
        super().__init__(value, None)
        self._join = join

    def realize(self) -> None:
        self.vt = self._join()


@handlers.at(opcodes("BUILD_STRING"))
def join(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    parts = tx.stack[-inst.arg :]
    sizes = [part.peek_value() for part in parts if _is_size(part)]
    if not sizes or not all(_is_size(part) or _is_text(part) for part in parts):
        return NOT_HANDLED
    tx.popn(inst.arg)
    tx.push(LazyVariableTracker(_Joined(sizes[0], functools.partial(_join, tx, parts, proceed, inst))))
    return None


def _join(tx: Any, parts: Sequence[Any], proceed: Proceed, inst: Any) -> Any:
    for part in parts:
        tx.push(part)
    proceed(tx, inst)
    return tx.pop()


def _is_size(part: Any) -> bool:
    """Whether a part is a size that has not been formatted yet."""
    if type(part) is not LazyVariableTracker or part.is_realized():
        return False
    return isinstance(part.peek_value(), LazySymNodeFormatString)


def _is_text(part: Any) -> bool:
    return isinstance(part, StringFormatVariable) or bool(part.is_python_constant())
