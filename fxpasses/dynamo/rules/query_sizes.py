"""How many elements of a mask are not zero: Dynamo asserts nothing of that number which holds for every mask.

    tok, slot = torch.where(mask)      [u0], [u0]      0 <= u0 <= 1024, the number of the mask's elements

PyTorch writes the range of each such size into the graph, as five nodes: the size, two comparisons, two assertions.
With hundreds of queries this takes a second, and passes have to look at all of them. But the operator returns no other
size, and whoever runs it on fake tensors again, as AOTAutograd does, is told the range again.

A size keeps its assertions if the program computes with it, or if more is known of it than that.

Private names, checked on torch 2.11, 2.13 and 2.15: `insert_deferred_runtime_asserts`, which does nothing for nodes
without `unbacked_bindings` in their `meta`; of the shape environment, `var_to_range`, `replacements` and
`deferred_runtime_asserts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxpasses.dynamo.interceptions import Handlers, Proceed, method
from fxpasses.dynamo.trace import Trace
from fxpasses.graph.calls import operator_of
from fxpasses.graph.symbols import free_symbols, is_symbolic

handlers = Handlers()


@handlers.at(
    method(
        "torch.fx.passes.runtime_assert",
        "insert_deferred_runtime_asserts",
        imported_by=("torch._dynamo.output_graph",),
    ),
    without="the sizes of queries are asserted, which takes time",
)
def insert_assertions(
    trace: Trace, proceed: Proceed, gm: GraphModule, shape_env: Any, name: str, export: bool = False
) -> Any:
    plain = {} if export else dict(_plain_queries(gm.graph, shape_env))
    for node in plain:
        del node.meta["unbacked_bindings"]
    try:
        return proceed(gm, shape_env, name, export)
    finally:
        for node, bindings in plain.items():
            node.meta["unbacked_bindings"] = bindings


def _plain_queries(graph: Graph, shape_env: Any) -> Iterator[tuple[Node, Any]]:
    """The queries of whose sizes only the operators' own ranges are known, with the symbols that they bind."""
    numbers = [value for node in graph.nodes if is_symbolic(value := node.meta.get("example_value"))]
    used = {found for number in numbers for found in free_symbols(number)}
    used |= {
        found for each in shape_env.deferred_runtime_asserts.values() for at in each for found in at.expr.free_symbols
    }
    for node in graph.nodes:
        bindings = node.meta.get("unbacked_bindings")
        if not bindings or (most := _most(node)) is None:
            continue
        ranges = [shape_env.var_to_range[found] for found in bindings]
        is_plain = used.isdisjoint(bindings) and shape_env.replacements.keys().isdisjoint(bindings)
        if is_plain and all(each.lower == 0 and each.upper == most for each in ranges):
            yield node, bindings


def _most(node: Node) -> int | None:
    """The number of elements of the mask that a node queries; None if it is no query, or the number is not known."""
    if operator_of(node) not in ("where", "nonzero") or len(node.args) != 1 or len(node.all_input_nodes) != 1:
        return None
    mask = node.all_input_nodes[0].meta.get("example_value")
    most = mask.numel() if isinstance(mask, torch.Tensor) else None
    return most if isinstance(most, int) else None
