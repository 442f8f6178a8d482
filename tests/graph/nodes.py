"""Single nodes, written as the call that they are."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node


def call(target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call of a function, or of a method given by name; "x", "y" and "z" among the arguments are placeholders."""
    graph = Graph()
    placeholders = {name: graph.placeholder(name) for name in ("x", "y", "z")}

    def argument(given: Any) -> Any:
        return placeholders.get(given, given) if isinstance(given, str) else given

    operands = tuple(map(argument, args))
    options = {name: argument(given) for name, given in kwargs.items()}
    return graph.create_node("call_method" if isinstance(target, str) else "call_function", target, operands, options)
