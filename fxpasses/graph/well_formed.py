"""The checks of a pass's result: whether the graph, with its nested graphs, can be copied and compiled.

`torch.fx.Graph.lint` sees one graph. It sees neither the bodies of its checkpoints and other operators, nor whether a
size that is known only at run time is read before a tensor has it. Sizes of fake tensors that nothing reads any more do
not matter: the compiler of the graph computes these values anew.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fxpasses.errors import PassError
from fxpasses.graph.regions import CHECKPOINT
from fxpasses.graph.symbols import is_symbolic, unbacked_symbols


def check_well_formed(gm: GraphModule, before: GraphModule) -> None:
    """Raise `PassError` for a malformed graph, which a pass made of the graph `before`.

    In each nested graph, values are used after they are computed, and names are unique; a checkpoint has an operand for
    each placeholder of its body; and no size's symbol is used before it is bound, unless it was so before the pass.
    """
    late_before = functools.cache(lambda: {u for _, graph in _nested(before) for u, _ in _used_too_early(graph.graph)})
    for name, nested in _nested(gm):
        place = f"the body `{name}`" if name else "the graph"
        try:
            nested.graph.lint()
        except Exception as error:
            raise PassError(f"it leaves {place} malformed: {error}") from error
        for call in nested.graph.find_nodes(op="call_function", target=CHECKPOINT):
            body = getattr(nested, str(call.args[0].target))
            operands, placeholders = len(call.args) - 1, len(body.graph.find_nodes(op="placeholder"))
            if operands != placeholders:
                raise PassError(f"it leaves `{call.name}` with {operands} operands for {placeholders} placeholders")
        for symbol, node in _used_too_early(nested.graph):
            if symbol not in late_before():
                raise PassError(f"it leaves `{node.name}` in {place} with a size {symbol} that is read only later")


def _nested(gm: GraphModule, prefix: str = "") -> Iterator[tuple[str, GraphModule]]:
    """(name, graph) of a graph, whose name is empty, and of all graphs that its nodes run."""
    yield prefix, gm
    names = {str(node.target): None for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    for name in names:
        found = gm
        for part in name.split("."):
            found = getattr(found, part, None)  # type: ignore[assignment]
        if isinstance(found, GraphModule):
            yield from _nested(found, f"{prefix}.{name}" if prefix else name)


def _used_too_early(graph: Graph) -> Iterator[tuple[Any, Node]]:
    """Symbols of sizes that are known only at run time, with nodes that use them before the node that binds them."""
    used: dict[Any, Node] = {}
    bound: set[Any] = set()
    for node in graph.nodes:
        symbols = _symbols(node.meta.get("example_value"))
        bindings = node.meta.get("unbacked_bindings") or {}
        if node.op == "placeholder" or bindings:
            symbols |= set(bindings)
            yield from ((symbol, used[symbol]) for symbol in symbols - bound if symbol in used)
            bound |= symbols
        for symbol in symbols - bound:
            used.setdefault(symbol, node)


def _symbols(value: Any) -> set[Any]:
    found: set[Any] = set()
    for leaf in pytree.tree_leaves(value):
        is_plain = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        if is_symbolic(leaf) or (is_plain and any(isinstance(size, torch.SymInt) for size in leaf.shape)):
            found |= unbacked_symbols(leaf)
    return found
