"""Symbolic sizes as graphs of Python arithmetic.

The size of `x[:, :n]` is the expression `Min(s0, u0)`. It is known wherever its symbols are, whatever `x` holds, so a
mask or a slice of that size is metadata:

    s0, u0                                     numbers with known values
    sym_min = torch.sym_min(s0, u0)            the value of `x.shape[1]`, without `x`

Private names, checked on torch 2.13: `torch.utils._sympy.interp.sympy_interp`,
`torch.utils._sympy.reference.PythonReferenceAnalysis` and the classes of `torch.utils._sympy.functions`.
"""

from __future__ import annotations

from typing import Any

import sympy
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy import functions
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

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
