"""Level 1: E queries of one routing become one sort by expert, one copy of the counts to the host, and slices.

    tok_0, slot_0 = torch.where(idx == 0)      in_order, order = torch.sort(idx.flatten(), stable=True)
    ... (a program of expert 0)                counts = torch.diff(searchsorted(in_order, arange(E), right=True), ...)
    tok_1, slot_1 = torch.where(idx == 1)      sizes = counts.to("cpu");  u0 = sizes[0].item();  u1 = ...
    ... (another program)                      tok_0, tok_1, _ = torch.split(order // k, [u0, u1, N - u0 - u1])

The branches stay unchanged, whatever they compute. Each slice holds the query's result in its order, because the sort
is stable. An `item` reads each size and binds the symbol that the query bound, so nothing else in the graph changes.
Queries of one routing (`experts/selection.py`) belong together; they need no common end.
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

from fxpasses.experts.describe import describe_query, describe_routing
from fxpasses.experts.loops import Loop, has_rows
from fxpasses.experts.routing import Routing
from fxpasses.experts.routing_facts import Columns, Mask
from fxpasses.experts.selection import is_spread, mask_fact
from fxpasses.experts.sorting import coordinates, passed, sort_by_branch
from fxpasses.graph.aliases import AliasAnalysis
from fxpasses.graph.building import NodeBuilder, erase_unused
from fxpasses.graph.calls import argument, operator_of
from fxpasses.graph.provenance import where
from fxpasses.graph.reachability import reached
from fxpasses.graph.refusals import NotProved, Refused
from fxpasses.graph.symbols import declare_equal
from fxpasses.passes.pipeline import Context
from fxpasses.report import Reason, Refusal

_WRITE_BY_KEY = ("setitem", "index_put_", "index_put")


@dataclass(frozen=True)
class Query:
    """`node` finds where `mask` is true. spread: `masked_select` of whole rows, which lays them end to end."""

    node: Node
    mask: Node
    fact: Mask
    spread: bool = False

    @property
    def name(self) -> str:
        return operator_of(self.node)


def mask_of_query(node: Node) -> Node | None:
    """The mask whose true places a node finds, or writes to; None for a node that is not a query."""
    if node.op not in ("call_function", "call_method") or not node.args:
        return None
    name, source = operator_of(node), node.args[0]
    is_where = name == "where" and len(node.args) == 1 and not node.kwargs
    if isinstance(source, Node) and (is_where or name == "nonzero"):
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
    """All queries, or the reason why the routing of one is not known."""
    for node in graph.nodes:
        mask = mask_of_query(node)
        if mask is not None:
            try:
                spread = operator_of(node) == "masked_select" and is_spread(node.args[0], mask)
                query = Query(node, mask, mask_fact(routing, mask, spread), spread)
                if query.fact.flat:
                    raise NotProved("a flattened mask", mask)
                yield query
            except Refused as refused:
                if _may_be_a_choice(mask):
                    yield Refusal(node.name, Reason.QUERIES_DIFFER, refused.text, where(node))


def _may_be_a_choice(mask: Node) -> bool:
    """Whether a router may have made a mask: it depends on floating-point inputs or parameters.

    Dense models also query masks, such as the padding in each layer, which depend on the batch alone.
    """
    sources = (node for node in reached([mask], lambda node: node.all_input_nodes) if not node.all_input_nodes)
    examples = (node.meta.get("example_value") for node in sources if node.op in ("placeholder", "get_attr"))
    return any(isinstance(example, torch.Tensor) and example.is_floating_point() for example in examples)


def by_routing(queries: list[Query]) -> list[list[Query]]:
    """Queries that one sort serves, for two experts or more, in the order of the graph."""
    groups: defaultdict[Any, list[Query]] = defaultdict(list)
    for query in queries:
        groups[query.fact.ids, query.fact.axes].append(query)
    return [group for group in groups.values() if len({query.fact.expert for query in group}) > 1]


def slice_queries(
    graph: torch.fx.Graph, memory: AliasAnalysis, context: Context, left: list[tuple[Loop, Refusal]], reason: str
) -> tuple[list[str], list[Refusal]]:
    """Rewrite all queries of a graph that belong together; returns the changes, and the refusals for other routings.

    left: loops that were not grouped, and why. Loops whose queries are rewritten are removed from it; the change names
    their reason, or else the given one.
    """
    routing = Routing(memory.is_constant)
    changes: list[str] = []
    refusals: list[Refusal] = []
    found = list(find_queries(graph, routing))
    unknown = [query for query in found if isinstance(query, Refusal)]
    for queries in by_routing([query for query in found if isinstance(query, Query)]):
        first, ids = queries[0].node, queries[0].fact.ids
        spelling = f"{describe_query(first)} ×{len(queries)} at {where(first)}"
        descendants = reached([query.node for query in queries], lambda node: node.users)
        loops = [pair for pair in left if any(merge.node in descendants for merge in pair[0].merges)]
        if not context.may_change(first):
            refusals.append(Refused(Reason.LEFT_OUT).of(first))
            continue
        try:
            slicing = Slicing(queries, routing, memory, context.fake_mode)
            slicing.run()
        except Refused as refused:
            refusals.append(refused.of(first, Reason.QUERIES_DIFFER))
            continue
        experts = describe_routing(len(slicing.sizes), routing.choice(ids).top if isinstance(ids, Node) else None)
        why = next((refusal.text for _, refusal in loops), reason)
        changes.append(f"{spelling} → level 1, one sort and slices ({experts}); not grouped: {why}")
        left[:] = [pair for pair in left if pair not in loops]
    if len(unknown) > 1:
        refusals.append(replace(unknown[0], text=f"{unknown[0].text} (×{len(unknown)})"))
    return changes, refusals + _cuts_without_query(graph)


def _cuts_without_query(graph: torch.fx.Graph) -> list[Refusal]:
    """Loops over sorted tokens, which read only the number of tokens of each expert."""
    reads: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_method", target="item"):
        element = node.args[0]
        if operator_of(element) == "getitem" and isinstance(element.args[0], Node) and type(element.args[1]) is int:
            reads[element.args[0]].append(node)
    return [
        Refusal(
            nodes[0].name, Reason.NOT_ALIKE, f"tokens are cut by ×{len(nodes)} counts, without a query", where(counts)
        )
        for counts, nodes in reads.items()
        if len(nodes) > 1 and operator_of(counts) != "to"
        if any(operator_of(node) == "topk" for node in reached([counts], lambda node: node.all_input_nodes))
    ]


class Slicing:
    """One routing's queries: check legality, then insert the sort before the first, and replace all by slices."""

    def __init__(self, queries: list[Query], routing: Routing, memory: AliasAnalysis, fake_mode: Any) -> None:
        """Raises `NotProved` if the sort may give other results than the queries."""
        self.queries, self.routing, self.memory = queries, routing, memory
        self.graph = queries[0].node.graph
        self.emit = NodeBuilder(self.graph, fake_mode, queries[0].node)
        ids = queries[0].fact.ids
        self.source = ids.matrix if isinstance(ids, Columns) else ids
        # The sort reads the routing at the first query, but the masks may have read it before.
        first = min(map(self._first_read, queries), key=memory.positions.__getitem__)
        written = memory.writer(self.source, first, queries[-1].node)
        if written is not None:
            raise NotProved(f"`{written.name}` writes to the routing between the queries", written)
        self._check_users()
        self.sizes = {query.fact.expert: self._size_of(query.fact.expert) for query in queries}

    def _first_read(self, query: Query) -> Node:
        """The node at which a mask is computed from the routing."""
        evidence = query.fact.evidence
        reads = [n for n in evidence if self.source in map(self.routing.canonical, n.all_input_nodes)]
        return min(reads, default=query.mask)

    def _check_users(self) -> None:
        """Raise `NotProved` if another node queries the masks: its size would have the query's symbol."""
        own = {query.node for query in self.queries}
        for query in self.queries:
            for user in query.mask.users:
                if user not in own and has_rows(user):
                    raise NotProved(f"`{user.name}` uses the mask in a way that is not known", user)
            if query.name == "where" or (query.name == "nonzero" and argument(query.node, "as_tuple")):
                for user in query.node.users:
                    if user.target is not operator.getitem or type(user.args[1]) is not int:
                        raise NotProved(f"`{user.name}` uses the tuple that a query returns", user)

    def _size_of(self, expert: int) -> tuple[Any, Any]:
        """(symbol, number) of an expert's tokens, as its first query binds them."""
        for query in self.queries:
            bindings = query.node.meta.get("unbacked_bindings")
            if query.fact.expert == expert and bindings and not query.spread:
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
        with self.emit.before(self.queries[0].node):
            parts = self._sort()
            answers = {query: self._answer(query, parts) for query in self.queries}
        for query, answer in answers.items():
            self._declare_equal(query)
            self._replace(query, answer)
        is_pure = self.memory.is_pure
        erase_unused((query.mask for query in self.queries), lambda node: node.op.startswith("call") and is_pure(node))

    def _sort(self) -> list[dict[int, Node]]:
        """For each coordinate of a pair, the slice of each expert."""
        emit, fact = self.emit, self.queries[0].fact
        experts = sorted(self.sizes)
        lowest, count = experts[0], experts[-1] - experts[0] + 1
        if count > 2 * len(experts) + 64:
            raise NotProved(f"the ids of the experts lie far apart: {lowest} to {experts[-1]}", self.queries[0].node)
        missing = [expert for expert in range(lowest, lowest + count) if expert not in self.sizes]
        choices = None if isinstance(fact.ids, Columns) else self.routing.choice(fact.ids).choices
        covers = choices == count and lowest == 0 and not missing
        ids = self._ids()
        flat, in_order, places = sort_by_branch(emit, ids, fact.axes, (lowest, 1, count), missing, covers)
        example = flat.meta["example_value"]
        wanted = emit(torch.arange, (count,), {"device": example.device, "dtype": example.dtype})
        ends = emit(torch.searchsorted, (in_order, wanted), {"right": True})
        counts = emit(torch.diff, (ends,), {"prepend": emit("new_zeros", (ends, 1))})
        host = emit("to", (counts, "cpu"))
        reads = []
        for expert in experts:
            symbol, number = self.sizes[expert]
            reads.append(emit.read(emit(operator.getitem, (host, expert - lowest)), number, symbol))
        rest = emit(operator.sub, (emit.size(flat, 0), emit(torch.sym_sum, (reads,))))
        parts = []
        for coordinate in coordinates(emit, ids, fact.axes, places)[: max(q.fact.dims for q in self.queries)]:
            split = emit(torch.split, (coordinate, [*reads, rest]))
            parts.append({expert: emit(operator.getitem, (split, i)) for i, expert in enumerate(experts)})
        return parts

    def _ids(self) -> Node:
        """The expert of each pair; of columns, the number of the column where its element passes the tests."""
        emit, ids = self.emit, self.queries[0].fact.ids
        if not isinstance(ids, Columns):
            return ids
        chosen, example = passed(emit, ids, ids.matrix), ids.matrix.meta["example_value"]
        experts = example.shape[ids.dim]
        if not isinstance(experts, int):
            raise NotProved("a matrix of an unknown number of experts", ids.matrix)
        shape = [experts if dim == ids.dim else 1 for dim in range(example.ndim)]
        numbers = emit("reshape", (emit(torch.arange, (experts,), {"device": example.device}), shape))
        return emit(torch.where, (chosen, numbers, experts))

    def _answer(self, query: Query, parts: list[dict[int, Node]]) -> Any:
        """The replacement of a query: its result, a tuple of coordinates, or the key of an index."""
        emit, name, node = self.emit, query.name, query.node
        found = tuple(part[query.fact.expert] for part in parts[: query.fact.dims])
        with self.graph.inserting_before(node):
            if name == "nonzero" and not argument(node, "as_tuple"):
                return emit(torch.stack, (list(found), 1))
            if name == "masked_select":
                rows = emit(operator.getitem, (node.args[0], found))
                return emit("reshape", (rows, -1)) if query.spread else rows
            if name in ("where", "nonzero"):
                # The query allocated its result, which the program may write to or return.
                escapes = any(user.op == "output" for user in self.memory.users(node, node, None))
                is_own = not escapes and self.memory.is_constant(node)
                return found if is_own else tuple(emit("clone", (part,)) for part in found)
        key = node.args[1]
        if not isinstance(key, (tuple, list)):
            return found[0] if len(found) == 1 else found
        return type(key)(item for part in key for item in (found if part is query.mask else (part,)))

    def _declare_equal(self, query: Query) -> None:
        symbol, number = self.sizes[query.fact.expert]
        bindings = query.node.meta.pop("unbacked_bindings", None) or {}
        for bound, path in bindings.items():
            if bound != symbol and not query.spread:
                declare_equal(number, pytree.key_get(query.node.meta["example_value"], path))

    def _replace(self, query: Query, answer: Any) -> None:
        node = query.node
        if query.name == "getitem" or query.name in _WRITE_BY_KEY:
            node.args = (node.args[0], answer, *node.args[2:])
            return
        if isinstance(answer, Node):
            node.replace_all_uses_with(answer)
        for user in list(node.users):
            user.replace_all_uses_with(answer[user.args[1]])
            self.graph.erase_node(user)
        self.graph.erase_node(node)


def _is_mask(part: Any) -> bool:
    example = part.meta.get("example_value") if isinstance(part, Node) else None
    return isinstance(example, torch.Tensor) and example.dtype is torch.bool and example.ndim > 0
