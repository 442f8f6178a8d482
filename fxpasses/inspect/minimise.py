"""Reduces a recorded graph while it still fails: fewer results, and inputs in place of the nodes that compute them.

A candidate counts only if `fails` confirms it, so edits need not be correct: a broken candidate is discarded. Chunks of
nodes are tried from large to small, as in delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating
Failure-Inducing Input", 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from fxpasses.graph.calls import is_in_place
from fxpasses.inspect.model import MAIN, Graph, Node, Region, bodies_of, inputs_of


def minimise(graph: Graph, fails: Callable[[Graph], bool], suspects: Iterable[str] = ()) -> Graph:
    """The smallest graph found that still fails, with its main graph and bodies as captured.

    fails: whether a graph fails; it returns False once time is up. suspects: names of nodes of the main graph at which
    the failure may show, which are tried first as the only results. Returns `graph` itself if nothing smaller fails.
    """
    regions = [region for region in graph.captured.regions or () if not region.in_prologue]
    search = _Search(graph, regions, fails)
    for name in suspects:
        if search.try_results([{"node": name}]):
            break
    search.earlier_result()
    search.fewer_results()
    size = -1
    while size != search.size:  # one kind of edit may enable the other
        size = search.size
        search.fewer_nodes(MAIN, _as_inputs)
        for region in list(search.regions):
            search.fewer_nodes(region.path, _bypassed)
    return search.graph


class _Search:
    def __init__(self, graph: Graph, regions: list[Region], fails: Callable[[Graph], bool]) -> None:
        self.graph = graph
        self.regions = regions
        self.fails = fails
        self.tried: set[int] = set()

    @property
    def size(self) -> int:
        """The number of nodes, where inputs weigh less than operators."""
        return sum(1 if node.op == "placeholder" else 3 for region in self.regions for node in region.nodes)

    def main(self) -> Region:
        return next(region for region in self.regions if region.path == MAIN)

    def take(self, regions: list[Region]) -> bool | None:
        """Whether a candidate fails, and so becomes the graph. None if it is not smaller."""
        tried = _Search(self.graph, _pruned(regions), self.fails)
        key = hash(repr(tried.regions))
        if tried.size >= self.size:
            return None
        if key in self.tried:
            return False
        self.tried.add(key)
        stage = replace(self.graph.captured, regions=tried.regions)
        graph = replace(self.graph, stages=[stage, *self.graph.stages[1:]])
        if not self.fails(graph):
            return False
        self.graph, self.regions = graph, tried.regions
        return True

    def try_results(self, results: list[Any]) -> bool | None:
        main = self.main()
        nodes = [replace(node, args=[results]) if node.op == "output" else node for node in main.nodes]
        return self.take([replace(main, nodes=nodes) if region is main else region for region in self.regions])

    def earlier_result(self) -> None:
        """Keep one result alone, the earliest that fails, by bisection."""
        names = [node.name for node in self.main().nodes if node.op.startswith("call") and node.values]
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            gone = all(node.name != names[middle] for node in self.main().nodes)  # the failure does not need it
            # None: not smaller than the graph, so the search goes further up.
            if not gone and self.try_results([{"node": names[middle]}]) is not False:
                high = middle
            else:
                low = middle + 1

    def fewer_results(self) -> None:
        output = next((node for node in self.main().nodes if node.op == "output"), None)
        if output is None or not output.args or not isinstance(output.args[0], list):
            return
        kept = list(output.args[0])
        for chunk in _chunks(len(kept)):
            rest = [result for position, result in enumerate(kept) if position not in chunk and result is not None]
            if rest and self.try_results(rest):
                kept = [None if position in chunk else result for position, result in enumerate(kept)]

    def fewer_nodes(self, path: str, edit: Callable[[list[Node], set[str]], list[Node]]) -> None:
        names = [
            node.name
            for region in self.regions
            if region.path == path
            for node in reversed(region.nodes)  # a cut at a late node removes everything above it
            if node.op.startswith("call") and len(node.values) == 1 and not bodies_of(node)
        ]
        for chunk in _chunks(len(names)):
            chosen = {names[position] for position in chunk}
            edited = [
                replace(region, nodes=edit(region.nodes, chosen)) if region.path == path else region
                for region in self.regions
            ]
            self.take(edited)


def _chunks(count: int) -> Iterator[range]:
    """All positions, then halves, quarters, …, single ones."""
    size = count
    while size > 0:
        yield from (range(start, min(start + size, count)) for start in range(0, count, size))
        size //= 2


def _as_inputs(nodes: list[Node], chosen: set[str]) -> list[Node]:
    """Replace the chosen nodes by inputs of the graph, of the same shape and type, with memory of their own."""
    fresh = 1 + max((value.storage or 0 for node in nodes for value in node.values), default=0)
    inputs, rest = [], []
    for node in nodes:
        if node.op == "placeholder":
            inputs.append(node)
        elif node.name in chosen:
            value = replace(node.values[0], storage=fresh + len(inputs))
            inputs.append(Node(node.name, "placeholder", node.name, values=[value], source=node.source))
        else:
            rest.append(node)
    return inputs + rest


def _bypassed(nodes: list[Node], chosen: set[str]) -> list[Node]:
    """Remove the chosen nodes that have an input of their own shape and type; their users take that input."""
    kinds = {node.name: (node.values[0].shape, node.values[0].dtype) for node in nodes if len(node.values) == 1}
    instead: dict[str, str] = {}
    kept = []
    for node in nodes:
        alike = [name for name in inputs_of(node) if kinds.get(name) == kinds.get(node.name)]
        if node.name in chosen and alike:
            instead[node.name] = instead.get(alike[0], alike[0])
        else:
            kept.append(replace(node, args=_renamed(node.args, instead), kwargs=_renamed(node.kwargs, instead)))
    return kept


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if isinstance(value, dict):
        if "node" in value:
            return {"node": names.get(value["node"], value["node"])}
        return {key: _renamed(item, names) for key, item in value.items()}
    return value


# Dead code


def _pruned(regions: list[Region]) -> list[Region]:
    """Remove dead nodes, outer regions first: a body goes with its call, an operand with its last use."""
    found = {region.path: region for region in regions}
    while True:
        before = sum(len(region.nodes) for region in found.values())
        for path in sorted(found, key=lambda path: path.count("/")):
            region = found[path]
            parent = found.get(region.parent)
            if region.call and (parent is None or all(node.name != region.call for node in parent.nodes)):
                del found[path]
                continue
            live = _live(region.nodes)
            nodes = [n for n in region.nodes if n.name in live or (n.op == "placeholder" and region.call)]
            found[path] = replace(region, nodes=nodes)
            if parent is not None and region.call:
                _drop_operands(found, found[path], parent, live)
        if before == sum(len(region.nodes) for region in found.values()):
            return list(found.values())


def _drop_operands(found: dict[str, Region], region: Region, parent: Region, live: set[str]) -> None:
    """Remove a body's unused placeholders, and the call's operands, where these correspond one to one."""
    call = next(node for node in parent.nodes if node.name == region.call)
    given = [node for node in region.nodes if node.op == "placeholder"]
    bodies = bodies_of(call)
    if len(call.args) != len(given) + 1 or len(bodies) != 1 or call.args[0] != {"body": region.path}:
        return
    dropped = {position for position, node in enumerate(given) if node.name not in live}
    args = [argument for position, argument in enumerate(call.args, start=-1) if position not in dropped]
    names = {given[position].name for position in dropped}
    found[region.path] = replace(region, nodes=[node for node in region.nodes if node.name not in names])
    nodes = [replace(node, args=args) if node is call else node for node in parent.nodes]
    found[parent.path] = replace(parent, nodes=nodes)


def _live(nodes: list[Node]) -> set[str]:
    """The nodes that results need, the nodes that write to their memory, and assertions on live numbers."""
    by_name = {node.name: node for node in nodes}
    live: set[str] = set()

    def need(name: str) -> None:
        waiting = [name]
        while waiting:
            node = by_name.get(waiting.pop())
            if node is not None and node.name not in live:
                live.add(node.name)
                waiting += inputs_of(node)

    for node in nodes:
        taken = inputs_of(node)
        if node.op == "output" or (node.op.startswith("call") and not taken and not node.values and not node.scalar):
            need(node.name)  # such as `_set_grad_enabled(False)`
    size = -1
    while size != len(live):
        size = len(live)
        memory = {value.storage for name in live for value in by_name[name].values} - {None}
        for node in nodes:
            writes = node.op.startswith("call") and is_in_place(node.short_target)
            written = by_name.get(next(iter(inputs_of(node)), "")) if writes else None
            if written is not None and memory & {value.storage for value in written.values}:
                need(node.name)
    for node in nodes:
        if node.is_assertion and live.issuperset(_checked(node, by_name)):
            need(node.name)
    return live


def _checked(node: Node, by_name: dict[str, Node]) -> Iterator[str]:
    """The nodes whose numbers an assertion checks."""
    for name in inputs_of(node):
        taken = by_name.get(name)
        if taken is None or taken.values or taken.binds or taken.op == "placeholder":
            yield name
        else:
            yield from _checked(taken, by_name)
