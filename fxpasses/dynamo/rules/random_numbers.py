"""`if random.uniform(0, 1) < self.layerdrop:` with a rate of zero, in one graph.

Dynamo calls the functions of `random` before the graph, in eager mode's order, and breaks the graph at a branch that
depends on one of the numbers. Layers that are dropped at a rate of zero have such a branch; no number is below the
range's lower end, so the answer does not depend on the number. Other comparisons are left to Dynamo.

Private names, checked on torch 2.11, 2.13 and 2.15, besides the handler's site: `OutputGraph.random_calls`,
`RandomValueSource.random_call_index`.
"""

from __future__ import annotations

import math
import operator
import random
from typing import TYPE_CHECKING, Any

from torch._dynamo.source import RandomValueSource
from torch._dynamo.variables import ConstantVariable

from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, opcodes

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}

handlers = Handlers()


@handlers.at(opcodes("COMPARE_OP"), order=3)
def compare(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    left, right = tx.stack[-2:]
    asked = inst.argval
    least, number = _least(tx, left), right
    if least is None:
        least, number, asked = _least(tx, right), left, _MIRRORED.get(asked, "")
    if least is None or asked not in _COMPARE or not number.is_python_constant():
        return NOT_HANDLED
    number = number.as_python_constant()
    if not isinstance(number, (int, float)) or not _is_decided(asked, least, number):
        return NOT_HANDLED
    tx.popn(2)
    tx.push(ConstantVariable.create(_COMPARE[asked](least, number)))
    return None


def _least(tx: Any, variable: Any) -> float | None:
    """The least value that a number from `random.uniform` may have; None if it is not such a number."""
    source = getattr(variable, "source", None)
    if not isinstance(source, RandomValueSource):
        return None
    function, args, kwargs = tx.output.random_calls[source.random_call_index]
    if function == random.uniform and len(args) == 2 and not kwargs and -math.inf < args[0] <= args[1] < math.inf:
        return float(args[0])
    return None


def _is_decided(asked: str, least: float, number: float) -> bool:
    """Whether all numbers from `least` on compare with `number` in the same way."""
    return number <= least if asked in ("<", ">=") else number < least
