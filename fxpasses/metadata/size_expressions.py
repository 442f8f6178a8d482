"""Symbolic sizes as graphs of Python arithmetic.

The size of `x[:, :n]` is the expression `Min(s0, u0)`. It is known wherever its symbols are, whatever `x` holds, so a
mask or a slice of that size is metadata:

    s0, u0                                     numbers with known values
    sym_min = torch.sym_min(s0, u0)            the value of `x.shape[1]`, without `x`

Torch 2.11 makes a symbol of its own of that size, which the slice's bounds define.

Private names, checked on torch 2.11 and 2.13: `torch.utils._sympy.interp.sympy_interp`,
`torch.utils._sympy.reference.PythonReferenceAnalysis` and the classes of `torch.utils._sympy.functions`;
`node.meta["unbacked_bindings"]`, a dict from the symbols that a node creates to their places in its result.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy import functions
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fxpasses.graph.symbols import expression, is_unbacked, symbol

_ARITHMETIC = (
    sympy.Symbol,
    sympy.Integer,
    sympy.Add,
    sympy.Mul,
    functions.CleanDiv,
    functions.FloorDiv,
    functions.Max,
    functions.Min,
    functions.Mod,
    functions.PowByNatural,
    functions.PythonMod,
    sympy.Pow,
)


def is_arithmetic(size: Any) -> bool:
    """Whether an expression is made of symbols and integers by operators that Python's integers have."""
    parts = sympy.preorder_traversal(size)
    return all(isinstance(part, _ARITHMETIC) and part.is_integer for part in parts)


def arithmetic(size: Any) -> tuple[dict[Any, Node], Node]:
    """A graph that computes an expression for which `is_arithmetic` holds: its inputs by symbol, and its result."""
    graph = Graph()
    tracer = GraphAppendingTracer(graph)
    inputs = {found: graph.placeholder(str(found)) for found in sorted(size.free_symbols, key=str)}
    proxies = {found: Proxy(node, tracer) for found, node in inputs.items()}
    return inputs, sympy_interp(PythonReferenceAnalysis, proxies, size).node


def sizes_of_slices(node: Node) -> dict[Any, Any]:
    """The symbols that `x[:, start:end]` creates as sizes of its result, each with the expression that it equals."""
    if node.target is not operator.getitem or not node.meta.get("unbacked_bindings"):
        return {}
    operands: tuple[Any, ...] = node.args
    x, index = operands
    sliced, result = (each.meta.get("example_value") if isinstance(each, Node) else None for each in (x, node))
    parts = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(sliced, torch.Tensor) or not isinstance(result, torch.Tensor):
        return {}
    if not all(isinstance(part, slice) and part.step in (None, 1) for part in parts) or sliced.dim() != result.dim():
        return {}
    sizes = {}
    for part, before, after in zip(parts, sliced.shape, result.shape, strict=False):
        found = symbol(after) if is_unbacked(after) else None
        start, end = _number(part.start, 0), _number(part.stop, before)
        if found in node.meta["unbacked_bindings"] and start is not None and end is not None:
            size = sympy.sympify(expression(before))
            length = _bound(end, size) - _bound(start, size)
            sizes[found] = functions.Max(length, sympy.Integer(0))
    return sizes


def _number(bound: Any, otherwise: Any) -> Any:
    """A slice's bound as an expression; None for a tensor."""
    number = otherwise if bound is None else bound.meta.get("example_value") if isinstance(bound, Node) else bound
    return sympy.sympify(expression(number)) if isinstance(number, (int, torch.SymInt)) else None


def _bound(bound: Any, size: Any) -> Any:
    """Where a slice's bound lies in a dimension. A negative bound counts from the end."""
    zero, one = sympy.Integer(0), sympy.Integer(1)
    is_negative = functions.Min(functions.Max(-bound, zero), one)
    return functions.Max(functions.Min(bound + size * is_negative, size), zero)
