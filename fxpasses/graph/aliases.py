"""Alias analysis: which nodes share memory, and which nodes write to it.

Nodes share memory if their fake tensors share a storage, or if a higher-order operator returns a view of an operand,
which the fake tensors of its results do not show. `written_operands` derives the writes of a node from its name, its
schema and its bodies, and so works while a graph is being written; `AliasAnalysis` runs the node on fake tensors, which
also covers operators whose names and schemas do not show their writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxpasses.graph import effects
from fxpasses.graph.bodies import modules_in
from fxpasses.graph.calls import OperatorCall, is_in_place, operator_of
from fxpasses.graph.effects import leaves, storage_key
from fxpasses.graph.modes import Regions, autocast_regions
from fxpasses.graph.regions import CHECKPOINT
from fxpasses.graph.traits import WRITES_NOTHING

# Higher-order operators that only run the operator that they are given.
_RUN_AN_OPERATOR = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")


def storages(node: Node) -> list[int]:
    """The storages of a node's tensors, by identity, in a graph of Dynamo or AOTAutograd."""
    return storages_of(node.meta.get("val", node.meta.get("example_value")))


def storages_of(value: Any) -> list[int]:
    """The storages of tensors, fake or real, by identity."""
    found = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            try:
                found.append(storage_key(leaf))
            except (NotImplementedError, RuntimeError):  # a subclass without a storage of its own
                continue
    return found


def is_written(gm: GraphModule, values: Any) -> bool:
    """Whether a graph, or a body in it, may write to the memory of `values`, fake tensors of that graph."""
    sought = set(storages_of(values))
    bodies = list(modules_in(gm)) if sought else []
    written = (operand for body in bodies for node in body.graph.nodes for operand in written_operands(node, body))
    return any(sought.intersection(storages(operand)) for operand in written)


def written_operands(node: Node, owner: torch.nn.Module | None = None) -> list[Node]:
    """The operands that a node may write to: all of them if neither its name nor its schema says.

    owner: the module that holds the bodies of higher-order operators, by default that of the node's graph.
    """
    if node.op == "call_module":
        return node.all_input_nodes
    if node.op not in ("call_function", "call_method"):
        return []
    target, call = node.target, OperatorCall.of(node)
    if isinstance(target, torch._ops.HigherOrderOperator):
        bodies = _bodies(node, owner)
        if target is CHECKPOINT and len(bodies) == 1:
            return _written_by_body(bodies[0], node)
        known = bodies or call.name in _RUN_AN_OPERATOR
        return node.all_input_nodes if not known or any(map(_writes_to_operands, bodies)) else []
    if isinstance(target, torch._ops.OpOverload):
        return _nodes_in(_written_by_schema(target, call))
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
        return _nodes_in([_written_by_schema(overload, call) for overload in overloads])
    name = call.name
    if "." in name:
        return node.all_input_nodes
    in_place = is_in_place(name) or call.argument("inplace")
    return _nodes_in([call.kwargs.get("out"), node.args[:1] if in_place else ()])


def _written_by_schema(overload: torch._ops.OpOverload, call: OperatorCall) -> list[Any]:
    return [
        call.args[place] if place < len(call.args) else call.kwargs.get(argument.name)
        for place, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _nodes_in(tree: Any) -> list[Node]:
    return list(dict.fromkeys(leaf for leaf in leaves(tree) if isinstance(leaf, Node)))


def _bodies(call: Node, owner: torch.nn.Module | None = None) -> list[GraphModule]:
    """The bodies among the operands of a higher-order operator."""
    owner = owner or call.graph.owning_module
    named = (str(operand.target) for operand in call.all_input_nodes if operand.op == "get_attr")
    return [body for name in named if isinstance(body := getattr(owner, name, None), GraphModule)]


def _writes_to_operands(body: GraphModule) -> bool:
    return AliasSets(body.graph.nodes).meet(_written_in(body), _given(body))


def _written_by_body(body: GraphModule, call: Node) -> list[Node]:
    """The operands of a checkpoint that share memory with its body's writes; all of them if it writes an attribute."""
    if not (written := _written_in(body)):
        return []
    sets = AliasSets(body.graph.nodes)
    if sets.meet(body.graph.find_nodes(op="get_attr"), written):
        return call.all_input_nodes
    pairs = zip(body.graph.find_nodes(op="placeholder"), call.args[1:], strict=True)
    return _nodes_in([operand for placeholder, operand in pairs if sets.meet([placeholder], written)])


def _written_in(body: GraphModule) -> list[Node]:
    return [operand for node in body.graph.nodes for operand in written_operands(node, body)]


def _may_return_operands(call: Node) -> bool:
    """Whether a higher-order operator may return memory of its operands that its fake tensors do not show."""
    if operator_of(call) in _RUN_AN_OPERATOR:
        return False  # its fake tensors show the memory
    bodies = _bodies(call)
    returned = (AliasSets(b.graph.nodes).meet(b.graph.output_node().all_input_nodes, _given(b)) for b in bodies)
    return not bodies or any(returned)


def _given(body: GraphModule) -> list[Node]:
    return [node for node in body.graph.nodes if node.op in ("placeholder", "get_attr")]


class AliasSets:
    """A partition of a graph's memory into numbered sets. Nodes whose tensors are in one set may share memory.

    in_one: inputs that may share memory. owners: the nodes of each set, in program order.
    """

    def __init__(self, nodes: Iterable[Node], in_one: Iterable[Node] = ()) -> None:
        self._parents: dict[int, int] = {}
        self._known: dict[Node, tuple[Any, list[int]]] = {}  # each with its example, which a rewrite may replace
        self._merge(in_one)
        self.refresh(nodes)

    def refresh(self, nodes: Iterable[Node]) -> None:
        """To be called after a change of the graph."""
        nodes = list(nodes)
        for node in nodes:
            if isinstance(node.target, torch._ops.HigherOrderOperator) and _may_return_operands(node):
                results = (node, *(user for user in node.users if operator_of(user) == "getitem"))
                self._merge((*node.all_input_nodes, *results))
        self.owners: dict[int, list[Node]] = {}
        for node in nodes:
            for number in self.of(node):
                self.owners.setdefault(number, []).append(node)

    def of(self, node: Node) -> frozenset[int]:
        """The sets of a node's tensors."""
        example = node.meta.get("val", node.meta.get("example_value"))
        known = self._known.get(node)
        if known is None or known[0] is not example:
            known = self._known[node] = example, storages(node)
        return frozenset(map(self.number, known[1]))

    def sharing(self, node: Node) -> list[Node]:
        """All nodes on the memory of a tensor, the node itself included, in program order."""
        (number,) = self.of(node)
        return self.owners[number]

    def meet(self, nodes: Iterable[Node], others: Iterable[Node]) -> bool:
        """Whether one of the nodes may share memory with one of the others."""
        return bool({n for node in nodes for n in self.of(node)} & {n for node in others for n in self.of(node)})

    def number(self, storage: int) -> int:
        while storage in self._parents:
            storage = self._parents[storage]
        return storage

    def _merge(self, nodes: Iterable[Node]) -> None:
        numbers = list({number for node in nodes for number in self.of(node)})
        self._parents |= dict.fromkeys(numbers[1:], numbers[0] if numbers else 0)


class AliasAnalysis:
    """The writers and readers of memory in one graph.

    inputs_in_one: inputs that may share memory. autocast: the autocast regions around the graph.

    A pass that replaces queries of `idx == e` by a sort of `idx` must know that nobody writes to the mask before its
    query, or to `idx` after the comparison.
    """

    def __init__(
        self, graph: Graph, fake_mode: Any, inputs_in_one: Iterable[Node] = (), autocast: Regions = ()
    ) -> None:
        self._graph, self._fake_mode, self._autocast = graph, fake_mode, autocast
        self.sets = AliasSets((), inputs_in_one)
        self.refresh()

    def refresh(self) -> None:
        """To be called after a change of the graph."""
        self.sets.refresh(self._graph.nodes)
        self._written: dict[Node, frozenset[int]] = {}
        self._regions = autocast_regions(self._graph, self._autocast)
        self.positions = {node: position for position, node in enumerate(self._graph.nodes)}

    def is_constant(self, node: Node) -> bool:
        """Whether nobody writes to a node's memory after the node."""
        return self.writer(node, node, None) is None

    def is_pure(self, node: Node) -> bool:
        """Whether a node writes to none of its operands, so that it is dead if nobody uses it."""
        return not self.written_by(node)

    def written_by(self, node: Node) -> frozenset[int]:
        """The alias sets that a node may write to."""
        if node not in self._written:
            self._written[node] = self._find_written(node)
        return self._written[node]

    def writer(self, node: Node, after: Node, until: Node | None) -> Node | None:
        """The first node between two others that may write to the memory of `node`."""
        own = self.sets.of(node)
        return next((user for user in self.users(node, after, until) if self.written_by(user) & own), None)

    def users(self, node: Node, after: Node, until: Node | None) -> Iterator[Node]:
        """The nodes between two others that use the memory of `node` through any view."""
        start = self.positions[after]
        end = self.positions[until] if until is not None else len(self.positions)
        holders = (holder for number in self.sets.of(node) for holder in self.sets.owners.get(number, ()))
        found = {user for holder in holders for user in holder.users if user in self.positions}
        return iter(sorted((u for u in found if start < self.positions[u] < end), key=self.positions.__getitem__))

    def _find_written(self, user: Node) -> frozenset[int]:
        if not user.op.startswith("call") or (operator_of(user) in WRITES_NOTHING and "out" not in user.kwargs):
            return frozenset()
        if not any(map(self.sets.of, user.all_input_nodes)):
            return frozenset()  # it must not run, because it may change a mode of the process, such as autocast
        written = user.all_input_nodes
        if user.op == "call_module" or isinstance(user.target, torch._ops.HigherOrderOperator):
            written = written_operands(user)
        else:
            args, kwargs = torch.fx.map_arg((user.args, user.kwargs), lambda operand: operand.meta.get("example_value"))
            touch = effects.touch(user, args, kwargs, self._fake_mode, self._regions.get(user, ()))
            if touch is not None:
                tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                return frozenset(self.sets.number(storage_key(tensors[position])) for position in touch.writes)
        return frozenset(key for operand in written for key in self.sets.of(operand))
