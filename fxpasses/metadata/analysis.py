"""One walk over a graph and its checkpoint bodies that numbers metadata and records its uses by other nodes.

It applies the rules of `metadata/closure.py` node by node, so that it can follow a graph that Dynamo is still writing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from fxpasses.graph import effects
from fxpasses.graph.aliases import written_operands
from fxpasses.graph.calls import operator_of
from fxpasses.graph.modes import regions_after
from fxpasses.graph.provenance import source, where
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import CHECKPOINT, Region
from fxpasses.graph.symbols import expression, is_symbolic, symbol
from fxpasses.graph.values import Allocation, Many, Scalar, Tensor, Value, ValueTable, number_of
from fxpasses.metadata.given_masks import is_given_mask
from fxpasses.metadata.size_expressions import arithmetic, is_arithmetic, sizes_of_slices
from fxpasses.report import Reason, Refusal

# Operators that give the shape environment the range of a number; separate nodes assert the range at run time.
RANGES = frozenset(
    {
        torch.ops.aten.sym_constrain_range.default,
        torch.ops.aten.sym_constrain_range_for_size.default,
        torch._check_is_size,
    }
)
_ASSERTIONS = RANGES | {torch.ops.aten._assert_scalar.default, torch._check}
# Operators that use only the size, dtype and device of one argument, with the position of that argument.
_LOOKS = {
    "new_empty": 0, "new_full": 0, "new_ones": 0, "new_tensor": 0, "new_zeros": 0, "empty_like": 0, "full_like": 0,
    "ones_like": 0, "zeros_like": 0, "expand_as": 1, "reshape_as": 1, "type_as": 1, "view_as": 1,
}  # fmt: skip
# An integer buffer of more bytes is data, such as a quantised weight, and not metadata.
_LARGEST_BUFFER = 1 << 20


@dataclass(frozen=True, eq=False)
class Use:
    """`user`, a node in `region` outside the closure, reads the closure value of `operand`."""

    region: Region
    user: Node
    operand: Node
    versions: tuple[tuple[Allocation, int], ...]


@dataclass(eq=False)
class Closure:
    """The result of the analysis.

    values: the values of the closure's nodes, in all regions. uses: in program order. assertions: nodes that assert
    conditions on closure scalars alone. copied: output operands that must be returned as copies. obstacles: why other
    nodes are outside the closure. refusals: the same for near misses, for the report.
    """

    table: ValueTable
    values: dict[Node, Value] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    assertions: list[tuple[Region, Node]] = field(default_factory=list)
    copied: set[Node] = field(default_factory=set)
    obstacles: dict[Node, tuple[Reason, str]] = field(default_factory=dict)
    refusals: dict[Node, Refusal] = field(default_factory=dict)


class Walk:
    """The state of one walk; `visit` takes the nodes in program order.

    violations: allocations that turned out, by later nodes, not to be metadata.
    """

    def __init__(self, main: Region, fake_mode: Any, banned: dict[Node, Refusal], nothing: bool) -> None:
        self.main = main
        self.fake_mode = fake_mode
        self.banned = banned
        self.nothing = nothing  # whether to give up: every node is banned
        self.closure = Closure(ValueTable(fake_mode))
        self.values = self.closure.values
        self.obstacles = self.closure.obstacles
        self.violations: dict[Node, Refusal] = {}
        self.private: set[Node] = set()  # violating allocations without closure values, which are no near misses
        self.escaping: dict[Node, tuple[Allocation, ...]] = {}  # the closure's memory that nodes outside it return
        self.touches: dict[Hashable, effects.Touch | None] = {}
        self.symbols: dict[Any, Scalar] = {}  # also by expressions of several symbols
        self.levels = 0  # how many vmap and grad transforms are around the node

    def run(self) -> Closure:
        self._region(self.main, ())
        for use in self.closure.uses:
            for memory, version in use.versions:
                if memory.version != version:
                    text = f"`{use.user.name}` reads it before its last write"
                    self._ban(memory, Reason.READ_BEFORE_WRITE, text, use.user)
        return self.closure

    def _region(self, region: Region, autocast: tuple[Any, ...]) -> None:
        for node in region.gm.graph.nodes:
            autocast = self.visit(region, node, autocast)

    def visit(self, region: Region, node: Node, autocast: tuple[Any, ...]) -> tuple[Any, ...]:
        """Visit one node inside the autocast regions `autocast`; returns the regions after the node."""
        if node.op == "placeholder":
            self._placeholder(region, node)
        elif node.op == "output":
            self._output(region, node)
        elif node.op in ("call_function", "call_method"):
            return self._call(region, node, autocast)
        elif node.op == "call_module":
            self.obstacles[node] = Reason.UNKNOWN_OPERATOR, f"the module `{node.target}`"
            self._outside(region, node, autocast)
        return autocast

    def _placeholder(self, region: Region, node: Node) -> None:
        if region.parent is not None:
            operand = region.operands[node]
            if not isinstance(operand, Node):
                return
            if operand in self.values:
                self.values[node] = self.values[operand]
            else:
                self.escaping[node] = self.escaping.get(operand, ())
                self.obstacles[node] = self.obstacles.get(operand, (Reason.ACTIVATION, f"`{operand.name}`"))
            return
        example = node.meta.get("example_value")
        obstacle = self.obstacle_of_input(node, example)
        if obstacle is not None:
            self.obstacles[node] = obstacle
            return
        value = self.values[node] = self.closure.table.root(node, example)
        if isinstance(value, Scalar) and symbol(example) is not None:
            self.symbols[symbol(example)] = value

    def obstacle_of_input(self, node: Node, example: Any) -> tuple[Reason, str] | None:
        if node in self.banned:
            return self.banned[node].reason, self.banned[node].text
        if self.nothing:
            return Reason.UNKNOWN_OPERATOR, "too many conflicting writes"
        if isinstance(example, torch.SymInt):
            return None
        if not isinstance(example, torch.Tensor):
            return Reason.UNSUPPORTED_VALUE, f"`{node.name}`"
        if isinstance(example, torch.nn.Parameter):
            return Reason.PARAMETER, f"`{node.name}`"
        if example.requires_grad or example.dtype.is_complex:
            return Reason.ACTIVATION, f"`{node.name}`"
        if example.dtype.is_floating_point and not (example.device.type == "cpu" and is_given_mask(self.main, node)):
            return Reason.ACTIVATION, f"`{node.name}`"
        if type(example) is not torch._subclasses.FakeTensor or example.layout is not torch.strided:
            return Reason.UNSUPPORTED_VALUE, f"`{node.name}` is a {type(example).__name__}"
        if "_buffers" in source(node) and example.untyped_storage().nbytes() > _LARGEST_BUFFER:
            return Reason.PARAMETER, f"`{node.name}` is a large integer buffer"
        return None

    def _call(self, region: Region, node: Node, autocast: tuple[Any, ...]) -> tuple[Any, ...]:
        name = getattr(node.target, "__name__", "")
        if (after := regions_after(node, autocast)) is not autocast:
            return after
        if name.endswith(("increment_nesting", "decrement_nesting")):
            self.levels += 1 if name.endswith("increment_nesting") else -1
            return autocast
        if node.target is CHECKPOINT:
            self._body(region, node, autocast)
            return autocast
        operands = node.all_input_nodes
        outside = [n for n in operands if n not in self.values]
        if node.target in _ASSERTIONS and operands and not outside:
            self.closure.assertions.append((region, node))
            return autocast
        if node in self.banned:
            obstacle = self.banned[node].reason, self.banned[node].text
        elif outside:
            value = self._value_by_properties(node, outside, autocast)
            if value is not None:
                self.values[node] = value
                return autocast
            known = (self.obstacles[n] for n in outside if n in self.obstacles)
            obstacle = next(known, (Reason.ACTIVATION, f"`{outside[0].name}`"))
        elif self.nothing or self.levels:
            obstacle = Reason.HIGHER_ORDER, "a function transform"
        elif not operands and not isinstance(node.meta.get("example_value"), torch.Tensor):
            return autocast  # it changes the state of the process, or returns nothing
        else:
            try:
                value = self.values[node] = self.closure.table.apply(node, self.values.__getitem__, autocast)
                found = symbol(node.meta.get("example_value"))
                if isinstance(value, Scalar) and found is not None:
                    self.symbols.setdefault(found, value)
                return autocast
            except Refused as refused:
                obstacle = refused.reason, refused.text
                if refused.reason is not Reason.HIGHER_ORDER or operands:
                    self.closure.refusals[node] = Refusal(node.name, refused.reason, refused.text, where(node))
        self.obstacles[node] = obstacle
        for found, size in sizes_of_slices(node).items():
            if found not in self.symbols:
                self._define(found, size)
        self._outside(region, node, autocast)
        return autocast

    def _body(self, region: Region, call: Node, autocast: tuple[Any, ...]) -> None:
        self._region(region.bodies[call], autocast)
        self.escaping[call] = self._returned(region.bodies[call])
        self.obstacles[call] = Reason.ACTIVATION, f"`{call.name}`"

    def _value_by_properties(self, node: Node, outside: list[Node], autocast: tuple[Any, ...]) -> Value:
        """Number a node that reads no values of an activation x: a size, `x.new_full(size, 0)`, `mask.type_as(x)`."""
        known = self._size(node.meta.get("example_value"))
        if known is not None:
            return known
        position = _LOOKS.get(operator_of(node))
        if position is None or len(node.args) <= position or outside != [node.args[position]]:
            return None
        return self._numbered_by_looks(node, outside[0], autocast) if not (self.nothing or self.levels) else None

    def _numbered_by_looks(self, node: Node, looked_at: Node, autocast: tuple[Any, ...]) -> Value:
        """Number a node that reads no values of `looked_at`, an activation; None if that is impossible."""
        if effects.leaves((node.args, node.kwargs)).count(looked_at) > 1:
            return None  # `x.type_as(x)` also reads values
        example = looked_at.meta.get("example_value")
        if type(example) is not torch._subclasses.FakeTensor or not example.is_contiguous():
            return None
        sizes: list[int | Scalar] = []
        for size in example.shape:
            known = size if isinstance(size, int) else self._size(size)
            if known is None:
                return None
            sizes.append(known)
        look = self.closure.table.look(node, example, sizes)
        try:
            return self.closure.table.apply(
                node, lambda operand: look if operand is looked_at else self.values[operand], autocast
            )
        except Refused:
            return None

    def _size(self, size: Any) -> Scalar | None:
        """Number a size of activations that is computed from inputs and closure scalars; None if it is not known."""
        if not isinstance(size, torch.SymInt):
            return None
        found = expression(size)
        if found not in self.symbols and not found.is_number and not found.is_Symbol:
            self._define(found, found)
        return self.symbols.get(found)

    def _define(self, found: Any, computed: Any) -> None:
        """Number a size by the expression that computes it, if all symbols of that are known."""
        if self.nothing or self.levels or not computed.free_symbols <= self.symbols.keys():
            return
        if is_arithmetic(computed):
            inputs, result = arithmetic(computed)
            number = self._number(result, {node: self.symbols[name] for name, node in inputs.items()})
            if number is not None:
                self.symbols[found] = number

    def _number(self, result: Node, known: dict[Node, Value]) -> Scalar | None:
        """Number the result of a separate graph, given the values of its inputs; None if it is not a number."""
        try:
            for node in result.graph.nodes:
                if node.op != "placeholder":
                    known[node] = self.closure.table.apply(node, known.__getitem__, ())
        except Refused:
            return None
        value = known[result]
        return value if isinstance(value, Scalar) else None

    def _outside(self, region: Region, node: Node, autocast: tuple[Any, ...]) -> None:
        """Record what a node outside the closure reads, writes and returns."""
        touched: list[tuple[Node, Allocation]] = []
        for operand in node.all_input_nodes:
            memories = self._memories(operand)
            if operand in self.values:
                versions = tuple((memory, memory.version) for memory in memories)
                self.closure.uses.append(Use(region, node, operand, versions))
                if isinstance(self.values[operand], Many):
                    for memory in memories:
                        self._ban(memory, Reason.UNSUPPORTED_VALUE, "a tuple of tensors", node, subject=operand)
            touched += [(operand, memory) for memory in memories]
        if not touched:
            return
        self.escaping[node] = tuple(dict.fromkeys(memory for _, memory in touched))
        first = node.args[0] if node.args else None
        if isinstance(first, Node) and isinstance(first.meta.get("example_value"), (tuple, list)):
            return  # one result of a body, whose example shares no memory with the examples of the operands
        effect, has_body = self._touch(node, autocast), isinstance(node.target, torch._ops.HigherOrderOperator)
        if effect is None and has_body and not written_operands(node, region.gm):
            return
        tensors = self._tensor_arguments(node)
        returned: list[Allocation] = []
        for position, operand in enumerate(tensors):
            for memory in self._memories(operand):
                if effect is None or position in effect.writes:
                    reason = Reason.UNKNOWN_OPERATOR if effect is None else Reason.WRITTEN_BY_LAYER
                    self._ban(memory, reason, f"by `{node.name}`", node)
                if effect is not None and position in effect.returns:
                    returned.append(memory)
        self.escaping[node] = tuple(dict.fromkeys(returned))

    def _touch(self, node: Node, autocast: tuple[Any, ...]) -> effects.Touch | None:
        if isinstance(node.target, torch._ops.HigherOrderOperator) or node.op == "call_module":
            return None
        args, kwargs = map_aggregate((node.args, node.kwargs), self._example)
        key = (node.op, node.target, autocast, _signature((args, kwargs)))
        if key not in self.touches:
            self.touches[key] = effects.touch(node, args, kwargs, self.fake_mode, autocast)
        return self.touches[key]

    def _example(self, leaf: Any) -> Any:
        if not isinstance(leaf, Node):
            return leaf
        if "example_value" in leaf.meta:
            return leaf.meta["example_value"]
        value = self.values.get(leaf)
        return self.closure.table.entries[value.number].fake if isinstance(value, (Scalar, Tensor)) else None

    def _tensor_arguments(self, node: Node) -> list[Node]:
        """The node of each tensor that `effects.touch` counts, in the same order."""
        found = []
        for leaf in effects.leaves((node.args, node.kwargs)):
            examples = effects.leaves(self._example(leaf)) if isinstance(leaf, Node) else []
            found += [leaf for example in examples if isinstance(example, torch.Tensor)]
        return found

    def _returned(self, body: Region) -> tuple[Allocation, ...]:
        """The memory of inputs that a body returns views of. Other memory that a body returns leaves the closure."""
        operands = effects.leaves(body.gm.graph.output_node().args)
        found = (memory for operand in operands if isinstance(operand, Node) for memory in self._memories(operand))
        return tuple(dict.fromkeys(found))

    def _output(self, region: Region, node: Node) -> None:
        operands = [leaf for leaf in effects.leaves(node.args) if isinstance(leaf, Node)]
        shared = Counter(memory for operand in operands for memory in self._memories(operand))
        for operand in dict.fromkeys(operands):
            memories = self._memories(operand)
            for memory in memories:
                is_whole = operand in self.values and number_of(self.values[operand]) == memory.alloc
                if region.parent is not None or shared[memory] > 1 or not is_whole:
                    self._ban(memory, Reason.ESCAPES, "", node, subject=operand)
            if operand in self.values:
                versions = tuple((memory, memory.version) for memory in memories)
                self.closure.uses.append(Use(region, node, operand, versions))
                if memories:
                    self.closure.copied.add(operand)

    def _memories(self, node: Node) -> tuple[Allocation, ...]:
        value = self.values.get(node)
        if isinstance(value, Tensor):
            return (value.memory,)
        if isinstance(value, Many):
            return tuple(dict.fromkeys(item.memory for item in value.items if isinstance(item, Tensor)))
        return self.escaping.get(node, ())

    def _ban(self, memory: Allocation, reason: Reason, text: str, culprit: Node, subject: Node | None = None) -> None:
        if self.closure.table.entries[memory.alloc].kind == "root":
            if reason in (Reason.READ_BEFORE_WRITE, Reason.ESCAPES, Reason.UNSUPPORTED_VALUE):
                return  # a read never excludes an input
            if reason is Reason.WRITTEN_BY_LAYER:
                reason = Reason.INPUT_WRITTEN
        if not self.closure.table.entries[memory.version].work:
            self.private.add(memory.node)
        name = (subject or memory.node).name
        self.violations.setdefault(memory.node, Refusal(name, reason, text, where(culprit)))


def _signature(tree: Any) -> Hashable:
    """A key for everything that a node's effects on memory depend on: tensors' properties, and other leaves' values."""
    parts: list[Hashable] = []

    def add(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            parts.append((leaf.dtype, str(leaf.device), str(tuple(leaf.shape)), str(leaf.stride()), leaf.requires_grad))
        else:
            parts.append(
                (type(leaf).__name__, str(leaf) if is_symbolic(leaf) or isinstance(leaf, float) else repr(leaf))
            )
        return leaf

    map_aggregate(tree, add)
    return tuple(parts)
