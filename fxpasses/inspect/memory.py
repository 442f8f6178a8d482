"""The memory timeline of a graph: the bytes that are live at each node, in program order."""

from __future__ import annotations

from dataclasses import dataclass

from fxpasses.inspect.dataflow import Dataflow


@dataclass(slots=True)
class Point:
    """After node `key`: bytes live, bytes that it allocated, and whether any have an unknown size."""

    key: tuple[str, str]
    bytes: int
    made: int = 0
    unknown: bool = False


def timeline(graph: Dataflow) -> list[Point]:
    """The timeline of an eager forward run: memory is freed after its last use, except that of inputs.

    Tensors that share a storage count once. Bodies run inline. The prologue's own memory does not count.
    """
    size: dict[int, int] = {}
    last: dict[int, int] = {}
    inputs: set[int] = set()
    for number, node in enumerate(graph.nodes):
        if graph.in_prologue[number]:
            continue
        for value in node.values:
            if value.storage is None:
                continue
            size[value.storage] = max(size.get(value.storage, 0), value.bytes or 0)
            if node.op in ("placeholder", "get_attr") and not graph.is_border(number):
                inputs.add(value.storage)
            users = (user for user in graph.users[number] if not graph.in_prologue[user])
            last[value.storage] = max(last.get(value.storage, 0), number, *users)
    ends: dict[int, int] = {}
    for storage, number in last.items():
        if storage not in inputs:
            ends[number] = ends.get(number, 0) + size[storage]
    points: list[Point] = []
    live, seen = sum(size[storage] for storage in inputs), set(inputs)
    for number, node in enumerate(graph.nodes):
        if graph.in_prologue[number]:
            continue
        new = {value.storage for value in node.values if value.storage is not None} - seen
        made = sum(size[storage] for storage in new)
        seen |= new
        live += made
        unknown = any(value.bytes is None for value in node.values)
        points.append(Point(graph.key(number), live, made, unknown))
        live -= ends.get(number, 0)
    return points
