"""Inductor's code for a graph, and what gives its results the traced strides, as one object for PyTorch's caches."""

from __future__ import annotations

from typing import Any

from torch._inductor.output_code import CompiledFxGraph

from fxpasses.compiler.lowering_by_operator import Boxed
from fxpasses.compiler.restrides import Restrides


def restrided(compiled: Any, restrides: Restrides) -> Boxed:
    """`compiled` with results of these strides: a graph of Inductor's is changed, something else is wrapped."""
    if not isinstance(compiled, CompiledFxGraph):
        return _Wrapped(compiled, restrides)
    graph: Any = compiled
    graph.__class__ = RestridedGraph
    graph.restrides = restrides
    return graph


class RestridedGraph(CompiledFxGraph):
    restrides: Restrides

    def __call__(self, inputs: Any) -> Any:
        return self.restrides(super().__call__, inputs)


class _Wrapped:
    _boxed_call = True

    def __init__(self, compiled: Boxed, restrides: Restrides) -> None:
        self._compiled, self._restrides = compiled, restrides

    def __call__(self, arguments: list[Any]) -> Any:
        return self._restrides(self._compiled, arguments)
