"""Writes the operator that runs a loop's body part by part (`sequences/one_by_one.py`) to Dynamo's graph.

Private names, checked on torch 2.13: of the shape environment, `deferred_runtime_asserts` and `replacements`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from fxpasses.dynamo.runtime.host_functions import Size
from fxpasses.dynamo.size_defaults import OF_PROGRAM
from fxpasses.dynamo.trace import Trace
from fxpasses.graph.calls import OperatorCall, is_in_place, operator_of
from fxpasses.graph.effects import leaves, observe, storage_key
from fxpasses.graph.refusals import Refused
from fxpasses.graph.symbols import constant, expression, free_symbols, is_younger, unbacked_symbols
from fxpasses.graph.traits import CASTS, COPIES, RESHAPES, SQUEEZES
from fxpasses.metadata.runtime.prologue import autocast_state
from fxpasses.sequences import operators  # noqa: F401 (registers the operators)
from fxpasses.sequences.batched import Unbatched
from fxpasses.sequences.capture.writer import Value, Writer
from fxpasses.sequences.one_by_one import Body, Input, Result, register

# Return a part's own memory where it has one row, say, and a copy of others.
_MAY_BE_VIEWS = RESHAPES | CASTS | COPIES - {"clone"}
_STAND_INS: dict[Any, str] = {
    torch.ops.fxpasses.part_size.default: "size",
    torch.ops.fxpasses.part.default: "part",
    torch.ops.fxpasses.element.default: "element",
}


class PartBody:
    """The nodes that a loop's body has written, in order, and what they stand for.

    own: those that differ from part to part; others: the others. symbols: those of the sizes and numbers of a part.
    """

    def __init__(self, nodes: Iterable[Node], stand_ins: Iterable[Node]) -> None:
        self.own: dict[Node, None] = dict.fromkeys(stand_ins)
        self.others: list[Node] = []
        for node in nodes:
            if any(operand in self.own for operand in node.all_input_nodes):
                self.own[node] = None
            elif node not in self.own:
                self.others.append(node)

    @functools.cached_property
    def symbols(self) -> set[Any]:
        outer = {o for node in self.own for o in node.all_input_nodes if o not in self.own}
        return set().union(*map(_symbols, self.own)).difference(*map(_symbols, outer))

    def forget_assertions(self, shape_env: Any, numbers: Iterable[Any]) -> None:
        """Leave the assertions on what differs from part to part to the operators that run for each.

        numbers: the symbols of a part's sizes and numbers. Raises `Unbatched` if one has become a constant, or if
        anything else depends on it.
        """
        if any(self.symbols.isdisjoint(shape_env.replace(number).free_symbols) for number in numbers):
            raise Unbatched("its parts must have a certain size")
        ages = {int(symbol.name[1:]): symbol for symbol in self.symbols if is_younger(symbol, symbol)}
        oldest = [ages[min(ages)]] if ages else []
        for symbol, found in [*shape_env.deferred_runtime_asserts.items()]:
            kept = [each for each in found if not any(is_younger(s, o) for s in each.expr.free_symbols for o in oldest)]
            if not kept:
                del shape_env.deferred_runtime_asserts[symbol]
            else:
                shape_env.deferred_runtime_asserts[symbol] = kept
        for symbol, value in shape_env.replacements.items():
            if (symbol in self.symbols) != bool(self.symbols & value.free_symbols):
                raise Unbatched("its parts must have a certain size")

    def check(self, trace: Trace, fake_mode: Any) -> None:
        """Raise `Unbatched` unless the body can run for each part by itself, once more in backward."""
        made: set[int] = set()  # memory that the body has made
        for node in self.own:
            if node.target in _STAND_INS or _is_of_numbers(node):
                continue
            if any(operand.meta.get("example_value") is None for operand in node.all_input_nodes):
                raise Unbatched(f"`{node.name}` has a body")
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["example_value"])
            try:
                with trace.running(node):
                    effects = observe(node, args, kwargs, fake_mode)
            except Refused as refused:
                raise Unbatched(refused.text) from None
            given = [storage_key(value) for value in leaves((args, kwargs)) if isinstance(value, Tensor)]
            if any(given[at] not in made for at in effects.writes):
                raise Unbatched(f"`{node.name}` writes to what other parts may read")
            if operator_of(node) in _MAY_BE_VIEWS:
                continue  # of a part with one row, it may be the part's own memory
            if operator_of(node) in SQUEEZES and self._is_squeezed(node):
                raise Unbatched(f"`{node.name}` squeezes a size that differs from part to part")
            made |= {storage_key(value) for value in _tensors(node.meta.get("example_value"))} - {*given}

    def _is_squeezed(self, node: Node) -> bool:
        """Whether an operator takes out a dimension of size 1, which some parts have and others have not."""
        operand: Any = node.args[0]
        sizes = operand.meta["example_value"].shape
        dims = OperatorCall.of(node).argument("dim", None)
        chosen = range(len(sizes)) if dims is None else dims if isinstance(dims, (tuple, list)) else [dims]
        is_own = any(not self.symbols.isdisjoint(free_symbols(sizes[at])) for at in chosen)
        return operator_of(node) != "unsqueeze" and is_own

    def memory(self) -> set[int]:
        """That of all tensors which the body reads, or which its parts are cut from."""
        outer = [o for node in self.own for o in node.all_input_nodes if o not in self.own]
        return {storage_key(value) for node in outer for value in _tensors(node.meta.get("example_value"))}

    def compared(self, shape_env: Any) -> set[Any]:
        """The symbols that an operator has taken to be equal to something else, as it may if they are not 1."""
        found = {side for key, value in shape_env.replacements.items() for side in (key, value)}
        for asserted in shape_env.deferred_runtime_asserts.values():
            found |= {side for each in asserted if isinstance(each.expr, sympy.Eq) for side in each.expr.args}
        return found & self.symbols


class Operand:
    """Writes the operator of one loop."""

    def __init__(self, body: PartBody, writer: Writer) -> None:
        self.body, self.writer = body, writer
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self.inputs: list[Input] = []
        self.tensors: dict[Node, int] = {}
        self.numbers: dict[Node, int] = {}

    def write(self, wanted: list[Node]) -> list[tuple[Value, Node | None]]:
        """Add the operator; returns the values of all parts, and the lengths by which they are cut, if they are known.

        wanted: nodes of the body, tensors of one part.
        """
        stand_ins = [node for node in self.body.own if node.target in _STAND_INS]
        for node in stand_ins:
            self._add(node, self._of_part(node))
        inner = [node for node in self.body.own if node not in self.copies]
        for outer in dict.fromkeys(o for node in inner for o in node.all_input_nodes if o not in self.body.own):
            self._add(outer, self._of_all(outer))
        for node in inner:
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
            self.copies[node].meta = {}  # no fake tensors, which would stay as long as the process
        self.graph.output(tuple(self.copies[node] for node in wanted))
        results, cuts = zip(*map(self._result, wanted), strict=True)
        module = GraphModule(torch.nn.Module(), self.graph)
        key = module.code, tuple(node.target for node in self.graph.nodes if node.op == "call_function")
        name = register(Body(module.forward, tuple(self.inputs), results, autocast_state()), key)
        operator = torch.ops.fxpasses.loop_over_parts.default
        found = self.writer.emit(operator, name, [*map(self._kept, self.tensors)], [*self.numbers])
        values = []
        for node, result, one in zip(found, results, wanted, strict=True):
            if result.is_differentiable and not one.meta["example_value"].requires_grad:
                node = self.writer.emit(torch.Tensor.detach, node)
            values.append(Value(self.writer.variables[node], () if result.dim is None else (result.dim,)))
        return [*zip(values, cuts, strict=True)]

    def _kept(self, node: Node) -> Node:
        """What backward reads. A program may write the next batch's numbers over these before that."""
        dtype = node.meta["example_value"].dtype
        return node if dtype.is_floating_point or dtype.is_complex else self.writer.emit(torch.clone, node)

    def _add(self, node: Node, given: Input) -> None:
        self.copies[node] = self.graph.placeholder(node.name)
        self.inputs.append(given)

    def _of_part(self, node: Node) -> Input:
        operands: Any = node.args
        operand, *others = operands
        at, kind = self._tensor(operand), _STAND_INS[node.target]
        if kind != "part":
            return Input(kind, at)
        dim, size = others
        return Input(kind, at, dim, self._tensor(size.args[0]))

    def _of_all(self, node: Node) -> Input:
        value = node.meta.get("example_value")
        if isinstance(value, Tensor):
            return Input("whole", self._tensor(node))
        if isinstance(value, torch.SymInt):
            return Input("number", self.numbers.setdefault(node, len(self.numbers)))
        raise Unbatched(f"`{node.name}` is neither a tensor nor an integer")

    def _tensor(self, node: Any) -> int:
        if node.meta["example_value"].device.type != "cpu":
            raise Unbatched("a loop that runs part by part was not measured on devices")
        return self.tensors.setdefault(node, len(self.tensors))

    def _result(self, node: Node) -> tuple[Result, Node | None]:
        example = node.meta["example_value"]
        ragged = [at for at, size in enumerate(example.shape) if not self.body.symbols.isdisjoint(free_symbols(size))]
        if len(ragged) > 1:
            raise Unbatched(f"`{node.name}` has several sizes that differ from part to part")
        sizes = [None if at in ragged else self._size(node, size) for at, size in enumerate(example.shape)]
        if not ragged:
            return Result(((0, 0), *sizes), example.dtype, example.device, None), None
        (dim,) = ragged
        sizes[dim], cut = self._rows(expression(example.shape[dim]))
        return Result(tuple(sizes), example.dtype, example.device, dim), cut

    def _size(self, node: Node, size: Any) -> Size:
        known = constant(size)
        if known is not None:
            return int(known)
        for operand, at in self.tensors.items():
            for dim, found in enumerate(operand.meta["example_value"].shape):
                if expression(found) == expression(size):
                    return at, dim
        raise Unbatched(f"`{node.name}` has a size that no operand has")

    def _rows(self, size: Any) -> tuple[Size, Node | None]:
        """The size of all parts together, if something is cut into parts of a size, and the lengths by which it is."""
        for node in self.body.own:
            if node.target is torch.ops.fxpasses.part.default:
                operands: Any = node.args
                operand, dim, length = operands
                if expression(length.meta["example_value"]) == size:
                    return (self.tensors[operand], dim), length.args[0]
        return None, None


def _is_of_numbers(node: Node) -> bool:
    """Whether a node computes a number, or asserts something of one."""
    name, value = operator_of(node), node.meta.get("example_value")
    if name in OF_PROGRAM or name == "item":
        return True
    return isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)) and not is_in_place(name)


def _symbols(node: Node) -> set[Any]:
    found: set[Any] = set()
    return found.union(*map(unbacked_symbols, tree_leaves(node.meta.get("example_value"))))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
