"""Segments: consecutive calls of a graph, and the form by which equal segments are recognised.

Two segments have one form if they apply the same operators with the same arguments to operands of the same kind:

    h_1 = linear(h_0, w_0)      h_2 = linear(h_1, w_1)      form: linear(operand 0, operand 1), call 0 * operand 2,
    y_1 = h_1 * cos             y_2 = h_2 * cos             and the shape, strides, dtype, ... of each value

Unlike anti-unification, which follows operands and leaves holes for constants, this compares positions: it takes time
linear in the number of nodes, and only the operands may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxpasses.graph.aliases import storages_of
from fxpasses.graph.checkpoints import policy_of
from fxpasses.graph.modes import enters_autocast
from fxpasses.graph.symbols import expression, free_symbols, is_symbolic, symbol

# Entries of a node's meta that compilers act on.
_ANNOTATIONS = ("custom", "recompute", "compile_with_inductor")


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive calls of a graph.

    operands: the outer nodes that it uses, in order of first use, and the inputs for its symbols. live_outs: its nodes
    that are used outside, in program order. symbols: the names of symbols in its values that it does not bind. form:
    equal for segments that are one program.
    """

    nodes: tuple[Node, ...]
    operands: tuple[Node, ...]
    live_outs: tuple[Node, ...]
    symbols: frozenset[str]
    form: tuple[Any, ...]

    @property
    def first(self) -> Node:
        return self.nodes[0]


def segment(gm: GraphModule, nodes: Sequence[Node]) -> Segment:
    """The segment of consecutive calls `nodes` of `gm`.

    References to the bodies of higher-order operators are neither nodes nor operands: they belong to their calls.
    """
    form = _Form(gm)
    form.graph(nodes)
    inside = set(nodes)
    live_outs = tuple(
        node for node in nodes if not enters_autocast(node) and any(user not in inside for user in node.users)
    )
    operands = dict.fromkeys((*form.operands, *_numbers(gm, form.symbols)))
    # Backward takes a gradient for each, which is zeros if nothing uses the value; and 0 * inf is NaN.
    differentiable = tuple(form.number_of(node) for node in live_outs if requires_grad(node))
    description = (tuple(form.parts), form.alias_pattern(), differentiable)
    return Segment(tuple(nodes), tuple(operands), live_outs, frozenset(map(str, form.symbols)), description)


def _numbers(gm: GraphModule, symbols: set[sympy.Symbol]) -> list[Node]:
    """The inputs of a graph that are the given symbols; a compiler learns the symbols from them."""
    if not symbols:
        return []
    inputs = ((symbol(node.meta.get("example_value")), node) for node in gm.graph.find_nodes(op="placeholder"))
    return [node for number, node in inputs if number in symbols]


def local_signature(gm: GraphModule, node: Node, policies: bool = True) -> Any:
    """The part of a segment's form that one node contributes, apart from the identity of its operands.

    policies: whether it includes what checkpoints select to save.
    """
    form = _Form(gm, policies)
    form.graph([node])
    return tuple(form.parts)


def requires_grad(node: Node) -> bool:
    """Whether a node's tensor, or one of its tensors, has a gradient."""
    values = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def is_reference(gm: GraphModule, node: Node) -> bool:
    """Whether a node names the body of a higher-order operator."""
    return node.op == "get_attr" and isinstance(getattr(gm, str(node.target), None), GraphModule)


def with_bodies(gm: GraphModule, nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes, each followed by the nodes of the bodies that it refers to."""
    for node in nodes:
        yield node
        for operand in node.all_input_nodes:
            if is_reference(gm, operand):
                body: GraphModule = getattr(gm, str(operand.target))
                yield from with_bodies(body, body.graph.nodes)


class _Form:
    """Collects the parts of a form in program order."""

    def __init__(self, gm: GraphModule, policies: bool = True) -> None:
        self.gm, self.policies = gm, policies
        self.parts: list[Any] = []
        self.operands: dict[Node, int] = {}
        self.symbols: set[sympy.Symbol] = set()
        self._numbers: dict[Node, int] = {}
        self._bound: dict[sympy.Symbol, sympy.Symbol] = {}
        self._regions: dict[int, int] = {}  # of checkpoints, numbered as they occur

    def graph(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            for bound in node.meta.get("unbacked_bindings") or ():
                self._bound[bound] = sympy.Symbol(f"bound{len(self._bound)}", integer=True)
            self._numbers[node] = len(self._numbers)
            arguments = (self._constant(node.args), self._constant(node.kwargs))
            annotations = tuple(repr(node.meta.get(key)) for key in _ANNOTATIONS)
            self.parts.append((node.op, _target(node), arguments, self._value(node), annotations, self._region(node)))

    def _region(self, node: Node) -> int | None:
        """A number for a node's checkpoint, in order of occurrence: the ids in `meta` differ between equal layers."""
        found = node.meta.get("ac_graph_id")
        return None if found is None else self._regions.setdefault(found, len(self._regions))

    def number_of(self, node: Node) -> int:
        """The position of a node of the segment."""
        return self._numbers[node]

    def alias_pattern(self) -> tuple[Any, ...]:
        """Which operands share memory."""
        seen: dict[int, int] = {}
        return tuple(
            tuple(seen.setdefault(storage, len(seen)) for storage in storages_of(self._example(node)))
            for node in self.operands
        )

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self._operand(value)
        return _constant(value)

    def _constant(self, tree: Any) -> Any:
        return _frozen(map_aggregate(tree, self._argument))

    def _operand(self, node: Node) -> Any:
        if node in self._numbers:
            return _Local(self._numbers[node])
        if enters_autocast(node):
            return "autocast"  # part of the mode around the segment, which is compared separately
        if is_reference(self.gm, node):
            return self._body(getattr(self.gm, str(node.target)))
        new = node not in self.operands
        number = self.operands.setdefault(node, len(self.operands))
        return (_Operand(number), self._value(node)) if new else _Operand(number)

    def _body(self, body: GraphModule) -> Any:
        """The form of a body, whose placeholders stand for operands of its call."""
        inner = _Form(body, self.policies)
        inner._bound, inner._regions = self._bound, self._regions
        placeholders = body.graph.find_nodes(op="placeholder")
        inner._numbers = {node: -1 - position for position, node in enumerate(placeholders)}
        references = (node for node in body.graph.nodes if not is_reference(body, node))
        inner.graph([node for node in references if node.op not in ("placeholder", "get_attr")])
        # Tensors that a body takes as attributes belong to this one body.
        attributes = tuple(id(attribute(body, node)) for node in inner.operands)
        self.symbols |= inner.symbols
        return "body", tuple(inner.parts), attributes, policy_of(body) if self.policies else None

    def _value(self, node: Node) -> Any:
        return tuple(map(self._leaf, pytree.tree_leaves(self._example(node))))

    def _example(self, node: Node) -> Any:
        if node.op == "get_attr" and "example_value" not in node.meta:
            return attribute(self.gm, node)
        return node.meta.get("example_value")

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided else ()
            sizes = tuple(self._number(size) for size in (*value.shape, *strides, value.storage_offset()))
            flags = value.requires_grad, value.is_conj(), value.is_neg(), isinstance(value, torch.nn.Parameter)
            return value.dtype, value.device, value.layout, len(value.shape), sizes, flags, self._subclass(value)
        return self._number(value) if is_symbolic(value) else _constant(value)

    def _subclass(self, value: torch.Tensor) -> Any:
        """The class of a tensor subclass, and the form of the tensors that it wraps."""
        if not is_traceable_wrapper_subclass(value):
            return None
        names, context = value.__tensor_flatten__()
        inner = tuple(self._leaf(getattr(value, name)) for name in names)
        return type(value), tuple(names), _context(context), inner

    def _number(self, value: Any) -> Any:
        if not is_symbolic(value):
            return value
        if value.node.is_nested_int():  # a ragged size: equal only to itself
            return repr(value)
        found = expression(value)
        symbols = free_symbols(value)
        self.symbols |= symbols - self._bound.keys()
        return str(found.xreplace(self._bound) if isinstance(found, sympy.Basic) else found)


@dataclass(frozen=True)
class _Local:
    number: int


@dataclass(frozen=True)
class _Operand:
    number: int


def _target(node: Node) -> Any:
    return node.target if isinstance(node.target, str) else (id(node.target), str(node.target))


def attribute(gm: GraphModule, node: Node) -> Any:
    """The value of a `get_attr` node."""
    found: Any = gm
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def _constant(value: Any) -> Any:
    """A hashable stand-in that distinguishes 1, 1.0 and True, and -0.0 from 0.0."""
    if isinstance(value, slice):
        return slice, _constant(value.start), _constant(value.stop), _constant(value.step)
    if isinstance(value, (_Local, _Operand, tuple)):
        return value
    if value is None or isinstance(value, (int, float, complex, str, bytes, torch.dtype, torch.device)):
        return type(value), repr(value)
    return type(value), repr(value) if type(value).__repr__ is not object.__repr__ else id(value)


def _context(value: Any) -> Any:
    """A hashable stand-in for the objects, of any class, that a tensor subclass keeps besides its tensors."""
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, dict):
        return dict, tuple((_constant(key), _context(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_context, value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_context(getattr(value, field.name)) for field in fields(value))
    return _constant(value)


def _frozen(tree: Any) -> Any:
    if isinstance(tree, dict):
        return tuple((key, _frozen(value)) for key, value in sorted(tree.items()))
    if isinstance(tree, (list, tuple)):
        return (type(tree).__name__, *map(_frozen, tree))
    if isinstance(tree, slice):
        return slice, _frozen(tree.start), _frozen(tree.stop), _frozen(tree.step)
    return tree
