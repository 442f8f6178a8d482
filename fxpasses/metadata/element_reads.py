"""Reads of single elements by constant indices, which is what Dynamo makes of `counts.tolist()`."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from typing import Any

from torch.fx import Graph, Node

from fxpasses.graph.building import erase_unused
from fxpasses.graph.calls import operator_of

# A tensor is read at once if it has at most so many elements for each one that the graph reads.
_UNREAD = 16


def constant_index(node: Any) -> tuple[int, ...] | None:
    """The index of `x[1, 2]` and `x.select(0, 1)`; None for any other node, such as an element of a tuple."""
    index: Any = ()
    source = node.args[0] if isinstance(node, Node) and node.args else None
    if not isinstance(source, Node) or isinstance(source.meta.get("example_value"), (tuple, list)):
        return None
    if operator_of(node) == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    elif operator_of(node) == "select" and node.args[1:2] == (0,):
        index = node.args[2:]
    return index if index and all(type(part) is int for part in index) else None


def read_lists(graph: Graph) -> None:
    """Read elements of a tensor at once, in a graph that writes to no tensor and runs as it stands.

    Before:                                     After:

        count_0 = counts[0].item()                  numbers = counts.tolist()
        count_1 = counts[1].item()                  count_0 = numbers[0];  count_1 = numbers[1]

    This is done for a tensor with one dimension, of known size, of which several elements, one in 16 or more, are read.
    """
    found: dict[Node, list[Node]] = defaultdict(list)
    for number in graph.find_nodes(op="call_method", target="item"):
        element: Any = number.args[0]
        if len(constant_index(element) or ()) == 1:
            found[element.args[0]].append(number)
    for tensor, numbers in found.items():
        size, *others = getattr(tensor.meta.get("example_value"), "shape", None) or [None]
        if type(size) is not int or others or size > _UNREAD * len(numbers) or len(numbers) == 1:
            continue
        with graph.inserting_before(numbers[0]):
            listed = graph.call_method("tolist", (tensor,))
        for number in numbers:
            element = number.args[0]
            with graph.inserting_before(number):
                new = graph.call_function(operator.getitem, (listed, *(constant_index(element) or ())))
            new.meta = dict(number.meta)
            number.replace_all_uses_with(new)
            graph.erase_node(number)
            erase_unused([element], functools.partial(operator.is_not, tensor))
