"""Prove that a loop over experts may go through experts without tokens, which the program passes over.

Three things discharge a `SpeculatedBranch` (`graph/speculation.py`): the program passes over an expert only if it has
no pair; all that the branch does is to merge the rows of that expert's pairs; and what variables hold after it is what
they held before, up to the merge. A merge of no rows changes nothing, in all kinds of loops that are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpasses.graph import effects
from fxpasses.graph.aliases import written_operands
from fxpasses.graph.calls import operator_of
from fxpasses.graph.refusals import NotProved, Refused
from fxpasses.graph.routing import Routing
from fxpasses.graph.routing_facts import Counts, Ends, Hits
from fxpasses.graph.routing_transfer import CASTS, RESHAPES
from fxpasses.graph.speculation import AFTER, BEFORE, CONDITION, INSIDE, PART, READ, Marked, SpeculatedBranch, marks
from fxpasses.graph.symbols import is_symbolic
from fxpasses.passes.experts.assertions import Sizes
from fxpasses.passes.experts.loops import Loop, Merge, has_rows
from fxpasses.passes.experts.row_partition import Cut
from fxpasses.passes.experts.selection import Selection

_COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne", "sym_not"})
_NUMBERS = _COMPARISONS | {"add", "sub", "sym_sum", "sym_size"}
# Operators that fail for no tensors of known sizes; and those that ask for an expert's tokens, and for their number.
_HARMLESS = _COMPARISONS | {*CASTS, *RESHAPES, "getitem", "select"}
_QUERIES = frozenset({"where", "nonzero", "getitem", "sym_size", "size", "numel", "len", "getattr"})


@dataclass(frozen=True)
class Proof:
    """skips: the numbers of those that a grouped loop makes superfluous. conditions: the nodes that only they ask."""

    skips: frozenset[int]
    conditions: frozenset[Node]


def prove(
    graph: Graph,
    skips: dict[int, SpeculatedBranch],
    loop: Loop,
    own: set[Node],
    routing: Routing,
    selected: Selection | Cut | None,
    fake_mode: Any,
) -> Proof:
    """own: the loop's nodes, ends included, which the pass has checked. selected: its rows. Raises `NotProved`."""
    if not skips or selected is None:
        return Proof(frozenset(), frozenset())
    numbers = {number for node in own for number, role in marks(node) if role == INSIDE}
    places = Marked(graph)
    conditions: set[Node] = set()
    for number in sorted(numbers):
        skip = skips[number]
        branches = [place for place, merge in enumerate(loop.merges) if _is_end(merge, skip)]
        if not skip.ended or len(branches) != 1 or bool(skip.parts) != (loop.kind == "cat"):
            raise NotProved(f"what runs only with tokens, at {skip.where}, does more than to merge one expert's rows")
        condition, ids = _condition_of(places, skip, branches[0], routing, selected)
        until = max(places.position[merge.node] for merge in loop.merges)
        _check_not_written(places, routing, ids, condition, until)
        conditions.add(condition)
        _check_body(places, skip, own, fake_mode)
        if skip.parts:
            _check_joined(loop, selected)
        _check_pairs(places, skip, loop, branches[0])
    return Proof(frozenset(numbers), frozenset(conditions))


def prove_idle(graph: Graph, skips: dict[int, SpeculatedBranch], fake_mode: Any, discharged: set[int]) -> None:
    """Discharge skips whose bodies compute what nobody uses: `if e == padding: continue` in a loop over experts."""
    places = Marked(graph)
    for skip in skips.values():
        if skip.number in discharged or not skip.ended or skip.live_outs or not places.all(skip.number, INSIDE):
            continue
        try:
            _check_body(places, skip, set(), fake_mode)
        except NotProved:
            continue
        discharged.add(skip.number)


def prove_numbers(graphs: Iterable[Graph], skips: dict[int, SpeculatedBranch]) -> Iterable[int]:
    """Prove of numbers from NumPy's arrays that they may be Python's: nothing in the graphs reads them any more."""
    read = {number for graph in graphs for node in graph.nodes for number, role in marks(node) if role == READ}
    return [s.number for s in skips.values() if s.kind == "numbers" and s.ended and s.number not in read]


def erase_answers(graph: Graph) -> None:
    """Erase the questions that were answered while tracing, `count > 0`, which Dynamo leaves in a checkpoint's body."""
    for node in reversed(graph.nodes):
        is_number = is_symbolic(node.meta.get("example_value")) and operator_of(node) in _NUMBERS
        if is_number and not node.users and node.op == "call_function":
            graph.erase_node(node)


def erase_unused(graph: Graph, nodes: Iterable[Node], assertions_on: Callable[[set[Node]], set[Node]]) -> None:
    """Erase those of the nodes that only assertions of their sizes look at, and what only led to them."""
    waiting, erased = list(nodes), set()

    def erase(node: Node) -> None:
        waiting.extend(node.all_input_nodes)
        erased.add(node)
        graph.erase_node(node)

    while waiting:
        node = waiting.pop()
        if node in erased or not _is_removable(node):
            continue
        for part in (*node.users, node):  # another query of the same mask is a user that only assertions look at
            about = assertions_on({part}) if part.users else set()
            if part not in erased and _is_removable(part) and set(part.users) <= about:
                for other in [n for n in reversed(graph.nodes) if n in about]:
                    erase(other)
                erase(part)


def _is_removable(node: Node) -> bool:
    return node.op.startswith("call") and not written_operands(node) and not node.is_impure()


def _condition_of(
    places: Marked, skip: SpeculatedBranch, branch: int, routing: Routing, selected: Selection | Cut
) -> tuple[Node, Node]:
    """What the program asks, and the ids that it asks about; the body is passed over only if the branch has no rows."""
    node = places.first(skip.number, CONDITION)
    asked = _asked_in(skip, node, routing) if node is not None else None
    if node is None or asked is None:
        raise NotProved(f"what the program asks at {skip.where} is not known to be whether the expert has tokens")
    ids, expert = asked
    if _rows_of(selected, branch, routing) != (routing.source(ids), expert):
        raise NotProved(f"the program asks at {skip.where} for the tokens of another expert", node)
    return node, routing.source(ids)


def _asked_in(skip: SpeculatedBranch, node: Node, routing: Routing) -> tuple[Node, int] | None:
    """(ids, e) of a condition that holds if and only if expert e is among the ids."""
    fact = routing.of(node)
    if skip.kind == "hit":
        return (fact.ids, skip.index) if isinstance(fact, Hits) else None
    if skip.kind == "end":
        return (fact.ids, skip.index) if isinstance(fact, Ends) else None
    presence, truth = routing.presence(node), skip.truth if skip.kind == "tensor" else True
    return (presence.ids, presence.expert) if presence is not None and presence.present is truth else None


def _rows_of(selected: Selection | Cut, branch: int, routing: Routing) -> tuple[Node, int] | None:
    """(ids, e) of a branch's rows."""
    if isinstance(selected, Selection):
        return routing.source(selected.ids), selected.first + selected.step * branch
    fact = routing.of(selected.counts)
    return (routing.source(fact.ids), branch) if isinstance(fact, Counts if selected.running else Ends) else None


def _check_not_written(places: Marked, routing: Routing, ids: Node, condition: Node, until: int) -> None:
    """That nobody writes integers between the routing and the loop's end."""
    for node in places.writing_integers:
        is_between = places.position[ids] < places.position[node] <= until
        if is_between and node is not condition and not routing.is_fill(node):
            raise NotProved(f"`{node.name}` may write to the routing", node)


def _check_body(places: Marked, skip: SpeculatedBranch, own: set[Node], fake_mode: Any) -> None:
    """That the rest of the body only computes: it cannot fail without tokens, nor writes, draws or asserts anything."""
    for node in places.all(skip.number, INSIDE):
        if node in own:
            continue
        if not _is_harmless(node):
            raise NotProved(f"`{node.name}` may fail where there are no tokens", node)
        _check_assertions(node, own)
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("example_value"))
        try:
            writes = node.op.startswith("call") and effects.observe(node, args, kwargs, fake_mode).writes
        except Refused as refused:
            raise NotProved(f"{refused.text}, where there are tokens", node) from refused
        if writes:
            raise NotProved(f"`{node.name}` writes where there are tokens", node)


def _check_assertions(node: Node, own: set[Node]) -> None:
    """That what the graph asserts of a size that a node of the body made holds without tokens."""
    waiting, seen = list(node.users), set()
    while waiting:
        user = waiting.pop()
        if user in seen or user in own:
            continue
        seen.add(user)
        if user.target in (torch.ops.aten._assert_scalar.default, torch._check):
            condition: Any = user.args[0]
            is_bound = isinstance(condition, Node) and operator_of(condition) in ("ge", "le")
            if not is_bound or type(condition.args[1]) is not int or not Sizes().imply(user):
                raise NotProved(f"`{user.name}` may fail where there are no tokens", user)
        elif is_symbolic(user.meta.get("example_value")) or _is_part(user):  # the size of `torch.where(mask)[0]`
            waiting += user.users


def _is_part(node: Node) -> bool:
    """Whether a node is one of several results of an operator."""
    source: Any = node.args[0] if operator_of(node) == "getitem" else None
    return source is not None and isinstance(source.meta.get("example_value"), (tuple, list))


def _is_harmless(node: Node) -> bool:
    if not node.op.startswith("call"):
        return True
    name, has_index = operator_of(node), len(node.all_input_nodes) > 1
    is_of_rows = any(has_rows(operand) for operand in node.all_input_nodes)
    if name == "getitem" and is_of_rows:
        return _is_part(node)  # and not the first token
    return name in (_QUERIES | _COMPARISONS if is_of_rows else _HARMLESS | _QUERIES) and not has_index


def _is_end(merge: Merge, skip: SpeculatedBranch) -> bool:
    """Whether a branch's end is in the body: what it merges, or all tensors that are joined with the others'."""
    if not skip.parts:
        return (skip.number, INSIDE) in marks(merge.node)
    marked = [value for value in merge.values if isinstance(value, Node) and (skip.number, PART) in marks(value)]
    return len(marked) == len(merge.values) == skip.parts


def _check_joined(loop: Loop, selected: Selection | Cut) -> None:
    """That `torch.cat` is the same with parts of no rows as without: there are others, and they are of one dtype."""
    if isinstance(selected, Selection):
        lowest = min(selected.first, selected.first + selected.step * (selected.count - 1))
        rows = selected.ids.meta["example_value"].numel() if (lowest, selected.count) == (0, selected.choices) else 0
    else:
        rows = 0 if selected.totals else selected.rows.meta["example_value"].shape[0]  # all of which are cut
    lists = zip(*(merge.values for merge in loop.merges), strict=True)
    is_alike = all(len({part.meta["example_value"].dtype for part in parts}) == 1 for parts in lists)
    if not is_alike or not statically_known_true(rows > 0):
        raise NotProved("what is joined may be another tensor where experts have no tokens", loop.merges[0].node)


def _check_pairs(places: Marked, skip: SpeculatedBranch, loop: Loop, branch: int) -> None:
    """That the variables which the body changes hold the sum, before it and after it."""
    end = loop.merges[branch].node
    if skip.parts and skip.live_outs:
        raise NotProved(f"a variable that is used later changes only with tokens, at {skip.where}", end)
    for place in range(skip.live_outs):
        before = places.first(skip.number, f"{BEFORE}{place}")
        after = places.first(skip.number, f"{AFTER}{place}")
        starts = {end.args[0], loop.merges[branch - 1].node if branch else loop.buffer}
        if after is not end or before is None or before not in starts:
            raise NotProved(f"a variable that is used later changes only with tokens, at {skip.where}", after)
