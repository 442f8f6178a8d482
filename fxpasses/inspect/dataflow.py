"""A stage as one dataflow graph over the nodes of all its regions, for the diff.

Data flows across the borders of bodies: a body's placeholder takes the operand of the call, and the call computes what
the body's nodes compute. The prologue's placeholders take the inputs of the main graph.

Colours are those of colour refinement (Weisfeiler and Leman): `value` is refined from a node's inputs up to the graph's
inputs, `use` from its users down to the outputs. Neither depends on names and numbers of nodes and symbols.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from fxpasses.inspect.model import MAIN, Node, Region, Stage, bodies_of

_SYMBOL = re.compile(r"\b[suz][a-z]*\d+\b")

_OPERAND = ("operand",)


class Dataflow:
    """Nodes are numbered in a topological order, a body's before its call; lists are indexed by these numbers.

    outside_in: the numbers in a topological order that has a call before the nodes of its body.
    label: a hash of a node's operator and constants, without its inputs. inputs: the nodes that it takes, by position.
    results: for a call, the outputs of its bodies. users: the nodes that take it; a call is a user of its body's
    output. operator: the operator without constants. place: the module and source line.
    """

    def __init__(self, stage: Stage) -> None:
        self.regions = {region.path: region for region in stage.regions or ()}
        self.nodes: list[Node] = []
        self.region: list[str] = []
        self.number: dict[tuple[str, str], int] = {}
        self.inputs: list[tuple[int, ...]] = []
        self.results: list[tuple[int, ...]] = []
        self.label: list[Any] = []
        self.outside_in: list[int] = []
        self._children: dict[str, list[Region]] = {}
        for region in self.regions.values():
            self._children.setdefault(region.parent, []).append(region)
        for region in self.regions.values():
            if not region.call:
                self._add_region(region, [])
        self.users: list[list[int]] = [[] for _ in self.nodes]
        for number in range(len(self.nodes)):
            for source in self.inputs[number] + self.results[number]:
                self.users[source].append(number)
        self._is_operand = [label == _OPERAND and bool(t) for label, t in zip(self.label, self.inputs, strict=True)]
        self.label = [hash(label) for label in self.label]
        self.in_prologue = [self.regions[path].in_prologue for path in self.region]
        self.operator = [(node.op, node.target) for node in self.nodes]
        self.place = [(node.module, str(node.source) if node.source else "") for node in self.nodes]
        self.value = self._values(self.label)
        self.use = self._uses(self.label)
        refined = [hash(parts) for parts in zip(self.label, self.place, self.value, self.use, strict=True)]
        self.fine = list(zip(self._values(refined), self._uses(refined), strict=True))

    def __len__(self) -> int:
        return len(self.nodes)

    def key(self, number: int) -> tuple[str, str]:
        """(path of the region, name)."""
        return self.region[number], self.nodes[number].name

    def numbers(self, number: int, names: Iterable[str]) -> list[int]:
        """The nodes of these names in the region of node `number`."""
        return [self.number[self.region[number], name] for name in names]

    def origin(self, number: int) -> int:
        """The node that a body's placeholder takes, through all enclosing bodies; any other node itself."""
        while self._is_operand[number]:
            number = self.inputs[number][0]
        return number

    def is_border(self, number: int) -> bool:
        """Whether a node is a body's placeholder or output, which the call and the body's nodes cover."""
        return bool(self.regions[self.region[number]].call) and self.nodes[number].op in ("placeholder", "output")

    def _add_region(self, region: Region, operands: list[int | None]) -> int | None:
        """Add a region's nodes, each body's before its call; returns the number of the output."""
        placeholders = 0
        children = {child.path: child for child in self._children.get(region.path, ()) if child.call}
        output = None
        for node in region.nodes:
            taken: list[int] = []
            results: list[int] = []
            if node.op == "placeholder":
                label, taken = self._placeholder(region, node, placeholders, operands)
                placeholders += 1
            else:
                label = (node.op, node.target, self._pattern([node.args, node.kwargs], region.path, taken))
            position = len(self.outside_in)
            for path in bodies_of(node):
                if path in children:
                    inner = self._add_region(children[path], self._operands(node, region.path))
                    results += [] if inner is None else [inner]
            number = self._add(region, node, label, taken, results)
            self.outside_in.insert(position, number)
            output = number if node.op == "output" else output
        return output

    def _add(self, region: Region, node: Node, label: Any, taken: list[int], results: list[int]) -> int:
        self.number[region.path, node.name] = len(self.nodes)
        self.nodes.append(node)
        self.region.append(region.path)
        self.label.append(label)
        self.inputs.append(tuple(taken))
        self.results.append(tuple(results))
        return len(self.nodes) - 1

    def _placeholder(
        self, region: Region, node: Node, position: int, operands: list[int | None]
    ) -> tuple[Any, list[int]]:
        if region.call and position < len(operands):
            operand = operands[position]
            return _OPERAND, [] if operand is None else [operand]
        if region.inputs and region.inputs[position] >= 0:
            inputs = [n for n in self.regions[MAIN].nodes if n.op == "placeholder"]
            if region.inputs[position] < len(inputs):
                return _OPERAND, [self.number[MAIN, inputs[region.inputs[position]].name]]
        return ("placeholder", node.source_name or position), []

    def _operands(self, call: Node, path: str) -> list[int | None]:
        """The operands of a body's placeholders: the call's arguments after the bodies, with lists flattened."""
        last = max(i for i, argument in enumerate(call.args) if isinstance(argument, dict) and "body" in argument)
        return [
            self.number[path, item["node"]] if isinstance(item, dict) and "node" in item else None
            for item in _flattened(call.args[last + 1 :])
        ]

    def _pattern(self, value: Any, path: str, taken: list[int]) -> Any:
        """An argument without its nodes, which are appended to `taken`."""
        if isinstance(value, list):
            return tuple(self._pattern(item, path, taken) for item in value)
        if not isinstance(value, dict):
            return type(value).__name__, value  # 1, 1.0 and True are equal, and not the same argument
        if "node" in value:
            taken.append(self.number[path, value["node"]])
            return "node"
        if "body" in value:
            return "body"
        if "constant" in value:
            return "constant", _SYMBOL.sub("symbol", value["constant"])
        return tuple((key, self._pattern(item, path, taken)) for key, item in value.items())

    def _values(self, labels: list[int]) -> list[int]:
        colours: list[int] = []
        inside: dict[str, int] = {}  # the colours of all nodes of a region, unordered: some nodes have no users
        for number, taken in enumerate(self.inputs):
            bodies = tuple(inside.get(path, 0) for path in bodies_of(self.nodes[number]))
            results = tuple(colours[i] for i in self.results[number])
            # An operand has the colour of the value that it takes, across the borders of bodies and prologue.
            same = self._is_operand[number]
            inputs = tuple(colours[i] for i in taken)
            colours.append(inputs[0] if same else hash((labels[number], inputs, results, bodies)))
            path = self.region[number]
            inside[path] = inside.get(path, 0) + hash((colours[-1], labels[number]))
        return colours

    def _uses(self, labels: list[int]) -> list[int]:
        colours = [0] * len(self)
        for number in reversed(range(len(self))):
            seen = sorted(
                (colours[user], position)
                for user in dict.fromkeys(self.users[number])
                for position, taken in enumerate(self.inputs[user] + self.results[user])
                if taken == number
            )
            colours[number] = hash((labels[number], tuple(seen)))
        return colours


def _flattened(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _flattened(value)
        else:
            yield value
