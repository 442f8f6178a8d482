"""Writes to Dynamo's graph what a loop over parts computes for all parts.

Private names, checked on torch 2.11, 2.13 and 2.15: `create_proxy` and `current_tracer` of Dynamo's `OutputGraph`,
`wrap_fx_proxy`, and `_erased` of a node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx import Node, Proxy
from torch.fx.node import map_aggregate

from fxpasses.dynamo.trace import Trace
from fxpasses.graph.symbols import expression
from fxpasses.graph.values import Tensor as TensorValue
from fxpasses.sequences.capture.lists import Lengths


class Value:
    """A value for all parts: Dynamo's variable, and its dimensions of rows."""

    def __init__(self, variable: Any, dims: tuple[int, ...]) -> None:
        self.variable, self.dims = variable, dims


class Writer:
    """Adds calls to the graph that Dynamo is writing (`batching.Graph`).

    rows: Dynamo's variable of T; None if nothing is cut. variables: those of the nodes. key: equal for the same parts.
    """

    def __init__(self, trace: Trace, tx: Any, lengths: Lengths, rows: Any) -> None:
        self._trace, self._tx, self._lengths = trace, tx, lengths
        self.variables: dict[Node, Any] = {}
        self.rows, self._rows = None if rows is None else _number(rows), rows
        self.key = tx.output.current_tracer, lengths.key, None if rows is None else expression(_value(rows))
        count = lengths.tensor.call_method(tx, "size", [ConstantVariable.create(0)], {})
        self.count, self._count = _number(count), count

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """A call with Dynamo's variables; its variable."""
        return self._note(self._wrap(target, tuple(arg.as_proxy() for arg in args), kwargs))

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = self._tx.output.current_tracer

        def proxy(leaf: Any) -> Any:
            return Proxy(leaf, tracer) if isinstance(leaf, Node) else leaf

        given: Any = map_aggregate((args, kwargs), proxy)
        found = self._note(self._wrap(target, *given))
        if isinstance(found, TensorVariable):
            return found.as_proxy().node
        return [self._note(item).as_proxy().node for item in found.items]

    def is_current(self) -> bool:
        """Whether the lengths are still those of the program's list."""
        return self._lengths.is_own or key_of(self._trace, self._lengths.tensor) == self._lengths.key

    def fits(self) -> bool:
        """Whether the lengths sum to T, and none is negative; eager mode raises if not."""
        lengths = self._lengths.tensor
        return all(map(self._is_sum, (lengths, lengths.call_method(self._tx, "abs", [], {}))))

    def _is_sum(self, lengths: Any) -> bool:
        total = lengths.call_method(self._tx, "sum", [], {}).call_method(self._tx, "item", [], {})
        number, rows = map(_value, (total, self._rows))
        with self._trace.insisting():
            if not self._trace.can_answer(number) and not self._lengths.is_own:
                return False
            if self._trace.can_answer(number) and self._trace.can_answer(rows):
                return bool(number == rows)
            torch._check(number == rows)  # when the graph runs
            return True

    def local(self, variable: Any) -> Node:
        """The node of a variable in the graph that is being written."""
        proxy = variable.as_proxy()
        if proxy.node.graph is self._tx.output.current_tracer.graph:
            self.variables[proxy.node] = variable
            return proxy.node
        return self._note(variable.call_method(self._tx, "view_as", [variable], {})).as_proxy().node

    def sum_of_parts(self, node: Node) -> Node:
        """The sum of a value for each part, in its dtype, as Python's `sum` adds."""
        dtype = node.meta["example_value"].dtype
        return self.emit(torch.sum, node, 0, dtype=torch.int64 if dtype is torch.bool else dtype)

    def size(self, node: Node, dim: int) -> Any:
        return _number(self.variables[node].call_method(self._tx, "size", [ConstantVariable.create(dim)], {}))

    def number(self, node: Node) -> Any:
        """The node of a number, from that of its tensor."""
        return _number(self.variables[node].call_method(self._tx, "item", [], {}))

    def ids(self) -> Node:
        return self._shared("ids", self._make_ids)

    def lengths(self) -> Node:
        return self._shared("lengths", lambda: self._lengths.tensor.call_method(self._tx, "clone", [], {}))

    def same(self) -> Node:
        return self._shared("same", self._make_same)

    def _shared(self, name: str, make: Any) -> Node:
        made, key = self._trace.state(_Shared), (*self.key, name)
        if key not in made or made[key].as_proxy().node._erased:
            made[key] = make()
        return self._note(made[key]).as_proxy().node

    def _make_ids(self) -> Any:
        device = self._lengths.tensor.as_proxy().node.meta["example_value"].device
        numbers = self._wrap(torch.arange, (_proxy(self._count),), {"device": device})
        lengths = self._lengths.tensor.as_proxy()
        return self._wrap(torch.repeat_interleave, (numbers.as_proxy(), lengths), {"output_size": _proxy(self._rows)})

    def _make_same(self) -> Any:
        ids = self.ids()
        rows, columns = self.emit(torch.unsqueeze, ids, 1), self.emit(torch.unsqueeze, ids, 0)
        return self.variables[self.emit(torch.eq, rows, columns)]

    def _wrap(self, target: Any, args: Any, kwargs: Any) -> Any:
        op = "call_method" if isinstance(target, str) else "call_function"
        return wrap_fx_proxy(tx=self._tx, proxy=self._tx.output.create_proxy(op, target, args, kwargs))

    def _note(self, variable: Any) -> Any:
        if isinstance(variable, TensorVariable):
            self.variables[variable.as_proxy().node] = variable
        return variable


def key_of(trace: Trace, tensor: Any) -> Any:
    """Equal for two tensors of metadata with the same values; None for others."""
    node = tensor.as_proxy().node
    if trace.graph is None or not trace.graph.is_metadata(node):
        return None
    value = trace.graph.walk.values[node]
    return (value.number, value.memory.version) if isinstance(value, TensorValue) else None


class _Shared(dict[Any, Any]):
    """Variables that all loops over the same parts share."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()


def _number(variable: Any) -> Any:
    return variable.as_python_constant() if variable.is_python_constant() else variable.as_proxy().node


def _value(variable: Any) -> Any:
    """A number, symbolic or not."""
    return variable.as_python_constant() if variable.is_python_constant() else variable.sym_num


def _proxy(variable: Any) -> Any:
    return variable.as_python_constant() if variable.is_python_constant() else variable.as_proxy()
