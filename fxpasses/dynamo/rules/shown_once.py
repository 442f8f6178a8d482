"""`warnings.warn(text, FutureWarning)` in a forward pass, in one graph.

Python shows a warning once for each place, unless a filter says otherwise; later calls from there do nothing. Dynamo
breaks the graph at each call. Here the warning is given once, when the frame has been traced, for its place in the
program, and the graph has none. In a speculated branch, only experts with tokens would warn, so that branch is not
speculated on. Left to Dynamo are calls whose arguments are not constants, those under the filters `always` and `error`,
those inside `warnings.catch_warnings` and in backward functions, and those whose `stacklevel` leads out of the frame or
to the caller of a module, whose own frames Dynamo does not trace. If a program changes the filters later, it sees
neither the warning again nor an error.

Private names, checked on torch 2.11, 2.13 and 2.15, besides the handler's site: the translator's `parent`, `f_globals`,
`f_code`, `lineno` and `block_stack`, and `CatchWarningsCtxManagerVariable`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.ctx_manager import CatchWarningsCtxManagerVariable

from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.rules.bodies import is_in_another_body

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_SIGNATURE = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in (("message", inspect.Parameter.empty), ("category", None), ("stacklevel", 1))
    ]
)
_ONCE = ("default", "module", "once", "ignore")

handlers = Handlers()


@handlers.at(method("torch._dynamo.variables.functions.SkipFunctionVariable", "call_function"))
def call(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.value is not warnings.warn:
        return NOT_HANDLED
    given = _constants(args, kwargs)
    if given is None:
        return NOT_HANDLED
    text, category, level = given
    if is_in_another_body(tx) or any(map(_catches, _with_callers(tx))):
        return NOT_HANDLED
    for _ in range(level - 1):
        tx = getattr(tx, "parent", None) if tx.f_code.co_name != "forward" else None
        if tx is None:
            return NOT_HANDLED
    module = tx.f_globals.get("__name__") or "<sys>"
    action = _action(text, category, module, tx.lineno)
    if action not in _ONCE:
        return NOT_HANDLED
    if action != "ignore":
        registry = tx.f_globals.setdefault("__warningregistry__", {})
        place = (tx.f_code.co_filename, tx.lineno, module, registry)
        trace.warnings.append(functools.partial(warnings.warn_explicit, text, category, *place))
        for change in trace.hooks("changed"):
            change(trace)
    return ConstantVariable.create(None)


def _constants(args: Any, kwargs: Mapping[str, Any]) -> tuple[str, type[Warning], int] | None:
    """The text, the category and the stack level; None if they are not constants of these types."""
    if not all(value.is_python_constant() for value in (*args, *kwargs.values())):
        return None
    constants = [value.as_python_constant() for value in args]
    try:
        given = _SIGNATURE.bind(*constants, **{name: value.as_python_constant() for name, value in kwargs.items()})
    except TypeError:
        return None
    given.apply_defaults()
    text, category, level = given.arguments.values()
    category = UserWarning if category is None else category
    is_category = isinstance(category, type) and issubclass(category, Warning)
    return (text, category, max(level, 1)) if isinstance(text, str) and is_category and isinstance(level, int) else None


def _with_callers(tx: Any) -> Iterator[Any]:
    while tx is not None:
        yield tx
        tx = getattr(tx, "parent", None)


def _catches(tx: Any) -> bool:
    """Whether a frame is inside `with warnings.catch_warnings():`."""
    return any(isinstance(block.with_context, CatchWarningsCtxManagerVariable) for block in tx.block_stack)


def _action(text: str, category: type[Warning], module: str, line: int) -> str:
    """The action that Python's filters give for a warning."""
    for action, message, kind, of_module, at in warnings.filters:
        if _matches(message, text) and issubclass(category, kind) and _matches(of_module, module) and at in (0, line):
            return action
    return getattr(warnings, "defaultaction", "default")


def _matches(pattern: Any, text: str) -> bool:
    """Whether a filter's pattern matches: Python's own filters have strings, filters of programs compiled patterns."""
    return pattern is None or (pattern == text if isinstance(pattern, str) else pattern.match(text) is not None)
