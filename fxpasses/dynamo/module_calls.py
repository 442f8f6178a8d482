"""A call of a module while Dynamo traces: whether another call would be traced alike, as far as it is not the module.

    h = layer(h, mask=mask)         h: a tensor of this form; mask: that tensor, or one of its form; no gradients; here

Tensors are compared by their form, constants by value, containers by their items, and everything else by the source
under which the program had it before the trace; what the trace has changed since is for the caller to know.

Private names, checked on torch 2.11, 2.13 and 2.15: Dynamo's variables and their attributes; of translators, `f_code`,
`instruction_pointer`, `block_stack` with `with_context`, `parent` and `symbolic_torch_function_state`; of side effects,
`has_pending_mutation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    ListVariable,
    TupleVariable,
)
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.fx import Node, traceback

from fxpasses.dynamo.equal_guards import is_same_constant
from fxpasses.dynamo.node_copies import answered_by, form_of
from fxpasses.graph.symbols import expression
from fxpasses.metadata.runtime.prologue import autocast_state


@dataclass(frozen=True)
class Argument:
    """An argument of a layer as a trace sees it when the call begins.

    source: Dynamo's, if the program had it before the trace. kind: its kind of variable; None if nothing has read it.
    content: what a trace may ask of it; of a container, its items. variable: Dynamo's. node: its node, then.
    """

    source: Any
    kind: Any
    content: Any
    variable: Any
    node: Node | None = None

    def tensors(self) -> Iterator[Argument]:
        """Those, and numbers, that are in the graph."""
        if self.kind in _IN_GRAPH:
            yield self
        elif self.kind in _CONTAINERS:
            for item in self.content:
                yield from item.tensors()

    def matches(self, other: Argument, replaced: dict[Node, Node]) -> bool:
        """Whether a trace would see no difference; `replaced` gets the other's nodes for those of this one."""
        node, others = self.node, other.node
        if node is not None and others is not None:
            if replaced.setdefault(node, others) is not others:
                return False
        if self.source is not None and self.source == other.source:
            return True
        if self.kind is None or self.kind is not other.kind:
            return False
        if self.kind not in _BY_VALUE and (self.source, other.source) != (None, None):
            return False  # a trace may ask about an attribute of it, and guards that on its source
        if self.kind in _CONTAINERS:
            pairs = zip(self.content, other.content, strict=False)
            return len(self.content) == len(other.content) and all(a.matches(b, replaced) for a, b in pairs)
        if self.kind is ConstantVariable:
            return is_same_constant(self.content, other.content)
        return self.kind in _IN_GRAPH and bool(self.content == other.content)


_IN_GRAPH = (TensorVariable, SymNodeVariable)
_BY_VALUE = (ConstantVariable, SymNodeVariable)
_CONTAINERS = (TupleVariable, ListVariable, ConstDictVariable)


def _argument(effects: Any, value: Any) -> Argument:
    """effects: Dynamo's side effects. Raises `NotImplementedError` for what has no source and is not known."""
    if isinstance(value, LazyVariableTracker):
        if not value.is_realized():
            return Argument(value.source, None, None, value)
        value = value.unwrap()
    kind: Any = type(value)
    content: Any = None
    node = value.as_proxy().node if kind in _IN_GRAPH else None
    if kind is TensorVariable:
        example = value.as_proxy().node.meta["example_value"]
        content = form_of(example), answered_by(example), value.class_type
        if effects.has_pending_mutation(value):
            raise NotImplementedError  # the program has given it an attribute
    elif kind is SymNodeVariable:
        content = expression(value.sym_num)
    elif kind is ConstantVariable:
        content = value.value
    elif kind in (TupleVariable, ListVariable):
        content = [_argument(effects, item) for item in value.items]
    elif kind is ConstDictVariable:
        content = [_argument(effects, each) for key, item in value.items.items() for each in (key.vt, item)]
    elif value.source is None:
        raise NotImplementedError
    return Argument(value.source, kind, content, value, node)


@dataclass(frozen=True)
class Call:
    """A call of a module, while it is traced.

    forms: of its tensors, when it begins. state: what calls it, the place in the program, and the modes of the process.
    stack: the modules around it, as in nodes' `nn_module_stack`.
    """

    module: Any
    tx: Any
    arguments: Sequence[Argument]
    names: Sequence[str]  # of the last ones
    forms: dict[Node, Any]
    state: Any
    stack: Mapping[str, Any]

    @staticmethod
    def of(module: Any, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any], through: Any) -> Call | None:
        """None if an argument's kind is not known."""
        try:
            arguments = [_argument(tx.output.side_effects, value) for value in (*args, *kwargs.values())]
        except (AttributeError, NotImplementedError):
            return None
        nodes = {found.node for argument in arguments for found in argument.tensors()}
        forms = {node: form_of(node.meta["example_value"]) for node in nodes if node is not None}
        return Call(module, tx, arguments, list(kwargs), forms, (through, _state(tx)), dict(tx.nn_module_stack))

    @property
    def kind(self) -> Any:
        return type(self.module.value)

    def is_unchanged(self) -> bool:
        """Whether its tensors still have the form that Dynamo's variables know."""
        return all(form_of(node.meta["example_value"]) == form for node, form in self.forms.items())

    def variables(self) -> dict[Node, Any]:
        found = {tensor.node: tensor.variable for argument in self.arguments for tensor in argument.tensors()}
        return {node: variable for node, variable in found.items() if node is not None}

    def replaced_by(self, other: Call) -> dict[Node, Node] | None:
        """The other's nodes for those of this one; None if a trace may tell the calls apart."""
        replaced: dict[Node, Node] = {}
        given, others = self.arguments, other.arguments
        is_alike = self.names == other.names and len(given) == len(others) and self.state == other.state
        if not is_alike or not all(a.matches(b, replaced) for a, b in zip(given, others, strict=True)):
            return None
        return replaced if len(set(replaced.values())) == len(replaced) else None  # `a is b`


@dataclass(frozen=True, eq=False)
class _Block:
    """A `with` block or a mode, equal to itself alone."""

    context: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Block) and other.context is self.context

    __hash__ = None  # type: ignore[assignment]


def _state(tx: Any) -> Any:
    """The place in the program and its callers, the `with` blocks around it, and the modes of the process."""
    places: list[Any] = []
    caller = tx
    while caller is not None:
        # Dynamo does not say which manager a block of an inlined function has.
        blocks = [_Block(entry.with_context or entry) for entry in caller.block_stack]
        places.append((caller.f_code, caller.instruction_pointer, blocks))
        caller = getattr(caller, "parent", None)
    backends = torch.backends.cuda
    kernels = backends.flash_sdp_enabled(), backends.math_sdp_enabled(), backends.mem_efficient_sdp_enabled()
    settings = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), kernels
    gradients = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()
    functions = tx.symbolic_torch_function_state
    modes = [_Block(mode) for mode in functions.mode_stack], functions.torch_function_subclass_enabled
    notes = repr(traceback.current_meta.get("custom"))
    return places, modes, notes, gradients, autocast_state(), torch.is_autocast_cache_enabled(), settings


UNKNOWN: Any = object()


def nodes_of(result: Any) -> Any:
    """Of a call's result: the node of a tensor, or a tuple of nodes and None; `UNKNOWN` for any other."""
    if type(result) is TupleVariable:
        items = tuple(map(nodes_of, result.items))
        return UNKNOWN if UNKNOWN in items else items
    if type(result) is TensorVariable:
        return result.as_proxy().node
    return None if type(result) is ConstantVariable and result.value is None else UNKNOWN


def leaves(results: Any) -> Iterator[Node]:
    if isinstance(results, tuple):
        for item in results:
            yield from leaves(item)
    elif results is not None:
        yield results


def rebuilt(results: Any, variables: Mapping[Node, Any]) -> Any:
    """A layer's result, of the variables of nodes."""
    if isinstance(results, tuple):
        return TupleVariable([rebuilt(item, variables) for item in results])
    return ConstantVariable.create(None) if results is None else variables[results]
