"""`3 in lengths.tolist()`: Dynamo skips numbers without a value when it searches for a constant.

Stock PyTorch does the same with numbers that it has found to change from call to call, and takes the wrong branch
(docs/upstream.md): so this handler also runs in frames that are traced with stock PyTorch's flags.

Private names, checked on torch 2.13: `torch._dynamo.variables.lists.iter_contains` and those that are imported.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from fxpasses.dynamo.interceptions import Handlers, Proceed, method

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

handlers = Handlers()


@handlers.at(
    method("torch._dynamo.variables.lists", "iter_contains"), without="`3 in lengths.tolist()` breaks the graph"
)
def iter_contains(trace: Trace, proceed: Proceed, items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    items = list(items)
    if not any(isinstance(item, SymNodeVariable) for item in (*items, search)):
        return proceed(items, search, tx, *args, **kwargs)
    for item in items:
        equal: Any = BuiltinVariable(operator.eq).call_function(tx, [item, search], {})
        if equal.is_python_constant():
            found = bool(equal.as_python_constant())
        else:
            found = bool(equal.evaluate_expr(tx.output))  # breaks the graph if the values are unknown
        if found:
            return ConstantVariable.create(True)
    return ConstantVariable.create(False)
