"""Tensors that checkpointed layers share through a dict of their caller, in one graph.

In Gemma 3n and 4, some layers attend to the keys and values of an earlier layer, which stores them in a dict:

    shared = {}                                             # made by the frame
    x = checkpoint(layers[0], x, shared)                    # shared["full"] = k, v
    x = checkpoint(layers[1], x, shared)                    # k, v = shared["full"]

In a checkpoint, Dynamo breaks the graph at the store ("HOP: Unsafe side effect"), because eager mode repeats it in the
recomputation and compiled code does not. Here the first body returns the tensors, and the second takes them as
operands. In eager mode, the second body is recomputed first and also reads the tensors of forward; the recomputation of
the first body then stores equal tensors, which nobody reads any more. This holds if

- the frame made the dict, and is captured as a whole;
- each key is stored in the body of one checkpoint, and never later, with the random state preserved, which is the
  default;
- no body reads the key before the store, and nothing but items is read or stored: no length, no iteration;
- the tensors are not written to.

Every other store breaks the graph as in stock PyTorch. If a violation is seen only later, the frame is traced again
without this feature.

Private names, checked on torch 2.11 and 2.13, besides the handlers' sites: `ValueMutationNew`,
`is_side_effect_safe`, and `side_effects.allow_externally_visible_side_effects_in_subtracer`, by which a checkpoint
returns the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch._dynamo.side_effects import allow_externally_visible_side_effects_in_subtracer, is_side_effect_safe
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx import GraphModule

from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Place, Proceed, Site, method
from fxpasses.dynamo.rules.bodies import ALL, Ledger, StorePlace, outer_body
from fxpasses.dynamo.rules.value_parts import parts_of

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_DICT = "torch._dynamo.variables.dicts.ConstDictVariable"
_READS = ("__contains__", "__getitem__", "get")
_HAS_SLOTS = hasattr(ConstDictVariable, "mp_ass_subscript_impl")  # torch 2.11 has only the method `call_method`
_IMMUTABLE = (TensorVariable, TupleVariable)  # allowed parts of a value; writes to a tensor are found separately

handlers = Handlers(checked=("2.11.0", "2.13.0"), elsewhere=False)  # 2.15 asks for the length in another place


def check(trace: Trace, gm: GraphModule | None, rewritten: GraphModule | None) -> None:
    trace.state(SharedTensors).check(gm)


class SharedTensors(Ledger):
    """Items of dicts. A dict is identified by its mutation type, which Dynamo's copies of the dict share."""

    feature = Feature.SHARED
    _is_storing = False

    def changed(self, shared: Any, key: Any) -> None:
        """Record a change of an item by the frame or a body: the recomputation of an earlier store would undo it."""
        if not self._is_storing and any(known is shared and key in (ALL, other) for known, other in self._by):
            self.conflicts.append("an item that a checkpoint stored is changed")

    def allow(self, place: StorePlace, value: Any, body: Any) -> bool:
        """Whether a body may store an item; if so, the store is recorded."""
        parts = list(parts_of(value))
        if any(type(part) not in _IMMUTABLE for part in parts) or self.is_read(place) or place in self._by:
            return False
        self.record(place, parts, body)
        return True

    @contextmanager
    def storing(self) -> Iterator[None]:
        """While an item is stored, Dynamo notes that the dict changes."""
        self._is_storing = True
        try:
            yield
        finally:
            self._is_storing = False


def _slots(*names: str) -> Site:
    """Those of a dict variable's methods `names` that this torch has; none where it calls `call_method` alone."""

    def places() -> Iterable[Place]:
        return [(ConstDictVariable, name) for name in names if _HAS_SLOTS and hasattr(ConstDictVariable, name)]

    return Site(f"{_DICT}.{names[0]}", places)


@handlers.at(method(_DICT, "call_method"))
def call(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "__setitem__":
        return (
            NOT_HANDLED if _HAS_SLOTS else _store(trace, tx, self, args, lambda: proceed(self, tx, name, args, kwargs))
        )
    return _read(trace, tx, self, args[0] if name in _READS else None)


@handlers.at(_slots("mp_subscript_impl", "sq_contains"), without="keys and values that layers share break the graph")
def read_item(trace: Trace, proceed: Proceed, self: Any, tx: Any, key: Any, /) -> Any:
    return _read(trace, tx, self, key)


@handlers.at(
    _slots("mp_length", "nb_inplace_or_impl", "nb_or_impl", "richcompare_impl", "tp_iter_impl", "unpack_var_sequence"),
    without="keys and values that layers share break the graph",
)
def read_all(trace: Trace, proceed: Proceed, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    return _read(trace, tx, self, None)


@handlers.at(_slots("mp_ass_subscript_impl"), without="keys and values that layers share break the graph")
def store_item(trace: Trace, proceed: Proceed, self: Any, tx: Any, key: Any, value: Any) -> Any:
    return _store(trace, tx, self, (key, value), lambda: proceed(self, tx, key, value))


@handlers.at(method("torch._dynamo.side_effects.SideEffects", "mutation"), order=3)
def change(trace: Trace, proceed: Proceed, self: Any, var: Any) -> Any:
    """Changes other than a store of an item: `clear`, `pop`, `update`."""
    if _is_of_frame(var):
        trace.state(SharedTensors).changed(var.mutation_type, ALL)
    return NOT_HANDLED


def _is_of_frame(variable: Any) -> bool:
    return type(variable) is ConstDictVariable and isinstance(variable.mutation_type, ValueMutationNew)


def _key(variable: Any) -> Any:
    if variable is None or not variable.is_python_constant():
        return ALL
    return variable.as_python_constant()


def _read(trace: Trace, tx: Any, variable: Any, key: Any) -> Any:
    body = outer_body(tx)
    if _is_of_frame(variable) and (body is not None or _key(key) is ALL):
        trace.state(SharedTensors).read((variable.mutation_type, _key(key)), body)
    return NOT_HANDLED


def _store(trace: Trace, tx: Any, variable: Any, item: Any, proceed: Callable[[], Any]) -> Any:
    if not _is_of_frame(variable):
        return NOT_HANDLED
    key, value = item
    shared, body = variable.mutation_type, outer_body(tx)
    trace.state(SharedTensors).changed(shared, _key(key))
    with trace.state(SharedTensors).storing():
        if body is None or is_side_effect_safe(shared) or _key(key) is ALL or value is None:
            return proceed()
        if not trace.state(SharedTensors).allow((shared, _key(key)), value, body):
            return proceed()
        with allow_externally_visible_side_effects_in_subtracer(tx):
            return proceed()
