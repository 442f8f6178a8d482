"""A graph of any size, as Dynamo makes one for a decoder whose layers read a packed batch and build masks in place.

Every other layer lies in a checkpoint body. Tracing a real model of 50,000 nodes would take Dynamo longer than the
passes take.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpasses.graph.regions import CHECKPOINT

TOKENS, WIDTH, SEQUENCES = 64, 32, 8


class Tracer:
    """Appends nodes to a graph, running each on fake tensors, so that they carry the metadata of Dynamo's nodes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.graph = Graph()

    def placeholder(self, name: str, example: Any) -> Node:
        node = self.graph.placeholder(name)
        node.meta["example_value"] = example
        return node

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        return self._finish(self.graph.call_method(name, args, kwargs))

    def function(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self._finish(self.graph.call_function(target, args, kwargs))

    def _finish(self, node: Node) -> Node:
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["example_value"])
        with self.mode:
            if node.op == "call_method":
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        node.meta["example_value"] = value
        if node.target == "item":
            node.meta["unbacked_bindings"] = {value.node.expr: ()}
        return node


def layer(tracer: Tracer, x: Node, lengths: Node) -> Node:
    """A layer's nodes: its queries of the batch, its mask, and some arithmetic on activations."""
    longest = tracer.method("item", tracer.method("max", lengths))
    mask = tracer.function(torch.full, (TOKENS, TOKENS), float("-inf"))
    position = tracer.function(torch.arange, TOKENS)
    start: Any = 0
    for index in range(SEQUENCES):
        length = tracer.method("item", tracer.function(operator.getitem, lengths, index))
        stop = tracer.function(operator.add, start, length)
        after = tracer.function(operator.ge, position, start)
        inside = tracer.function(operator.and_, after, tracer.function(operator.lt, position, stop))
        row = tracer.function(operator.getitem, inside, (slice(None), None))
        column = tracer.function(operator.getitem, inside, None)
        tracer.function(operator.setitem, mask, tracer.function(operator.and_, row, column), 0)
        start = stop
    scores = tracer.function(operator.add, tracer.function(torch.matmul, x, tracer.method("t", x)), mask)
    x = tracer.function(torch.matmul, tracer.method("softmax", scores, -1), x)
    for _ in range(40):
        x = tracer.function(torch.nn.functional.gelu, tracer.function(operator.add, x, 1.0))
    return tracer.function(operator.mul, x, longest)


def decoder(nodes: int) -> tuple[GraphModule, list[Any]]:
    """A graph of about `nodes` nodes; every other layer lies in a checkpoint body."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)
    with mode:
        examples = [torch.empty(TOKENS, WIDTH), torch.empty(SEQUENCES, dtype=torch.int64)]
    main = Tracer(mode)
    x = main.placeholder("x", examples[0])
    lengths = main.placeholder("lengths", examples[1])
    root, total = torch.nn.Module(), 0
    while total < nodes:
        inner = Tracer(mode)
        inner_x, inner_lengths = (inner.placeholder(n.name, n.meta["example_value"]) for n in (x, lengths))
        inner.graph.output((layer(inner, inner_x, inner_lengths),))
        name = f"wrap_body_{total}"
        root.add_module(name, GraphModule({}, inner.graph))
        call = main.graph.call_function(CHECKPOINT, (main.graph.get_attr(name), x, lengths))
        call.meta["example_value"] = (x.meta["example_value"],)
        before = len(main.graph.nodes)
        x = layer(main, main.function(operator.getitem, call, 0), lengths)
        total += len(inner.graph.nodes) + len(main.graph.nodes) - before
    main.graph.output((x,))
    return GraphModule(root, main.graph), examples
