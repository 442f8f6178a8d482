"""Compiles a graph with folded layers piece by piece, and each body once.

    layer_0 = compile(body)
    def run(tokens, w_0, w_1, head):
        h_0, = rest_0(tokens)
        h_1, = layer_0(h_0, w_0)
        h_2, = layer_0(h_1, w_1)
        return rest_1(h_2, head)

Each piece is a separate function for autograd, as if the layers were compiled one by one. But embedding, head and loss
are compiled too, and the passes have seen the whole program.

Private name, checked on torch 2.11, 2.13 and 2.15: `torch._guards.tracing` and `TracingContext`, whose `fw_metadata`
AOTAutograd sets for the graph that it compiles, and reads again when it compiles that graph's backward. So each piece
has a context of its own, with the guards of the frame.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch._guards import TracingContext, tracing
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fxpasses.compiler import progress
from fxpasses.fold.outlining import Place, call_layer, outline
from fxpasses.fold.segments import attribute, is_reference, segment
from fxpasses.graph.modes import modes
from fxpasses.memory.step import Call, Step

Compiled = Callable[..., Any]
Lower = Callable[[GraphModule, Sequence[Any], Place], Compiled]


def lower_segments(gm: GraphModule, example_inputs: Sequence[Any], lower: Lower, step: Step | None = None) -> Compiled:
    """Compile a graph that `fold_layers` has rewritten with `lower`, piece by piece.

    step: is told the pieces, if it has to fit; then those that run once are compiled first.
    """
    examples = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    return _Assembly(gm, examples, lower).run(step)


class _Assembly:
    def __init__(self, gm: GraphModule, examples: dict[Node, Any], lower: Lower) -> None:
        self.gm, self.examples, self.lower = gm, examples, lower
        self.modes = modes(gm.graph)
        self.graph = Graph()
        self.pieces: dict[str, Any] = {}  # also the constants of the graph
        self.values: dict[Node, Any] = {}
        self.compiled: dict[Any, str] = {}  # by body, or by the form of a rest
        self.waiting: list[tuple[Place, Callable[[], None]]] = []  # compilations
        self.calls: list[Call] = []  # in forward's order
        self.returned: frozenset[str] = frozenset()

    def run(self, step: Step | None) -> Compiled:
        rest: list[Node] = []
        results: set[Node] = set()
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.graph.placeholder(node.name)
            elif node.op == "get_attr" and not is_reference(self.gm, node):
                self._attribute(node)
            elif node.target is call_layer or node in results:
                self._rest(rest)
                rest = []
                if node.target is call_layer:
                    self._layer(node)
                    results |= set(node.users)
                else:
                    self.values[node] = self.graph.node_copy(node, self.values.__getitem__)
            elif node.op.startswith("call"):
                rest.append(node)
            elif node.op == "output":
                self._rest(rest, last=True)
                self.returned = frozenset(operand.name for operand in node.all_input_nodes)
                self.graph.output(map_arg(node.args[0], self.values.__getitem__))
        progress.expect(len(self.waiting))
        if step is not None:
            step.calls, step.returned = self.calls, self.returned
            self.waiting.sort(key=lambda each: each[0].calls > 1)
        for _, compile in self.waiting:
            compile()
            progress.piece_is_done()
        # `forward` calls the pieces as attributes; they are not modules, so that no hook of the program sees them.
        return GraphModule(self.pieces, self.graph, class_name="Pieces").forward

    def _attribute(self, node: Node) -> None:
        value = self.pieces[str(node.target)] = attribute(self.gm, node)
        self.examples[node] = node.meta.get("example_value", value)
        self.values[node] = self.graph.get_attr(str(node.target))

    def _layer(self, call: Node) -> None:
        reference, *operands = call.all_input_nodes
        body: GraphModule = getattr(self.gm, str(reference.target))
        if body not in self.compiled:
            self.compiled[body] = self._piece(
                body, operands, Place(len(reference.users), last=False, name=str(reference.target))
            )
        users = {user.args[1]: user.name for user in call.users}
        count = len(call.meta["example_value"])
        results = [users.get(position, f"{call.name} {position}") for position in range(count)]
        self.values[call] = self._call(self.compiled[body], operands, results, is_layer=True)

    def _rest(self, nodes: list[Node], last: bool = False) -> None:
        if not nodes:
            return
        found = segment(self.gm, nodes)
        live_outs = tuple(found.nodes.index(node) for node in found.live_outs)
        key = found.form, live_outs, self.modes[found.first].arguments, last
        if key not in self.compiled:
            name = f"rest_{len(self.compiled)}"
            piece = outline(self.gm, nodes, found.operands, found.live_outs, self.modes[nodes[0]], name)
            self.compiled[key] = self._piece(piece, found.operands, Place(1, last, name))
        results = self._call(self.compiled[key], found.operands, [node.name for node in found.live_outs])
        for position, node in enumerate(found.live_outs):
            self.values[node] = self.graph.call_function(operator.getitem, (results, position))

    def _piece(self, piece: GraphModule, operands: Sequence[Node], place: Place) -> str:
        examples = [self.examples.get(node, node.meta.get("example_value")) for node in operands]
        self.waiting.append((place, lambda: self._compile(piece, examples, place)))
        return place.name

    def _compile(self, piece: GraphModule, examples: list[Any], place: Place) -> None:
        context: Any = copy.copy(TracingContext.try_get())
        if context is not None:
            context.fw_metadata = None
        with tracing(context):
            self.pieces[place.name] = self.lower(piece, examples, place)

    def _call(self, name: str, operands: Sequence[Node], results: Sequence[str], is_layer: bool = False) -> Node:
        self.calls.append(Call(name, tuple(node.name for node in operands), tuple(results), is_layer))
        return self.graph.call_module(name, tuple(self.values[node] for node in operands))
