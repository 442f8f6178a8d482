"""Writes the operator that runs a loop's body part by part (`sequences/one_by_one.py`) to Dynamo's graph.

Private names, checked on torch 2.13: of the shape environment, `deferred_runtime_asserts` and `replacements`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from fxpasses.dynamo.runtime.host_functions import Number, Size
from fxpasses.dynamo.size_defaults import OF_PROGRAM
from fxpasses.dynamo.trace import Trace
from fxpasses.graph.calls import OperatorCall, is_in_place, operator_of
from fxpasses.graph.effects import leaves, observe, storage_key
from fxpasses.graph.refusals import Refused
from fxpasses.graph.symbols import constant, expression, free_symbols, is_younger, unbacked_symbols
from fxpasses.graph.traits import CASTS, COPIES, RESHAPES, SQUEEZES, VIEWS
from fxpasses.metadata.runtime.prologue import autocast_state
from fxpasses.sequences import operators  # noqa: F401 (registers the operators)
from fxpasses.sequences.batched import Unbatched
from fxpasses.sequences.capture.writer import Value, Writer
from fxpasses.sequences.one_by_one import Body, Input, Result, register
from fxpasses.sequences.part_functions import call_of

# Return a part's own memory where it has one row, say, and a copy of others.
_MAY_BE_VIEWS = RESHAPES | CASTS | COPIES - {"clone"}
_RAGGED = torch.ops.fxpasses.ragged.default
_PART_FUNCTION = torch.ops.fxpasses.part_function.default
_STAND_INS: dict[Any, str] = {
    torch.ops.fxpasses.part_size.default: "size",
    torch.ops.fxpasses.part.default: "part",
    torch.ops.fxpasses.element.default: "element",
    _RAGGED: "ragged",
}


class PartBody:
    """The nodes that a loop's body has written, in order, and what they stand for.

    own: those that differ from part to part; others: the others. symbols: those of the sizes and numbers of a part.
    written: nodes from outside to whose memory the body writes.
    """

    def __init__(self, nodes: Iterable[Node], stand_ins: Iterable[Node]) -> None:
        of_part = set(stand_ins)
        self.written: dict[Node, None] = {}
        self.own: dict[Node, None] = {}
        self.others: list[Node] = []
        for node in nodes:
            if node in of_part or any(operand in self.own for operand in node.all_input_nodes):
                self.own[node] = None
            else:
                self.others.append(node)

    @functools.cached_property
    def symbols(self) -> set[Any]:
        outer = {o for node in self.own for o in node.all_input_nodes if o not in self.own}
        return set().union(*map(_symbols, self.own)).difference(*map(_symbols, outer))

    def differs(self, size: Any) -> bool:
        """Whether a size differs from part to part."""
        return not self.symbols.isdisjoint(free_symbols(size))

    def cut(self, size: Any) -> Node | None:
        """The node that cuts something into parts of a size, an expression."""
        for node in self.own:
            if node.target is torch.ops.fxpasses.part.default:
                length: Any = node.args[2]
                if expression(length.meta["example_value"]) == size:
                    return node
        return None

    def nodes_of(
        self, wanted: Node, numbers: Mapping[Any, Node], carried: Collection[Node], is_metadata: Callable[[Node], bool]
    ) -> set[Node]:
        """The nodes that compute one, if it depends on nothing but the batch's numbers; none otherwise.

        numbers: by their expressions, those of a part, which stand for the sizes of the body's tensors. carried: the
        stand-ins of numbers to which each part adds.
        """
        found: set[Node] = set()
        rest = [wanted]
        while rest:
            node = same_number(rest.pop(), numbers)
            if node in carried:
                return set()
            if node in self.own and node not in found:
                found.add(node)
                rest += node.all_input_nodes
            elif node not in self.own and not is_metadata(node):
                return set()
        written = {storage_key(value) for node in self.own if is_in_place(operator_of(node)) for value in _read(node)}
        made = {storage_key(value) for node in found for value in _tensors(node.meta.get("example_value"))}
        return found if written.isdisjoint(made) else set()

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
            for at in effects.writes:
                if given[at] not in made:
                    self._write(node, given[at])
            if operator_of(node) in _MAY_BE_VIEWS:
                continue  # of a part with one row, it may be the part's own memory
            if operator_of(node) in SQUEEZES and self._is_squeezed(node):
                raise Unbatched(f"`{node.name}` squeezes a size that differs from part to part")
            made |= {storage_key(value) for value in _tensors(node.meta.get("example_value"))} - {*given}

    def _write(self, node: Node, memory: int) -> None:
        """Note that the body writes to memory from outside, or raise `Unbatched` if anything may read that."""
        readers = [n for n in (*self.own, *self.others) if any(memory == storage_key(value) for value in _read(n))]
        outer = {o for n in readers for o in n.all_input_nodes if o not in self.own and _has(o, memory)}
        views = [n for n in readers if operator_of(n) in VIEWS]
        only_writes = all(
            n in views or (is_in_place(operator_of(n)) and not any(_has(o, memory) for o in n.all_input_nodes[1:]))
            for n in readers
        )
        is_plain = not any(value.requires_grad for n in readers for value in [*_read(n), *_made(n)])
        is_of_parts = all(n in self.own and n.target not in _STAND_INS for n in readers)
        if len(outer) != 1 or not only_writes or not is_plain or not is_of_parts:
            raise Unbatched(f"`{node.name}` writes to what other parts may read")
        self.written |= dict.fromkeys(outer)

    def _is_squeezed(self, node: Node) -> bool:
        """Whether an operator takes out a dimension of size 1, which some parts have and others have not."""
        operand: Any = node.args[0]
        sizes = operand.meta["example_value"].shape
        dims = OperatorCall.of(node).argument("dim", None)
        chosen = range(len(sizes)) if dims is None else dims if isinstance(dims, (tuple, list)) else [dims]
        is_own = any(not self.symbols.isdisjoint(free_symbols(sizes[at])) for at in chosen if sizes)
        return operator_of(node) != "unsqueeze" and is_own

    def may_return_views(self) -> bool:
        """Whether an operator of the body copies, or returns its operand's own memory, as that lies for a part."""
        return any(operator_of(node) in _MAY_BE_VIEWS for node in self.own)

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
    """Writes the operator of one loop.

    count: has an element for each part. numbers: by their expressions, those of a part that stand for others. carried:
    by the numbers of a part that are known, those of all parts, [n]. is_of_numbers: as of `Body`.
    """

    def __init__(
        self,
        body: PartBody,
        writer: Writer,
        count: Node,
        numbers: Mapping[Any, Node],
        carried: Mapping[Node, Node],
        is_of_numbers: bool = False,
    ) -> None:
        self.body, self.writer, self.same, self.carried = body, writer, numbers, carried
        self.is_of_numbers = is_of_numbers
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self.flat: dict[Node, Node] = {}  # what `ragged` nodes have before they have their sizes
        self.inputs: list[Input] = []
        self.tensors: dict[Node, int] = {}
        self.numbers: dict[Node, int] = {}
        self._tensor(count)  # the first one

    def write(self, wanted: list[Node], nodes: list[Node]) -> list[Value]:
        """Add the operator; returns the values of all parts.

        wanted: tensors of one part. nodes: those of the body that compute them, in order.
        """
        for node in nodes:
            if node.target in _STAND_INS or node in self.carried:
                self._add(node, self._of_part(node), self.flat if node.target is _RAGGED else self.copies)
        unread = self._unread(nodes, wanted)
        inner = [node for node in nodes if node not in self.copies and node not in unread]
        for operand in dict.fromkeys(self._same(o) for node in inner for o in _operands(node)):
            if operand not in self.body.own:
                self._add(operand, self._of_all(operand), self.copies)
        for node in inner:
            self.copies[node] = self._copy(node)
            self.copies[node].meta = {}  # no fake tensors, which would stay as long as the process
        self.graph.output(tuple(self.copies[self._same(node)] for node in wanted))
        results = [*map(self._result, wanted)]
        module = GraphModule(torch.nn.Module(), self.graph)
        key = module.code, tuple(node.target for node in self.graph.nodes if node.op == "call_function")
        written = [node for node in self.body.written if node in self.copies]
        places = tuple(self.tensors[node] for node in written)
        inputs = tuple(self.inputs)
        body = Body(module.forward, inputs, tuple(results), autocast_state(), places, self.is_of_numbers)
        name = register(body, key)
        operator = torch.ops.fxpasses.loop_over_parts.default
        found = self.writer.emit(operator, name, [*map(self._kept, self.tensors)], [*self.numbers])
        for node, copy in zip(written, found[len(wanted) :], strict=True):
            self.writer.emit("copy_", node, self.writer.emit(torch.Tensor.detach, copy))
        values = []
        for node, result, one in zip(found, results, wanted, strict=False):
            if result.is_differentiable and not one.meta["example_value"].requires_grad:
                node = self.writer.emit(torch.Tensor.detach, node)
            values.append(Value(self.writer.variables[node], () if result.dim is None else (result.dim,)))
        return values

    def _unread(self, nodes: list[Node], wanted: list[Node]) -> set[Node]:
        """Calls of functions of which nothing is read but numbers that are operands."""
        found: set[Node] = set()
        for node in reversed(nodes if self.carried else []):
            is_call = node.target is _PART_FUNCTION or operator_of(node) in ("getitem", "item")
            if is_call and node not in wanted and all(user in found or user in self.copies for user in node.users):
                found.add(node)
        return found

    def _same(self, node: Node) -> Node:
        return same_number(node, self.same)

    def _copy(self, node: Node) -> Node:
        if node.target is _PART_FUNCTION:
            name, *taken = cast(Any, torch.fx.map_arg(node.args, lambda operand: self.copies[self._same(operand)]))
            return self.graph.call_function(call_of(name), tuple(taken))
        if node.target is not _RAGGED:
            return self.graph.node_copy(node, lambda operand: self.copies[self._same(operand)])
        given: Any = node.args[2]
        sizes = [self.copies[self._same(size)] if isinstance(size, Node) else size for size in given]
        return self.graph.call_method("view", (self.flat[node], *sizes))

    def _kept(self, node: Node) -> Node:
        """What backward reads. A program may write the next batch's numbers over these before that, or has written."""
        dtype = node.meta["example_value"].dtype
        is_kept = (dtype.is_floating_point or dtype.is_complex) and node not in self.body.written
        return node if is_kept else self.writer.emit(torch.clone, node)

    def _add(self, node: Node, given: Input, copies: dict[Node, Node]) -> None:
        copies[node] = self.graph.placeholder(node.name)
        self.inputs.append(given)

    def _of_part(self, node: Node) -> Input:
        operands: Any = node.args
        operand, *others = operands
        if node in self.carried:
            return Input("size", self._tensor(self.carried[node]))
        at, kind = self._tensor(operand), _STAND_INS[node.target]
        if kind == "ragged":
            return Input("part", at, 0, self._tensor(others[0]))
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

    def _result(self, node: Node) -> Result:
        example = node.meta["example_value"]
        ragged = [at for at, size in enumerate(example.shape) if self.body.differs(size)]
        if len(ragged) > 1:
            raise Unbatched(f"`{node.name}` has several sizes that differ from part to part")
        sizes = [None if at in ragged else self._size(node, size) for at, size in enumerate(example.shape)]
        if not ragged:
            return Result(((0, 0), *sizes), example.dtype, example.device, None)
        (dim,) = ragged
        sizes[dim] = self._rows(expression(example.shape[dim]))
        return Result(tuple(sizes), example.dtype, example.device, dim)

    def _size(self, node: Node, size: Any) -> Size:
        known = constant(size)
        if known is not None:
            return int(known)
        for operand, at in self.tensors.items():
            for dim, found in enumerate(operand.meta["example_value"].shape):
                if expression(found) == expression(size):
                    return at, dim
        for number, place in self.numbers.items():
            if expression(number.meta["example_value"]) == expression(size):
                return Number(place)
        raise Unbatched(f"`{node.name}` has a size that no operand has")

    def _rows(self, size: Any) -> Size:
        """The size of all parts together, if something is cut into parts of a size."""
        cut: Any = self.body.cut(size)
        return None if cut is None else (self.tensors[cut.args[0]], cut.args[1])


def same_number(node: Node, numbers: Mapping[Any, Node]) -> Node:
    """The node that stands for another one: of the same number."""
    value = node.meta.get("example_value")
    return numbers.get(expression(value), node) if numbers and isinstance(value, torch.SymInt) else node


def _operands(node: Node) -> list[Node]:
    """What a node takes of the body, or of outside."""
    given: Any = node.args
    return node.all_input_nodes if node.target is not _RAGGED else [size for size in given[2] if isinstance(size, Node)]


def _has(node: Node, memory: int) -> bool:
    return any(storage_key(value) == memory for value in _made(node))


def _made(node: Node) -> list[Tensor]:
    return _tensors(node.meta.get("example_value"))


def _read(node: Node) -> list[Tensor]:
    return [value for operand in node.all_input_nodes for value in _tensors(operand.meta.get("example_value"))]


def _is_of_numbers(node: Node) -> bool:
    """Whether a node computes a number, or asserts something of one."""
    name, value = operator_of(node), node.meta.get("example_value")
    if name in OF_PROGRAM or name == "item":
        return True
    if node.target is _PART_FUNCTION:  # what it makes may be its arguments' memory
        return True
    return isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)) and not is_in_place(name)


def _symbols(node: Node) -> set[Any]:
    found: set[Any] = set()
    return found.union(*map(unbacked_symbols, tree_leaves(node.meta.get("example_value"))))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
