"""`for e, count in enumerate(counts.cpu().numpy())`: counts of tokens in a NumPy array, read as by `tolist()`.

Dynamo represents an element of an array as an array, so slices with such bounds have untraceable sizes. Here the
elements of a one-dimensional array of counts become symbols, like the elements of `counts.tolist()`. NumPy's integers
differ from Python's: they have methods, other types, and other arithmetic. So this too is speculation, recorded as a
`SpeculatedBranch` of the kind "numbers": an operation that tells the two apart ends the trace (`Unprovable`), and a
pass must eliminate the numbers, else the frame is traced again with arrays.

Private names, checked on torch 2.11, 2.13 and 2.15, besides the handlers' sites: in Dynamo's graph, `Tensor.numpy()` is
`view_as` of a tensor and itself.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, SymNodeVariable
from torch.fx import Node

from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.experts.branches import READ, SpeculatedBranch, mark
from fxpasses.experts.capture.speculation import Speculation
from fxpasses.experts.routing import writes_integers

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

# Operations whose results are equal for NumPy's and Python's integers.
_ALLOWED = frozenset(
    {operator.add, operator.iadd, operator.sub, operator.isub, operator.eq, operator.ne, operator.lt, operator.le,
     operator.gt, operator.ge, operator.getitem, operator.setitem, operator.not_, int, bool, slice}
)  # fmt: skip
_WIDE = (torch.int32, torch.int64)
_NUMBER = "torch._dynamo.variables.tensor.SymNodeVariable"

handlers = Handlers()


@handlers.at(method("torch._dynamo.variables.builtin.BuiltinVariable", "call_function"), order=1)
def use(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Check the use of a number; read `counts[e]` of an array of counts, for a number e."""
    trace.state(NumpyCounts).check_use(self.fn, (*args, *kwargs.values()))
    if self.fn is not operator.getitem or len(args) != 2 or not isinstance(args[0], NumpyNdarrayVariable):
        return NOT_HANDLED
    numbers = trace.state(NumpyCounts).of(tx, args[0]) if args[1].is_python_constant() else None
    place = args[1].as_python_constant() if numbers is not None else None
    return numbers[place] if numbers is not None and type(place) is int and place < len(numbers) else NOT_HANDLED


@handlers.at(method(_NUMBER, "call_method"), method(_NUMBER, "var_getattr", "tp_getattro_impl"))
def ask(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
    """`count.item()`, `count.dtype`: Python's integers have no such attributes."""
    trace.state(NumpyCounts).check_use(name, (self,))
    return NOT_HANDLED


@handlers.at(
    method("torch._dynamo.variables.tensor.TensorVariable", "unpack_var_sequence"),
    without="`for count in counts.numpy()` breaks the graph",
)
def unpack(trace: Trace, proceed: Proceed, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    numbers = trace.state(NumpyCounts).of(tx, self)
    return NOT_HANDLED if numbers is None else list(numbers)


@handlers.at(
    method("torch._dynamo.variables.tensor.NumpyNdarrayVariable", "call_method"),
    without="slices by `counts.numpy().cumsum()` break the graph",
)
def cumsum(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """`counts.numpy().cumsum(0)` becomes `counts.cumsum(0).numpy()`."""
    node = _tensor_behind(tx, self) if name == "cumsum" else None
    given = [*args, *kwargs.values()]
    if (
        node is None
        or set(kwargs) - {"axis"}
        or len(given) > 1
        or not trace.state(Speculation).values.routing.concerns(node)
    ):
        return NOT_HANDLED
    if given and not (given[0].is_python_constant() and given[0].as_python_constant() in (0, -1)):
        return NOT_HANDLED
    ends = tx.output.create_proxy("call_method", "cumsum", (_proxy(tx, node), 0), {})
    return wrap_fx_proxy(tx, ends).call_method(tx, "numpy", [], {})


def close(trace: Trace) -> None:
    trace.state(NumpyCounts).finish()


class NumpyCounts:
    """The arrays of counts of one trace."""

    def __init__(self, trace: Trace) -> None:
        self._speculation = trace.state(Speculation)
        self._numbers: dict[Node, list[Any]] = {}
        self._checked: dict[Node, Node] = {}  # by array: the last node that is known not to write to it
        self._branches: list[tuple[SpeculatedBranch, Node]] = []
        self._symbols: set[Any] = set()

    def of(self, tx: Any, array: Any) -> list[Any] | None:
        """The elements of an array as Dynamo's numbers; None if it is not an array of counts.

        A branch must not be the first to read them: without the branch they would be undefined.
        """
        node = _tensor_behind(tx, array)
        if node is None:
            return None
        self._forget_written(node)
        if node not in self._numbers:
            if self._speculation.open or not self._speculation.values.routing.concerns(node):
                return None
            self._numbers[node] = self._read(tx, node)
        return self._numbers[node]

    def check_use(self, function: Any, args: Any) -> None:
        """Raise `Unprovable` for a Python function that may return another result for NumPy's integers."""
        if function not in _ALLOWED and any(map(self._is_number, args)):
            raise self._speculation.refusal(f"`{getattr(function, '__name__', function)}` of numbers from NumPy")

    def _is_number(self, value: Any) -> bool:
        """Whether one of Dynamo's variables is such a number, or was computed from one."""
        if not self._symbols or not isinstance(value, SymNodeVariable):
            return False
        node = getattr(value.sym_num, "node", None)
        return node is not None and not self._symbols.isdisjoint(node.expr.free_symbols)

    def _read(self, tx: Any, node: Node) -> list[Any]:
        branch = self._speculation.new("numbers")
        self._branches.append((branch, node))
        numbers = []
        for place in range(node.meta["example_value"].shape[0]):
            element: Any = wrap_fx_proxy(tx, _proxy(tx, node)[place])
            number = element.call_method(tx, "item", [], {})
            numbers.append(number)
            if isinstance(number, SymNodeVariable):
                mark(number.as_proxy().node, branch, READ)
                self._symbols |= number.sym_num.node.expr.free_symbols
        self._checked[node] = node.graph._root.prev
        return numbers

    def finish(self) -> None:
        """The graph is complete: a branch ends well if nobody has written to its array since all elements were read.

        A loop over an array reads elements one by one; here all were read at its start.
        """
        for branch, node in self._branches:
            self._forget_written(node)
            branch.ended = node in self._numbers

    def _forget_written(self, node: Node) -> None:
        """Forget numbers that were read before a write to integers: they may be stale."""
        last = self._checked.get(node)
        if last is None:
            return
        while not last._erased and last.next is not node.graph._root:
            last = last.next
            if last.op.startswith("call") and writes_integers(last):
                break
        else:
            if not last._erased:
                self._checked[node] = last
                return
        del self._numbers[node], self._checked[node]


def _proxy(tx: Any, node: Node) -> Any:
    return torch.fx.Proxy(node, tx.output.current_tracer)


def _tensor_behind(tx: Any, array: Any) -> Node | None:
    """The tensor of counts that a one-dimensional array is a view of."""
    if not isinstance(array, NumpyNdarrayVariable):
        return None
    node = array.as_proxy().node
    if node.op != "call_method" or node.target != "view_as" or node.args[0] is not node.args[1]:
        return None
    source: Any = node.args[0]
    example = source.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.ndim != 1 or example.dtype not in _WIDE:
        return None
    is_here = source.graph is tx.output.current_tracer.graph
    return source if is_here and isinstance(example.shape[0], int) and example.shape[0] > 1 else None
