"""Operations on numbers of the batch that fail for some numbers.

    try:
        scale = lengths.sum().item() / (lengths > 2).sum().item()
    except ZeroDivisionError:
        scale = 0.0
    return h * math.sqrt(lengths.min().item() - 2)

A captured number is computed when the graph runs, outside of the `try`, and generated code computes infinity or NaN
where Python raises. So the graph breaks, as under stock PyTorch:

- where such a number is read in a `try`, or an operation that may fail takes an earlier one there;
- where a function is not defined for the batch's number. If it is defined, that is guarded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from fxpasses.dynamo.dynamo_names import DynamoNames
from fxpasses.dynamo.size_defaults import OF_PROGRAM
from fxpasses.graph.effects import leaves
from fxpasses.graph.symbols import expression, is_unbacked

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Functions of one or two numbers that never fail.
_TOTAL = frozenset(
    {"abs", "add", "and_", "eq", "ge", "gt", "le", "lt", "mul", "ne", "neg", "not_", "or_", "pos", "sub"}
)
# Functions of a number that are defined only for some numbers.
_PARTIAL = frozenset({"pow", "_sym_acos", "_sym_asin", "_sym_log2", "_sym_sqrt"})


def check_operation(trace: Trace, node: Node, args: tuple[Any, ...]) -> None:
    """Break the graph before an operation on a batch's number that fails, or whose error the program may catch."""
    if trace.attempt.flags is None:
        return
    if _may_fail(node, args) and trace.is_in_try():
        raise _broken(f"`{node.name}` in `try`", "Its error would not be raised where the program catches it")
    if _is_compared_with_itself(node, args):
        raise _broken(f"`{node.name}`, of a number with itself", "NaN is not equal to itself")
    if not all(_holds(trace, condition) for condition in _conditions(node, args)):
        raise _broken(f"`{node.name}`", "It is not defined for this batch")


def check_assertion(trace: Trace) -> None:
    """Break the graph at an `assert` of a number in a `try`: Dynamo would put the assertion into the graph."""
    if trace.attempt.flags is not None and trace.is_in_try():
        raise _broken("`assert` in `try`", "Its error would not be raised where the program catches it")


def _broken(what: str, why: str) -> Exception:
    broken: Exception = DynamoNames.find().unsupported(f"{what} of a number of the batch\n  Explanation: {why}.")
    return broken


def _conditions(node: Node, args: tuple[Any, ...]) -> list[Any]:
    """The conditions on a number of the batch under which a function of it is defined."""
    name, x = getattr(node.target, "__name__", ""), args[0] if args else None
    if name not in _PARTIAL or not isinstance(x, (torch.SymInt, torch.SymFloat)) or not is_unbacked(x):
        return []
    if name == "pow":
        exponent = args[1] if isinstance(args[1], (int, float)) else 1
        return [x != 0] * (exponent < 0) + [x >= 0] * (not float(exponent).is_integer())
    if name in ("_sym_acos", "_sym_asin"):
        return [x >= -1, x <= 1]
    return [x > 0 if name == "_sym_log2" else x >= 0]


def _holds(trace: Trace, condition: Any) -> bool:
    return not trace.can_answer(condition) or bool(condition)


def _is_compared_with_itself(node: Node, args: tuple[Any, ...]) -> bool:
    """Whether an operator compares a float with itself (`x != x`), which sympy decides as for a real number."""
    if getattr(node.target, "__name__", "") not in ("eq", "ge", "gt", "le", "lt", "ne") or len(args) != 2:
        return False
    x, y = args
    return isinstance(x, torch.SymFloat) and isinstance(y, torch.SymFloat) and expression(x) == expression(y)


def _may_fail(node: Node, args: tuple[Any, ...]) -> bool:
    """Whether an operator reads a number, or fails for some numbers that only the batch determines."""
    if node.op == "call_method":
        return node.target == "item"
    if node.op != "call_function":
        return False
    name, given = getattr(node.target, "__name__", ""), leaves(args)
    if name in OF_PROGRAM:
        return any(isinstance(value, _NUMBERS) for value in given)
    if name in _TOTAL or not any(isinstance(value, _NUMBERS) and is_unbacked(value) for value in given):
        return False
    if name == "getitem":  # not `x[:n]`
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, torch.SymInt) and is_unbacked(part) for part in parts)
    return name == "select" or not any(isinstance(value, torch.Tensor) for value in given)
