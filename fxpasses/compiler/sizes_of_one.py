"""A dimension that is known to be 1, but whose size is an expression, gets the size 1.

    h = x[:, : lengths.max()]            # Min(8, u0) tokens
    y = x - h[:, :1]                     # Min(1, u0), which is 1: guarded

    first = h[:, :1]
    select = first.select(1, 0)
    unsqueeze = select.unsqueeze(1)
    y = x - unsqueeze

Inductor asks whether such a size is 1 to find the size of the result, and compares the expression with the number 1 to
find which element to read (`ExpandView._make_reindexer`, `actual[i] == 1`). So it broadcasts nothing, and reads
elements that do not exist: `y` is silently wrong, on torch 2.13 ([docs/upstream.md](../docs/upstream.md)).

Private names, checked on torch 2.13: `statically_known_true` of `torch.fx.experimental.symbolic_shapes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpasses.graph.bodies import modules_in
from fxpasses.graph.symbols import expression, is_unbacked


def make_exact(gm: GraphModule) -> None:
    """Rewrite a graph and its bodies at the origin of each such dimension: an operator, or an input."""
    known: dict[Any, bool] = {}
    for module in modules_in(gm):
        if made := _made_in(module.graph, known):
            for node, dimensions in made.items():
                _make_exact(node, dimensions)
            module.graph.lint()
            module.recompile()


def _made_in(graph: Graph, known: dict[Any, bool]) -> dict[Node, list[int]]:
    """The dimensions that originate at each operator or input; its operands' will have been rewritten to size 1.

    known: for each size that was asked about, whether it is known to be 1.
    """
    sizes = {node: _of_one(node, known) for node in graph.nodes}
    found = {}
    for node in graph.nodes:
        given = {size for operand in node.all_input_nodes for size in sizes[operand].values()}
        new = [dimension for dimension, size in sizes[node].items() if size not in given]
        if new and node.op in ("call_function", "call_method", "placeholder"):
            found[node] = new
    return found


def _make_exact(node: Node, dimensions: list[int]) -> None:
    users = [user for user in node.users if user.op != "output"]
    exact, value, graph = node, node.meta["example_value"], node.graph
    following = node.next
    while following.op == "placeholder":
        following = following.next
    with graph.inserting_before(following):
        for dimension in dimensions:
            for method, *args in (("select", dimension, 0), ("unsqueeze", dimension)):
                value = getattr(value, method)(*args)
                exact = graph.call_method(method, (exact, *args))
                exact.meta = {**node.meta, "example_value": value}
                exact.meta.pop("unbacked_bindings", None)
    for user in users:
        user.replace_input_with(node, exact)


def _of_one(node: Node, known: dict[Any, bool]) -> dict[int, Any]:
    """The dimensions of a node's tensor that are known to be 1, but whose sizes are expressions."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return {}
    found: dict[int, Any] = {}
    for dimension, size in enumerate(value.shape):
        if isinstance(size, torch.SymInt) and is_unbacked(size):
            written = expression(size)
            if written not in known:
                known[written] = statically_known_true(size == 1)
            if known[written]:
                found[dimension] = written
    return found
