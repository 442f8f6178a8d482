"""Level 1: E queries of one routing become one sort by expert, one copy of the counts to the host, and slices.

    tok_0, slot_0 = torch.where(idx == 0)      in_order, order = torch.sort(idx.flatten(), stable=True)
    ... (a program of expert 0)                counts = torch.diff(searchsorted(in_order, arange(E), right=True), ...)
    tok_1, slot_1 = torch.where(idx == 1)      sizes = counts.to("cpu");  u0 = sizes[0].item();  u1 = ...
    ... (another program)                      tok_0, tok_1, _ = torch.split(order // k, [u0, u1, N - u0 - u1])

The branches stay as they are, whatever they do. Each slice holds what the query gave, in the same order, because the
sort is stable. A size is read by an `item` that binds the symbol which the query bound, so that nothing else in the
graph has to change. Queries belong together where they ask the same routing (`experts/selection.py`); no common end is
needed.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from fxpasses.graph.aliases import AliasAnalysis
from fxpasses.graph.building import NodeBuilder, erase_unused
from fxpasses.graph.calls import argument, operator_of
from fxpasses.graph.provenance import where
from fxpasses.graph.reachability import reached
from fxpasses.graph.refusals import NotProved, Refused
from fxpasses.graph.routing import Routing
from fxpasses.graph.routing_facts import Columns, Mask
from fxpasses.graph.symbols import declare_equal
from fxpasses.passes.experts.describe import described, query_in_words
from fxpasses.passes.experts.loops import Loop, has_rows
from fxpasses.passes.experts.selection import is_spread, read
from fxpasses.passes.experts.sorting import coordinates, passed, sort_by_branch
from fxpasses.pipeline import Context
from fxpasses.report import Reason, Refusal

_WRITE_BY_KEY = ("setitem", "index_put_", "index_put")


@dataclass(frozen=True)
class Query:
    """One data-dependent question: `node` asks where `mask` is true.

    meaning: what the mask stands for. spread: `masked_select` of whole rows, which lays them end to end.
    """

    node: Node
    mask: Node
    meaning: Mask
    spread: bool = False


@dataclass(frozen=True)
class Sliced:
    """Queries of one routing. queries: in the order of the graph. experts: how many they are of, without repetition."""

    queries: tuple[Query, ...]
    experts: int


def mask_asked_by(node: Node) -> Node | None:
    """The mask whose true places a node looks for, if it does."""
    if node.op not in ("call_function", "call_method") or not node.args:
        return None
    name, source = operator_of(node), node.args[0]
    if name == "where" and len(node.args) == 1 and not node.kwargs and isinstance(source, Node):
        return source
    if name == "nonzero" and isinstance(source, Node):
        return source
    if name == "masked_select" and len(node.args) == 2 and isinstance(source, Node):
        mask: Any = node.args[1]
        same = isinstance(mask, Node) and mask.meta["example_value"].ndim == source.meta["example_value"].ndim
        return mask if same else None
    key: Any = None
    rows: Any = node if name == "getitem" else node.args[2] if name in _WRITE_BY_KEY and len(node.args) > 2 else None
    if isinstance(rows, Node) and has_rows(rows):
        key = node.args[1]
    masks = [part for part in (key if isinstance(key, (tuple, list)) else (key,)) if _is_mask(part)]
    return masks[0] if len(masks) == 1 else None


def find_queries(graph: torch.fx.Graph, routing: Routing) -> Iterator[Query | Refusal]:
    """All queries, or why one is not understood."""
    for node in graph.nodes:
        mask = mask_asked_by(node)
        if mask is not None:
            try:
                spread = operator_of(node) == "masked_select" and is_spread(node.args[0], mask)
                query = Query(node, mask, read(routing, mask, spread), spread)
                if query.meaning.flat:
                    raise NotProved("a mask laid flat", mask)
                yield query
            except Refused as refused:
                yield Refusal(node.name, Reason.QUERIES_DIFFER, refused.text, where(node))


def by_routing(queries: list[Query]) -> list[Sliced]:
    """Queries that one sort answers, where they are of two experts or more."""
    groups: defaultdict[Any, list[Query]] = defaultdict(list)
    for query in queries:
        groups[query.meaning.ids, query.meaning.axes].append(query)
    found = [Sliced(tuple(group), len({query.meaning.expert for query in group})) for group in groups.values()]
    return [sliced for sliced in found if sliced.experts > 1]


@dataclass
class Outcome:
    """changes: what was done with each routing, in words. refusals: why not, for the others."""

    changes: list[str]
    refusals: list[Refusal]


def slice_queries(
    graph: torch.fx.Graph, memory: AliasAnalysis, context: Context, left: list[tuple[Loop, Refusal]], reason: str
) -> Outcome:
    """Rewrite all queries of a graph that belong together.

    left: loops that are no grouped programs, and why. Those whose queries are rewritten are taken out; the reason goes
    into the words, or else the given one.
    """
    routing, outcome = Routing(memory.is_constant), Outcome([], [])
    found = list(find_queries(graph, routing))
    understood = [query for query in found if isinstance(query, Query)]
    unknown = [query for query in found if isinstance(query, Refusal)]
    for sliced in by_routing(understood):
        first, place = sliced.queries[0].node, where(sliced.queries[0].node)
        words = f"{query_in_words(first)} ×{len(sliced.queries)} at {place}"
        ids = sliced.queries[0].meaning.ids
        experts = described(sliced.experts, routing.choice(ids).top if isinstance(ids, Node) else None)
        loops = [pair for pair in left if _leads_to(sliced.queries, {merge.node for merge in pair[0].merges})]
        if not context.may_change(first):
            outcome.refusals.append(Refused(Reason.LEFT_OUT).of(first))
            continue
        try:
            Slicing(sliced, routing, memory, context.fake_mode).run()
        except Refused as refused:
            outcome.refusals.append(refused.of(first, Reason.QUERIES_DIFFER))
            continue
        why = next((refusal.text for _, refusal in loops), reason)
        outcome.changes.append(f"{words} → level 1, one sort and slices ({experts}); not grouped: {why}")
        left[:] = [pair for pair in left if pair not in loops]
    if len(unknown) > 1:
        outcome.refusals.append(replace(unknown[0], text=f"{unknown[0].text} (×{len(unknown)})"))
    outcome.refusals += _cut_without_a_query(graph)
    return outcome


def _cut_without_a_query(graph: torch.fx.Graph) -> list[Refusal]:
    """Loops over tokens that lie sorted: what they ask the router is how many tokens each expert has."""
    reads: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_method", target="item"):
        element = node.args[0]
        if operator_of(element) == "getitem" and isinstance(element.args[0], Node) and type(element.args[1]) is int:
            reads[element.args[0]].append(node)
    return [
        Refusal(
            nodes[0].name, Reason.NOT_ALIKE, f"tokens are cut by ×{len(nodes)} counts, not asked for", where(counts)
        )
        for counts, nodes in reads.items()
        if len(nodes) > 1 and operator_of(counts) != "to"
        if any(operator_of(node) == "topk" for node in reached([counts], lambda node: node.all_input_nodes))
    ]


def _leads_to(queries: tuple[Query, ...], ends: set[Node]) -> bool:
    """Whether what the queries found reaches one of the ends."""
    return any(node in ends for node in reached([query.node for query in queries], lambda node: node.users))


class Slicing:
    """One routing's queries: check everything, then write the sort before the first, and slices in place of all."""

    def __init__(self, sliced: Sliced, routing: Routing, memory: AliasAnalysis, fake_mode: Any) -> None:
        """Raises `NotProved` where the sort would not give what the queries give."""
        self.queries = sliced.queries
        self.graph = self.queries[0].node.graph
        self.routing, self.memory, self.fake_mode = routing, memory, fake_mode
        last = self.queries[-1].node
        ids = self.queries[0].meaning.ids
        self.source = ids.matrix if isinstance(ids, Columns) else ids
        # The sort reads the routing when the first query is asked, the masks may have been made before that.
        first = min(map(self._first_look, self.queries), key=memory.positions.__getitem__)
        written = memory.writer(self.source, first, last)
        if written is not None:
            raise NotProved(f"`{written.name}` writes to the routing between the queries", written)
        self._check_users()
        self.sizes = {query.meaning.expert: self._size_of(query.meaning.expert) for query in self.queries}

    def _first_look(self, query: Query) -> Node:
        """The node of a mask's making that looks at the routing."""
        rests_on = query.meaning.evidence
        looks = [n for n in rests_on if self.source in map(self.routing.canonical, n.all_input_nodes)]
        return min(looks, default=query.mask)

    def _check_users(self) -> None:
        """Nobody else may ask the same masks: a query and one that repeats it know their size as one symbol."""
        own = {query.node for query in self.queries}
        for query in self.queries:
            for user in query.mask.users:
                if user not in own and has_rows(user):
                    raise NotProved(f"`{user.name}` asks the mask in a way that is not known", user)
            name = operator_of(query.node)
            if name == "where" or (name == "nonzero" and argument(query.node, "as_tuple")):
                for user in query.node.users:
                    if user.target is not operator.getitem or type(user.args[1]) is not int:
                        raise NotProved(f"`{user.name}` takes what a query found as a whole", user)

    def _size_of(self, expert: int) -> tuple[Any, Any]:
        """(symbol, number) of an expert's tokens, as its first query binds it."""
        for query in self.queries:
            bindings = query.node.meta.get("unbacked_bindings")
            if query.meaning.expert == expert and bindings and not query.spread:
                if len(bindings) > 1:
                    raise NotProved("a query that binds several sizes", query.node)
                symbol, path = next(iter(bindings.items()))
                number = pytree.key_get(query.node.meta["example_value"], path)
                if isinstance(number, torch.SymInt):
                    return symbol, number
        raise NotProved(f"the number of tokens of expert {expert} is not known from a query", self.queries[0].node)

    # Rewriting

    def run(self) -> None:
        """Rewrite; raises `Refused`, and leaves the graph as it was."""
        emit = NodeBuilder(self.graph, self.fake_mode, self.queries[0].node)
        try:
            with self.graph.inserting_before(self.queries[0].node):
                parts = self._sort(emit)
            made = {query: self._answer(emit, query, parts) for query in self.queries}
        except Refused:
            emit.undo()
            raise
        for query, answer in made.items():
            self._declare_equal(query)
            self._put(query, answer)
        erase_unused((query.mask for query in self.queries), self._is_pure_call)

    def _sort(self, emit: NodeBuilder) -> list[dict[int, Node]]:
        """For each coordinate of a pair, the slice of each expert."""
        meaning = self.queries[0].meaning
        experts = sorted(self.sizes)
        lowest, count = experts[0], experts[-1] - experts[0] + 1
        if count > 2 * len(experts) + 64:
            raise NotProved(
                f"the experts asked for lie far apart, from {lowest} to {experts[-1]}", self.queries[0].node
            )
        missing = [expert for expert in range(lowest, lowest + count) if expert not in self.sizes]
        choices = None if isinstance(meaning.ids, Columns) else self.routing.choice(meaning.ids).choices
        ids = self._ids(emit)
        flat, in_order, places = sort_by_branch(
            emit,
            ids,
            meaning.axes,
            (lowest, 1, count),
            missing,
            covers=choices == count and lowest == 0 and not missing,
        )
        example = flat.meta["example_value"]
        wanted = emit(torch.arange, (count,), {"device": example.device, "dtype": example.dtype})
        ends = emit(torch.searchsorted, (in_order, wanted), {"right": True})
        counts = emit(torch.diff, (ends,), {"prepend": emit("new_zeros", (ends, 1))})
        host = emit("to", (counts, "cpu"))
        reads = []
        for expert in experts:
            symbol, number = self.sizes[expert]
            reads.append(emit.read(emit(operator.getitem, (host, expert - lowest)), number, symbol))
        rows = example.shape[0]
        total = rows if isinstance(rows, int) else emit(torch.ops.aten.sym_size.int, (flat, 0))
        rest = emit(operator.sub, (total, emit(torch.sym_sum, (reads,))))
        parts = []
        for coordinate in coordinates(emit, ids, meaning.axes, places)[: max(q.meaning.dims for q in self.queries)]:
            split = emit(torch.split, (coordinate, [*reads, rest]))
            parts.append({expert: emit(operator.getitem, (split, i)) for i, expert in enumerate(experts)})
        return parts

    def _ids(self, emit: NodeBuilder) -> Node:
        """The expert of each pair; of columns, the column's number where it passes the tests."""
        ids = self.queries[0].meaning.ids
        if not isinstance(ids, Columns):
            return ids
        chosen, example = passed(emit, ids, ids.matrix), ids.matrix.meta["example_value"]
        experts = example.shape[ids.dim]
        if not isinstance(experts, int):
            raise NotProved("a matrix of an unknown number of experts", ids.matrix)
        shape = [experts if dim == ids.dim else 1 for dim in range(example.ndim)]
        numbers = emit("reshape", (emit(torch.arange, (experts,), {"device": example.device}), shape))
        return emit(torch.where, (chosen, numbers, experts))

    def _answer(self, emit: NodeBuilder, query: Query, parts: list[dict[int, Node]]) -> Any:
        """What stands for the query: a tuple of coordinates, a matrix of them, or the arguments with another key."""
        found = tuple(part[query.meaning.expert] for part in parts[: query.meaning.dims])
        name, node = operator_of(query.node), query.node
        with self.graph.inserting_before(node):
            if name == "nonzero" and not argument(node, "as_tuple"):
                return emit(torch.stack, (list(found), 1))
            if name == "masked_select":
                rows = emit(operator.getitem, (node.args[0], found))
                return emit("reshape", (rows, -1)) if query.spread else rows
            if name in ("where", "nonzero"):
                # The query gave new memory, which the program may write to or give away.
                return tuple(emit("clone", (part,)) for part in found) if self._is_shared(node) else found
        key = node.args[1]
        if not isinstance(key, (tuple, list)):
            return found[0] if len(found) == 1 else found
        return type(key)(item for part in key for item in (found if part is query.mask else (part,)))

    def _is_shared(self, node: Node) -> bool:
        """Whether the program writes to what a query found, or gives it away."""
        gives_away = any(user.op == "output" for user in self.memory.users(node, node, None))
        return gives_away or not self.memory.is_constant(node)

    def _is_pure_call(self, node: Node) -> bool:
        return node.op in ("call_function", "call_method") and self.memory.is_pure(node)

    def _declare_equal(self, query: Query) -> None:
        symbol, number = self.sizes[query.meaning.expert]
        bindings = query.node.meta.pop("unbacked_bindings", None) or {}
        for bound, path in bindings.items():
            if bound != symbol and not query.spread:
                declare_equal(number, pytree.key_get(query.node.meta["example_value"], path))

    def _put(self, query: Query, answer: Any) -> None:
        node, name = query.node, operator_of(query.node)
        if name == "getitem" or name in _WRITE_BY_KEY:
            node.args = (node.args[0], answer, *node.args[2:])
        elif isinstance(answer, Node):
            node.replace_all_uses_with(answer)
            self.graph.erase_node(node)
        else:
            for user in list(node.users):
                user.replace_all_uses_with(answer[user.args[1]])
                self.graph.erase_node(user)
            self.graph.erase_node(node)


def _is_mask(part: Any) -> bool:
    example = part.meta.get("example_value") if isinstance(part, Node) else None
    return isinstance(example, torch.Tensor) and example.dtype is torch.bool and example.ndim > 0
