"""Values that a checkpointed layer stores on an outer object, in one graph: `self.splits = counts.tolist()`.

torchtitan's expert parallel records in a layer how many rows it sent to each process; RecurrentGemma stores the state
of its recurrence. In a checkpoint, Dynamo breaks the graph at such a store ("HOP: Unsafe side effect"), because eager
mode repeats it in the recomputation and compiled code does not. The difference is invisible if the repeated store does
not change the attribute:

- The attribute is stored in the body of one checkpoint of the frame, and never stored later. Of several stores in one
  body, the recomputation may execute only the first ones: it stops as soon as it has everything that backward needs. So
  a product that keeps an operand for backward has to follow the last store.
- No body reads it before the store, so that the recomputation reads nothing that differs from forward. Later reads, by
  the same body or the frame, see the stored value.
- The stored value consists of integers, constants and tensors, in lists and tuples, that are not changed later. With
  the random state preserved, which is the default, the recomputation computes the same value.
- The frame was passed to `torch.compile`, and is captured as a whole. If a frame is compiled separately because the
  graph broke in its caller, or only in part, the stores of the rest are unknown.

Every other store breaks the graph as in stock PyTorch. If a violation is seen only later (a store by the frame), the
frame is traced again without this feature. After a step the attribute holds the value stored by the last forward pass.
In eager mode it holds the value stored by the last recomputation, which is equal, unless the surrounding program stores
to the attribute between forward and backward, or runs backward through several forward passes in their order.

Private names, checked on torch 2.13 and 2.15, besides the handlers' sites:
`side_effects.allow_externally_visible_side_effects_in_subtracer`, by which a checkpoint returns the stored value; that
a function of `torch/_dynamo/eval_frame.py` calls compiled code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._dynamo import side_effects
from torch._dynamo.variables.base import AttributeMutationExisting
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.fx import GraphModule, Node

from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.rules.bodies import ALL, Ledger, StorePlace, outer_body
from fxpasses.dynamo.rules.value_parts import parts_of
from fxpasses.graph.calls import operator_of
from fxpasses.graph.traits import PRODUCTS

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_OBJECTS = (UserDefinedObjectVariable, UnspecializedNNModuleVariable)  # `read` sees all reads of their attributes
_EFFECTS = "torch._dynamo.side_effects.SideEffects"
_OBJECT = "torch._dynamo.variables.user_defined.UserDefinedObjectVariable"


handlers = Handlers(checked=("2.13.0", "2.15.0"))


class StoredValues(Ledger):
    """Attributes of objects; an object is identified by its `id`."""

    feature = Feature.STORES

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._lists: dict[int, tuple[Any, Any]] = {}  # stored lists, and the body that stored each
        self._again: dict[StorePlace, Node] = {}  # where a body stores several times: the node before the last store

    def stored(self, place: StorePlace, body: Any) -> None:
        """Record a store by the frame or a body: the recomputation of another body's earlier store would undo it."""
        if place in self._by and self._by[place] is not body:
            self.conflicts.append(f"`{place[1]}` is stored again")

    def changed(self, value: Any, body: Any) -> None:
        if id(value) in self._lists and self._lists[id(value)][1] is not body:
            self.conflicts.append("a list that was stored is changed")

    def allow(self, place: StorePlace, value: Any, body: Any) -> bool:
        """Whether a body may store a value; if so, the store is recorded."""
        parts = list(parts_of(value))
        if self.is_read(place) or self._by.get(place, body) is not body or None in parts:
            return False
        if place in self._by:
            self._again[place] = next(iter(reversed(body.graph.nodes)))
        self.record(place, parts, body)
        self._lists |= {id(part): (part, body) for part in parts if not part.is_tensor()}
        return True

    def conflict(self, gm: GraphModule) -> str:
        for place, last in self._again.items():
            if last._erased or not any(map(_keeps_operand, _after(last))):
                return f"`{place[1]}` is stored several times, and a recomputation may stop between"
        return super().conflict(gm)


def _after(node: Node) -> Iterator[Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _keeps_operand(node: Node) -> bool:
    """Whether eager mode keeps an operand of a call for backward."""
    example = node.meta.get("example_value")
    return operator_of(node) in PRODUCTS and isinstance(example, torch.Tensor) and example.requires_grad


def check(trace: Trace, gm: GraphModule | None, rewritten: GraphModule | None) -> None:
    trace.state(StoredValues).check(gm)


@handlers.at(method(_EFFECTS, "store_attr"))
def store(
    trace: Trace, proceed: Proceed, self: Any, item: Any, name: str, value: Any, *args: Any, **kwargs: Any
) -> Any:
    if type(item) not in _OBJECTS or not isinstance(item.mutation_type, AttributeMutationExisting):
        return NOT_HANDLED
    tx = self.output_graph_weakref().current_tx
    key, body = (id(item.value), name), outer_body(tx)
    trace.state(StoredValues).stored(key, body)
    if body is None or side_effects.is_side_effect_safe(item.mutation_type):
        return NOT_HANDLED
    if not trace.state(StoredValues).allow(key, value, body):
        return NOT_HANDLED
    with side_effects.allow_externally_visible_side_effects_in_subtracer(tx):
        return proceed(self, item, name, value, *args, **kwargs)


@handlers.at(method(_EFFECTS, "mutation"))
def change(trace: Trace, proceed: Proceed, self: Any, var: Any) -> Any:
    trace.state(StoredValues).changed(var, outer_body(self.output_graph_weakref().current_tx))
    return NOT_HANDLED


@handlers.at(method(_OBJECT, "tp_getattro_impl", "var_getattr"))
def read(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str) -> Any:
    return _record_read(trace, self, tx, name)


@handlers.at(method(_EFFECTS, "load_attr"))
def read_stored(trace: Trace, proceed: Proceed, self: Any, item: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Torch 2.15 reads here, and not from the object, an attribute that the trace has stored."""
    if type(item) not in _OBJECTS:
        return NOT_HANDLED
    return _record_read(trace, item, self.output_graph_weakref().current_tx, name)


def _record_read(trace: Trace, variable: Any, tx: Any, name: str) -> Any:
    body = outer_body(tx)
    if body is not None and not (name == "__dict__" and _is_of_module(tx)):
        trace.state(StoredValues).read((id(variable.value), ALL if name == "__dict__" else name), body)
    return NOT_HANDLED


def _is_of_module(tx: Any) -> bool:
    """Whether the traced method is one of `nn.Module`'s own, which look up parameters in `__dict__`."""
    return tx.f_code in (nn.Module.__setattr__.__code__, nn.Module.__getattr__.__code__)
