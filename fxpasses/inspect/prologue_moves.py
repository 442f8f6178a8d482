"""The nodes that a pass moved to the prologue, found by what they compute or by where the program makes them."""

from __future__ import annotations

from typing import Any

from fxpasses.inspect.dataflow import Dataflow
from fxpasses.inspect.model import Node

AS_CHECK = -1  # in the place of a node: the prologue evaluates the node as an assertion


def moved_to_prologue(before: Dataflow, after: Dataflow, to: list[int], checks: list[str]) -> dict[int, int]:
    """Maps nodes without counterpart to the prologue's node that computes the same, or to `AS_CHECK`.

    Nodes correspond by value or, if a pass spelled them otherwise (in place, on another device), by operator and source
    line. to: the counterpart of each node of `before`, or -1. checks: the assertions of the prologue, as text.
    """
    values: dict[Any, int] = {}
    places: dict[Any, list[int]] = {}
    for other in range(len(after)):
        if after.in_prologue[other] and after.nodes[other].op not in ("placeholder", "output"):
            values.setdefault(after.value[other], other)
            places.setdefault(made_at(after.nodes[other]), []).append(other)
    checked = " ".join(checks)
    found: dict[int, int] = {}
    seen: dict[Any, int] = {}  # the number of nodes of one operator and line so far in one layer
    left = [n for n in range(len(before)) if to[n] < 0 and not before.in_prologue[n]]
    for number in left:
        node = before.nodes[number]
        if node.op in ("placeholder", "output"):
            continue
        place = made_at(node)
        position = seen.get((before.region[number], node.module, place), 0)
        seen[before.region[number], node.module, place] = position + 1
        if before.value[number] in values:
            found[number] = values[before.value[number]]
        elif place in places and node.source is not None:
            found[number] = places[place][min(position, len(places[place]) - 1)]
        elif node.is_assertion and node.source is not None and f"(at {node.source})" in checked:
            found[number] = AS_CHECK
    for number in reversed(left):  # nodes that fed only these went with them: a comparison, a body's operand
        users = before.users[number]
        is_input = before.nodes[number].op == "placeholder" and not before.is_border(number)
        if number not in found and not is_input and users and all(user in found for user in users):
            found[number] = found[users[0]]
    return found


def made_at(node: Node) -> Any:
    """The operator, and the line of the program."""
    return node.short_target, str(node.source)
