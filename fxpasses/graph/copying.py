"""Copy Dynamo's graph for the passes.

Dynamo reads its own placeholders after the backend returns, and runs its graph if the backend fails, so passes never
modify the graph that they are given.

A copy generates its Python code when it is first called, because most copies never are, and generating code takes
longer than a pass. Private name, checked on torch 2.11, 2.13 and 2.15: `torch.fx._lazy_graph_module`, which Dynamo uses
for the same reason. Without it, code is generated at once.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

from torch.fx import Graph, GraphModule, Node

from fxpasses.graph.bodies import modules_in
from fxpasses.graph.regions import CHECKPOINT


def copy_graph_module(original: GraphModule) -> GraphModule:
    """Copy a graph, with a separate body for each checkpoint call; parameters and other submodules are shared.

    The copy keeps node metadata, `gm.meta`, and the attributes that Dynamo and AOTAutograd set on placeholders and
    modules.
    """
    copies: dict[Node, Node] = {}
    copy = new_graph_module(original, copy_graph(original.graph, copies), type(original).__name__)
    copy.meta = dict(original.meta)
    for name in ("_param_name_to_source", "_backend_id"):
        if hasattr(original, name):
            setattr(copy, name, getattr(original, name))
    for old, new in copies.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    _own_checkpoint_bodies(copy)
    return copy


def copy_graph(original: Graph, copies: dict[Node, Node] | None = None) -> Graph:
    """A copy of a graph with the same fake tensors. copies: filled with the new node of each old one."""
    graph = Graph()
    output = graph.output(graph.graph_copy(original, {} if copies is None else copies))
    output.meta = dict(original.output_node().meta)
    return graph


def state_of(gm: GraphModule) -> list[Any]:
    """What a pass may change in a graph and its bodies: their nodes, operands, notes and submodules.

    To be compared object by object. What a note contains may change unseen.
    """
    found: list[Any] = []
    for module in modules_in(gm):
        found += [*module._modules.values(), *module.meta.values()]
        for node in module.graph.nodes:
            found += [node, node.target, node.args, node.kwargs, *node.meta.keys(), *node.meta.values()]
    return found


def is_in_state(gm: GraphModule, state: list[Any]) -> bool:
    """Whether nothing has changed since `state_of(gm)`."""
    now = state_of(gm)
    return len(now) == len(state) and all(map(operator.is_, now, state))


def new_graph_module(root: Any, graph: Graph, name: str) -> GraphModule:
    """A module of a class `name`, with attributes of `root`, a module or a dictionary; its code is generated later."""
    try:
        from torch.fx._lazy_graph_module import _LazyGraphModule
    except ImportError:
        return GraphModule(root, graph, class_name=name)
    return _LazyGraphModule(root, graph, class_name=name)


def is_lazy(gm: GraphModule) -> bool:
    """Whether a graph's code is generated when it is first called."""
    return hasattr(gm, "_lazy_forward")


def _own_checkpoint_bodies(gm: GraphModule) -> None:
    taken: set[str] = set()
    for call in gm.graph.find_nodes(op="call_function", target=CHECKPOINT):
        attribute = call.args[0]
        assert isinstance(attribute, Node)
        name = str(attribute.target)
        body = copy_graph_module(getattr(gm, name))
        if name in taken:  # two calls share a body: a pass may change the operands of one
            name = _fresh_name(gm, name)
            with gm.graph.inserting_before(call):
                own = gm.graph.get_attr(name)
            own.meta = dict(attribute.meta)
            call.args = (own, *call.args[1:])
            gm.recompile()
        taken.add(name)
        setattr(gm, name, body)


def _fresh_name(gm: GraphModule, name: str) -> str:
    fresh = next(f"{name}_copy_{i}" for i in itertools.count(1) if not hasattr(gm, f"{name}_copy_{i}"))
    setattr(gm, fresh, getattr(gm, name))  # must exist before a `get_attr` node names it
    return fresh
