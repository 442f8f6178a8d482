"""A copy of Dynamo's graph to work on.

Dynamo reads its own placeholders after the backend returns, and falls back to them where the backend fails, so the
passes never touch the graph that they were given.

Copies generate their Python code when it is called, which most never are: that takes longer than a pass. Private name,
checked on torch 2.11, 2.13 and 2.15: `torch.fx._lazy_graph_module`, which Dynamo uses for the same reason. Without it,
code is generated at once.
"""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from fxpasses.graph.regions import CHECKPOINT


def copy_graph_module(original: GraphModule) -> GraphModule:
    """Copy a graph, and a body of its own for each checkpoint call; parameters and other submodules are shared.

    Node metadata, `gm.meta`, and what Dynamo and AOTAutograd attach to placeholders and modules are carried over.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    output = graph.output(graph.graph_copy(original.graph, copies))
    output.meta = dict(original.graph.output_node().meta)
    copy = _graph_module(original, graph)
    copy.meta = dict(original.meta)
    for name in ("_param_name_to_source", "_backend_id"):
        if hasattr(original, name):
            setattr(copy, name, getattr(original, name))
    for old, new in copies.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    _own_checkpoint_bodies(copy)
    return copy


def _graph_module(original: GraphModule, graph: Graph) -> GraphModule:
    name = type(original).__name__
    try:
        from torch.fx._lazy_graph_module import _LazyGraphModule
    except ImportError:
        return GraphModule(original, graph, class_name=name)
    return _LazyGraphModule(original, graph, class_name=name)


def _own_checkpoint_bodies(gm: GraphModule) -> None:
    taken: set[str] = set()
    for call in gm.graph.find_nodes(op="call_function", target=CHECKPOINT):
        attribute = call.args[0]
        assert isinstance(attribute, Node)
        name = str(attribute.target)
        body = copy_graph_module(getattr(gm, name))
        if name in taken:  # two calls of one body: each may come to take other operands
            name = _fresh_name(gm, name)
            with gm.graph.inserting_before(call):
                own = gm.graph.get_attr(name)
            own.meta = dict(attribute.meta)
            call.args = (own, *call.args[1:])
            gm.recompile()
        taken.add(name)
        setattr(gm, name, body)


def _fresh_name(gm: GraphModule, name: str) -> str:
    number = 1
    while hasattr(gm, f"{name}_copy_{number}"):
        number += 1
    # The attribute must exist before a `get_attr` node names it.
    fresh = f"{name}_copy_{number}"
    setattr(gm, fresh, getattr(gm, name))
    return fresh
