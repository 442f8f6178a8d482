"""Matches the nodes of two graphs: by what they compute, then by their neighbours, then by their source line.

Each step pairs nodes that earlier steps left, from the strongest evidence to the weakest:

0. the inputs of the graph, by Dynamo's names for them;
1. equal colours in both directions: equal values with equal uses;
2. the same operator on matched inputs (below an unchanged part);
3. the same operator at the same position of matched users (above an unchanged part);
4. the same operator, module and source line, in order; then the same without its constants; then another operator
   with the same inputs at the same line.

Names only break ties between otherwise equal candidates. Every step takes time linear in the graph (except for sorting
users): 20,000 nodes take about a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from fxpasses.inspect.dataflow import Dataflow
from fxpasses.inspect.model import bodies_of

_ROUNDS = 4  # a round builds on the pairs of the one before; chains of dependent changes are short


def match(before: Dataflow, after: Dataflow) -> list[int]:
    """For each node of `before` the number of its counterpart in `after`, or -1."""
    matcher = _Matcher(before, after)
    matcher.run()
    return matcher.to


class _Matcher:
    def __init__(self, before: Dataflow, after: Dataflow) -> None:
        self.before = before
        self.after = after
        self.to = [-1] * len(before)
        self.back = [-1] * len(after)
        self.regions = {path: path for path, region in before.regions.items() if not region.call}

    def run(self) -> None:
        colour, mapped, region = _colour, self._mapped_inputs, self._mapped_region
        self._sweep(_input)
        self._sweep(
            (lambda g, i: (colour(g, i), g.fine[i], mapped(g, i), region(g, i), g.nodes[i].name)),
            (lambda g, i: (colour(g, i), g.fine[i], mapped(g, i), region(g, i))),
            (lambda g, i: (colour(g, i), mapped(g, i), region(g, i), g.place[i], g.nodes[i].name)),
            (lambda g, i: (colour(g, i), mapped(g, i), region(g, i), g.place[i])),
            (lambda g, i: (colour(g, i), mapped(g, i), region(g, i))),
            (lambda g, i: (colour(g, i), region(g, i))),
            (lambda g, i: (colour(g, i), g.place[i])),
            colour,
        )
        self._neighbours()
        self._sweep(
            (lambda g, i: _unless_operand(g, i, (g.place[i], region(g, i), g.nodes[i].name))),
            (lambda g, i: _unless_operand(g, i, (g.place[i], region(g, i)))),
            (lambda g, i: _unless_operand(g, i, g.place[i] if any(g.place[i]) else None)),
        )
        self._neighbours()
        self._sweep(
            (lambda g, i: _unless_input(g, i, (mapped(g, i), g.place[i]) if g.inputs[i] else None)),
            (lambda g, i: _unless_input(g, i, (g.place[i], region(g, i), g.nodes[i].name))),
            (lambda g, i: _unless_input(g, i, g.place[i] if any(g.place[i]) else None)),
            (lambda g, i: _unless_input(g, i, mapped(g, i) if g.inputs[i] else None)),
            self._replaced,
        )
        self._neighbours()

    def _sweep(self, *keys: Callable[[Dataflow, int], Hashable]) -> None:
        """One pass over all nodes for each key, so that a stronger key pairs all it can before a weaker one."""
        for key in keys:
            self._pair(key)

    def _pair(self, key: Callable[[Dataflow, int], Hashable]) -> int:
        """Pair nodes with equal keys, in topological order, as a key may depend on the counterparts of inputs."""
        waiting: dict[Hashable, deque[int]] = {}
        for number in self.after.outside_in:
            if self.back[number] < 0:
                found = key(self.after, number)
                if found is not None:
                    waiting.setdefault(found, deque()).append(number)
        paired = 0
        for number in self.before.outside_in:
            if self.to[number] < 0 and waiting:
                found = key(self.before, number)
                candidates = waiting.get(found) if found is not None else None
                if candidates:
                    self._join(number, candidates.popleft())
                    paired += 1
        return paired

    def _neighbours(self) -> None:
        """Propagate pairs along the edges, down and up, until there are no new ones."""
        region = self._mapped_region
        for _ in range(_ROUNDS):
            paired = self._pair(self._below(lambda g, i: (region(g, i), g.place[i], g.nodes[i].name)))
            paired += self._pair(self._below(lambda g, i: (region(g, i), g.place[i])))
            paired += self._pair(self._below(region))
            paired += self._pair(self._below(lambda g, i: None))
            paired += self._above()
            if not paired:
                return

    def _below(self, tie: Callable[[Dataflow, int], Hashable]) -> Callable[[Dataflow, int], Hashable]:
        def key(graph: Dataflow, number: int) -> Hashable:
            inputs = self._mapped_inputs(graph, number)
            if not inputs or inputs[0] is None:
                return None
            return _sided_label(graph, number), inputs, tie(graph, number)

        return key

    def _above(self) -> int:
        paired = 0
        for number in reversed(range(len(self.before))):
            if self.to[number] >= 0:
                continue
            for user in self.before.users[number]:
                other = self.to[user]
                if other < 0 or self.before.label[user] != self.after.label[other]:
                    continue
                position = (self.before.inputs[user] + self.before.results[user]).index(number)
                taken = self.after.inputs[other] + self.after.results[other]
                if position >= len(taken):
                    continue
                candidate = taken[position]
                same = _sided_label(self.before, number) == _sided_label(self.after, candidate)
                if self.back[candidate] < 0 and same:
                    self._join(number, candidate)
                    paired += 1
                    break
        return paired

    def _join(self, number: int, other: int) -> None:
        self.to[number] = other
        self.back[other] = number
        bodies = bodies_of(self.before.nodes[number]), bodies_of(self.after.nodes[other])
        self.regions.update(zip(*bodies, strict=False))

    def _replaced(self, graph: Dataflow, number: int) -> Hashable:
        """The key of another operator with the same inputs at the same line, as when a pass replaces an operator."""
        inputs = self._mapped_inputs(graph, number)
        known = (
            graph.nodes[number].op.startswith("call") and graph.place[number][1] and inputs and inputs[0] is not None
        )
        return (inputs, graph.place[number], self._mapped_region(graph, number)) if known else None

    def _mapped_region(self, graph: Dataflow, number: int) -> str | None:
        """The region as a path of `after`; None if its call has no counterpart yet."""
        return graph.region[number] if graph is self.after else self.regions.get(graph.region[number])

    def _mapped_inputs(self, graph: Dataflow, number: int) -> tuple[Any, ...]:
        """The inputs as numbers of `after`; `(None,)` if one has no counterpart."""
        inputs = graph.inputs[number]
        if graph is self.after:
            return inputs
        mapped = tuple(self.to[i] for i in inputs)
        return (None,) if -1 in mapped else mapped


def _colour(graph: Dataflow, number: int) -> Hashable:
    return graph.value[number], graph.use[number], graph.in_prologue[number]


def _input(graph: Dataflow, number: int) -> Hashable:
    """The key of an input of the whole graph: its label, which is Dynamo's expression for it, or its position."""
    return graph.label[number] if graph.nodes[number].op == "placeholder" and not graph.inputs[number] else None


def _sided_label(graph: Dataflow, number: int) -> Hashable:
    return graph.label[number], graph.in_prologue[number]


def _unless_operand(graph: Dataflow, number: int, evidence: Hashable) -> Hashable:
    """The operator and some evidence; None for a body's operands, which only neighbours distinguish."""
    if evidence is None or (graph.nodes[number].op == "placeholder" and graph.inputs[number]):
        return None
    return _sided_label(graph, number), evidence


def _unless_input(graph: Dataflow, number: int, evidence: Hashable) -> Hashable:
    """The operator without its constants, and some evidence; None for inputs of a graph, which are never swapped."""
    if evidence is None or graph.nodes[number].op == "placeholder":
        return None
    return graph.operator[number], graph.in_prologue[number], evidence
