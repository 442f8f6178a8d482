"""`x[None, tok.tolist()]`: an expert's tokens as a Python list that the program only uses as an index.

    idx, top_x = torch.where(expert_mask[e])         before: the graph ends, as the list's length is not known
    rows = x[None, top_x.tolist()]                   after:  rows = x[None, top_x]

An index that is a list of integers selects the same rows as the tensor of these integers, so the tensor takes its
place. The list itself is never made: it may only be an index, or be asked for its length, and nobody may write to the
tensor before that. Any other use ends the trace (`Unprovable`), and the frame is traced again without this feature.

Private names, checked on torch 2.13, besides the handlers' sites: the attribute `items` of a `ListVariable`,
through which Dynamo accesses the elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.variables import ConstantVariable, TupleVariable
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import TensorVariable

from fxpasses.dynamo.hints import BUILTIN, ITEM_WRITE, indexes_tensor
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.substitutions import TENSOR
from fxpasses.dynamo.trace import Trace
from fxpasses.experts.capture.speculation import Speculation, is_unbacked_size
from fxpasses.experts.routing import writes_integers
from fxpasses.experts.routing_transfer import WIDE
from fxpasses.graph.building import nodes_after

handlers = Handlers(checked=("2.13.0",))


class IndexList(ListVariable):
    """The class of such a list. `tensor` holds its elements as long as nobody writes to it; see `current`."""

    _nonvar_fields = {"refuse", "seen", *ListVariable._nonvar_fields}
    refuse: Callable[[str], Exception]
    tensor: TensorVariable
    seen: Any  # the last node that is known not to write to the tensor

    @property
    def items(self) -> list[Any]:
        raise self.refuse("the elements of a list of an expert's tokens are read")

    @items.setter
    def items(self, items: list[Any]) -> None:
        pass

    def current(self, tx: Any) -> TensorVariable:
        """The tensor. Raises `Unprovable` if it may no longer have the list's elements."""
        root = self.seen.graph._root
        is_elsewhere = tx.output.current_tracer.graph is not self.seen.graph
        if is_elsewhere or any(map(writes_integers, nodes_after(self.seen, root))):
            raise self.refuse("a list of an expert's tokens is read after a write")
        self.seen = root.prev
        return self.tensor


@handlers.at(method(TENSOR, "call_method"), order=5, without="`x[tok.tolist()]` breaks the graph")
def tensor_method(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "tolist" and not args and not kwargs:
        return _listed(trace, tx, self)
    if name == "__setitem__" and len(args) == 2 and _has_list(args[0]):
        return proceed(self, tx, name, [_with_tensors(tx, args[0]), args[1]], kwargs)
    return NOT_HANDLED


@handlers.at(ITEM_WRITE, order=5, without="`x[tok.tolist()] = y` breaks the graph")
def write(trace: Trace, proceed: Proceed, self: Any, tx: Any, key: Any, value: Any) -> Any:
    return proceed(self, tx, _with_tensors(tx, key), value) if _has_list(key) else NOT_HANDLED


@handlers.at(method(BUILTIN, "call_function"), order=5, without="`x[tok.tolist()]` breaks the graph")
def use(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """`x[tokens]`, `x[None, tokens]`, `x[tokens] = y`, and `len(tokens)`."""
    if self.fn is len and len(args) == 1 and type(args[0]) is IndexList:
        return args[0].current(tx).call_method(tx, "size", [ConstantVariable.create(0)], {})
    if not indexes_tensor(self, args) or not _has_list(args[1]):
        return NOT_HANDLED
    return proceed(self, tx, [args[0], _with_tensors(tx, args[1]), *args[2:]], kwargs)


def _listed(trace: Trace, tx: Any, tensor: Any) -> Any:
    """The list of a tensor whose number of integers depends on the router's choice; Dynamo makes other lists."""
    node = tensor.as_proxy().node
    example = node.meta["example_value"]
    if not is_unbacked_size(node) or example.ndim != 1 or example.dtype not in WIDE:
        return NOT_HANDLED
    if trace.can_answer(example.shape[0]) or not trace.state(Speculation).values.routing.concerns(node):
        return NOT_HANDLED
    if trace.state(Speculation).is_only_looped_over(tx) or trace.state(Speculation).is_given_up(tx):
        return NOT_HANDLED
    made: Any = IndexList([], mutation_type=ValueMutationNew())
    made.refuse, made.tensor, made.seen = trace.state(Speculation).refusal, tensor, node.graph._root.prev
    return made


def _has_list(index: Any) -> bool:
    parts = index.items if type(index) is TupleVariable else [index]
    return any(type(part) is IndexList for part in parts)


def _with_tensors(tx: Any, index: Any) -> Any:
    if type(index) is TupleVariable:
        return TupleVariable([_with_tensors(tx, part) for part in index.items])
    return index.current(tx) if type(index) is IndexList else index
