"""Sums and products of floating-point numbers, in the order in which the program computes them.

PyTorch describes a number that a program computes from sizes and reads by a sympy expression, from which it answers
questions, checks guards and generates code. sympy simplifies sums and products as if of real numbers: it turns
`n * 0.7 * 10` into `7.0 * n`. For n = 3 that is 21.0; Python gives 20.999999999999996, for which `if` takes another
branch and `int` gives another size. Here each sum and product of floats is a function of two numbers that sympy does
not look into, like PyTorch's own quotients and powers. Sums and products of integers are exact in any order.

`a // b` and `a % b` of floats have no such function in PyTorch, which treats them as integers: they break the graph.

Private names, checked on torch 2.13: `SymNode._add`, `_sub` and `_mul`, the constructor of `SymNode`, the cached dict
that `torch.utils._sympy.interp.handlers` returns, and `_torch_sympystr`, the printing method of PyTorch's printers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
from sympy.printing.precedence import PRECEDENCE
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy import interp

from fxpasses.dynamo.interceptions import Handlers, Proceed, method

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_NODE = "torch.fx.experimental.sym_node.SymNode"

handlers = Handlers()


class _OfTwoFloats(sympy.Function):
    """A function that is evaluated as Python would, once both operands are known."""

    is_real = True
    precedence = PRECEDENCE["Atom"]  # it prints its own parentheses
    sign = ""

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        if isinstance(a, sympy.Number) and isinstance(b, sympy.Number):
            return sympy.Float(cls.of_floats(float(a), float(b)))
        return None

    @staticmethod
    def of_floats(a: float, b: float) -> float:
        raise NotImplementedError

    def _torch_sympystr(self, printer: Any) -> str:
        a, b = (printer.parenthesize(operand, PRECEDENCE["Atom"]) for operand in self.args)
        return f"({a} {self.sign} {b})"

    _sympystr = _torch_sympystr


class FloatAdd(_OfTwoFloats):
    sign = "+"

    @staticmethod
    def of_floats(a: float, b: float) -> float:
        return a + b


class FloatMul(_OfTwoFloats):
    sign = "*"

    @staticmethod
    def of_floats(a: float, b: float) -> float:
        return a * b


interp.handlers().update({FloatAdd: "add", FloatMul: "mul"})


@handlers.at(method(_NODE, "_add"))
def add(trace: Trace, proceed: Proceed, self: Any, other: Any) -> Any:
    return _in_order(proceed(self, other), FloatAdd, self.expr, other.expr)


@handlers.at(method(_NODE, "_sub"))
def subtract(trace: Trace, proceed: Proceed, self: Any, other: Any) -> Any:
    return _in_order(proceed(self, other), FloatAdd, self.expr, -other.expr)


@handlers.at(method(_NODE, "_mul"))
def multiply(trace: Trace, proceed: Proceed, self: Any, other: Any) -> Any:
    return _in_order(proceed(self, other), FloatMul, self.expr, other.expr)


def _in_order(result: Any, function: type[_OfTwoFloats], a: Any, b: Any) -> Any:
    """The node of a sum or product, as a function of two numbers if it is a float."""
    if result.pytype is not float or (expression := function(a, b)) == result.expr:
        return result
    return SymNode(expression, result.shape_env, float, result.hint, fx_node=result.fx_node)
