"""Discharge the obligations of speculated branches: a grouped loop also runs experts that the program skips.

Three facts discharge a `SpeculatedBranch` (`experts/branches.py`): the program skips an expert only if it has no pair;
the branch only merges the rows of that expert's pairs; and up to the merge, its live-outs equal their values before it.
A merge of no rows changes nothing, in every kind of loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpasses.experts.assertions import Sizes
from fxpasses.experts.branches import (
    AFTER,
    BEFORE,
    CONDITION,
    INSIDE,
    PART,
    READ,
    Marked,
    SpeculatedBranch,
    marks,
    sets_gradients,
)
from fxpasses.experts.loops import Loop, Merge, has_rows
from fxpasses.experts.routing import Routing
from fxpasses.experts.routing_facts import Counts, Ends, Hits
from fxpasses.experts.routing_transfer import CASTS, RESHAPES
from fxpasses.experts.row_partition import Cut
from fxpasses.experts.selection import Selection
from fxpasses.graph import effects
from fxpasses.graph.aliases import written_operands
from fxpasses.graph.calls import operator_of
from fxpasses.graph.reachability import reached
from fxpasses.graph.refusals import NotProved
from fxpasses.graph.symbols import is_symbolic
from fxpasses.graph.traits import COMPARISONS, VIEWS

_COMPARISONS = COMPARISONS | {"sym_not"}
_NUMBERS = _COMPARISONS | {"add", "sub", "sym_sum", "sym_size"}
# Operators that succeed on all tensors of known sizes; and queries for an expert's tokens and for their number.
_HARMLESS = _COMPARISONS | {*CASTS, *RESHAPES, "getitem", "select"}
_PURE = COMPARISONS | VIEWS  # by name; other operators run
_QUERIES = frozenset({"where", "nonzero", "getitem", "sym_size", "size", "numel", "len", "getattr"})


@dataclass(frozen=True)
class Proof:
    """discharged: the numbers of the branches that are proved. conditions: the nodes that only their conditions use.

    idle: pure nodes of these alone that are not the loop's, such as those of `if e == padding: continue`.
    """

    discharged: frozenset[int]
    conditions: frozenset[Node]
    idle: frozenset[Node]


def prove(
    marked: Marked,
    loop: Loop,
    own: set[Node],
    routing: Routing,
    selected: Selection | Cut | None,
    fake_mode: Any,
) -> Proof:
    """Discharge the branches of a loop. own: its nodes, ends included, whose legality is checked. selected: its rows.

    Raises `NotProved`.
    """
    if not marked.branches or selected is None:
        return Proof(frozenset(), frozenset(), frozenset())
    numbers = {number for node in own for number, role in marks(node) if role == INSIDE}
    marked.refresh()
    conditions, idle = set[Node](), set[Node]()
    until = max(marked.position[merge.node] for merge in loop.merges)
    for number in sorted(numbers):
        branch = marked.branches[number]
        ends = [place for place, merge in enumerate(loop.merges) if _is_end(merge, branch)]
        if not branch.ended or len(ends) != 1 or bool(branch.parts) != (loop.kind == "cat"):
            raise NotProved(f"the branch at {branch.where} merges other results than one expert's rows")
        condition, ids = _condition_of(marked, branch, ends[0], routing, selected)
        _check_not_written(marked, routing, ids, condition, until)
        conditions.add(condition)
        idle |= _check_body(marked, branch, own, fake_mode)
        if branch.parts:
            _check_joined(loop, selected)
        _check_live_outs(marked, branch, loop, ends[0])
    # The nodes of further branches are left for their proofs.
    idle = {node for node in idle if all(number in numbers for number, _ in marks(node))}
    return Proof(frozenset(numbers), frozenset(conditions), frozenset(idle))


def prove_idle(marked: Marked, fake_mode: Any, discharged: set[int]) -> None:
    """Discharge branches without live-outs that only compute: `if e == padding: continue` in a loop over experts."""
    idle = [b for b in marked.branches.values() if b.ended and not b.live_outs and b.number not in discharged]
    if not idle:
        return
    marked.refresh()
    for branch in idle:
        if marked.all(branch.number, INSIDE):
            with contextlib.suppress(NotProved):
                _check_body(marked, branch, set(), fake_mode)
                discharged.add(branch.number)


def prove_numbers(graphs: Iterable[Graph], speculated: dict[int, SpeculatedBranch]) -> Iterable[int]:
    """The branches of kind "numbers" to discharge: no node in the graphs reads NumPy's integers any more."""
    read = {number for graph in graphs for node in graph.nodes for number, role in marks(node) if role == READ}
    return [b.number for b in speculated.values() if b.kind == "numbers" and b.ended and b.number not in read]


def erase_answers(graph: Graph) -> None:
    """Erase conditions such as `count > 0`, evaluated while tracing, which Dynamo leaves in checkpoint bodies."""
    for node in reversed(graph.nodes):
        is_number = is_symbolic(node.meta.get("example_value")) and operator_of(node) in _NUMBERS
        if is_number and not node.users and node.op == "call_function":
            graph.erase_node(node)


def erase_unused(graph: Graph, nodes: Iterable[Node], assertions_on: Callable[[set[Node]], set[Node]]) -> None:
    """Erase the nodes whose only users are assertions of their sizes, and then their unused operands."""
    free, used, erased = list[Node](), list[Node](), set[Node]()

    def put(node: Node) -> None:
        (used if node.users else free).append(node)

    def erase(node: Node) -> None:
        operands = node.all_input_nodes
        erased.add(node)
        graph.erase_node(node)
        for operand in operands:
            put(operand)

    for node in nodes:
        put(node)
    while free or used:
        node = (free or used).pop()  # first those that leave others without users
        if node in erased or not _is_removable(node):
            continue
        for part in (*node.users, node):  # a user with only assertions as users: another query of the same mask
            about = assertions_on({part}) if part.users else set()
            if part not in erased and _is_removable(part) and set(part.users) <= about:
                while about:
                    for other in [n for n in about if not n.users]:
                        erase(other)
                        about.remove(other)
                erase(part)


def _is_removable(node: Node) -> bool:
    return node.op.startswith("call") and not written_operands(node) and not node.is_impure()


def _condition_of(
    marked: Marked, branch: SpeculatedBranch, place: int, routing: Routing, selected: Selection | Cut
) -> tuple[Node, Node]:
    """The condition of a branch, and the ids that it tests. It fails only if the loop's expert has no rows."""
    node = marked.first(branch.number, CONDITION)
    tested = _tested_by(branch, node, routing) if node is not None else None
    if node is None or tested is None:
        raise NotProved(f"the condition at {branch.where} is not known to be whether the expert has tokens")
    ids, wanted = routing.source(tested[0]), tested[1]
    if _rows_of(selected, place, routing) != (ids, wanted):
        raise NotProved(f"the condition at {branch.where} tests the tokens of another expert", node)
    return node, ids


def _tested_by(branch: SpeculatedBranch, node: Node, routing: Routing) -> tuple[Node, int] | None:
    """(ids, e) of a condition that holds if and only if expert e is among the ids."""
    fact = routing.of(node)
    if branch.kind in ("hit", "end"):
        return (fact.ids, branch.index) if isinstance(fact, Hits if branch.kind == "hit" else Ends) else None
    presence, truth = routing.presence(node), branch.truth if branch.kind == "tensor" else True
    return (presence.ids, presence.expert) if presence is not None and presence.present is truth else None


def _rows_of(selected: Selection | Cut, place: int, routing: Routing) -> tuple[Node, int] | None:
    """(ids, e) of the rows at a place of the loop."""
    if isinstance(selected, Selection):
        return routing.source(selected.ids), selected.first + selected.step * place
    fact = routing.of(selected.counts)
    return (routing.source(fact.ids), place) if isinstance(fact, Counts if selected.running else Ends) else None


def _check_not_written(marked: Marked, routing: Routing, ids: Node, condition: Node, until: int) -> None:
    """Raise `NotProved` if integers are written between the routing and the loop's end."""
    for node in marked.writing_integers:
        is_between = marked.position[ids] < marked.position[node] <= until
        if is_between and node is not condition and not routing.is_fill(node):
            raise NotProved(f"`{node.name}` may write to the routing", node)


def _check_body(marked: Marked, branch: SpeculatedBranch, own: set[Node], fake_mode: Any) -> set[Node]:
    """The rest of the body. Raises `NotProved` unless it is pure, and cannot fail without tokens."""
    rest: set[Node] = set()
    inside = marked.all(branch.number, INSIDE)
    _check_gradients(marked, [node for node in inside if sets_gradients(node)])
    for node in inside:
        if node in own or sets_gradients(node):
            continue
        if not _is_harmless(node):
            raise NotProved(f"`{node.name}` may fail where there are no tokens", node)
        _check_assertions(node, own)
        is_known = not node.op.startswith("call") or operator_of(node) in _PURE
        if not is_known and (text := effects.impurity(node, fake_mode)) is not None:
            raise NotProved(f"{text}, where there are tokens", node)
        rest.add(node)
    return rest


def _check_gradients(marked: Marked, inside: list[Node]) -> None:
    """Raise `NotProved` unless a body that switches gradients off and on leaves them as they were before it."""
    if not inside:
        return
    first, last = (choose(inside, key=marked.position.__getitem__) for choose in (min, max))
    before = [node for node in marked.setting_gradients if marked.position[node] < marked.position[first]]
    enabled = before[-1].args[0] if before else marked.gradients
    if enabled is None or enabled is not last.args[0]:
        raise NotProved(f"`{last.name}` may leave gradients switched otherwise where there are tokens", last)


def _check_assertions(node: Node, own: set[Node]) -> None:
    """Raise `NotProved` unless the graph's assertions on sizes of a node of the body hold without tokens."""

    def users(of: Node) -> list[Node]:
        # Through numbers and parts: the size of `torch.where(mask)[0]`.
        is_followed = of is node or is_symbolic(of.meta.get("example_value")) or _is_part(of)
        return [user for user in of.users if user not in own] if is_followed else []

    for user in reached([node], users):
        if user.target in (torch.ops.aten._assert_scalar.default, torch._check):
            condition: Any = user.args[0]
            is_bound = isinstance(condition, Node) and operator_of(condition) in ("ge", "le")
            if not is_bound or type(condition.args[1]) is not int or not Sizes().imply(user):
                raise NotProved(f"`{user.name}` may fail where there are no tokens", user)


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
        return _is_part(node)  # not so the first token
    return name in (_QUERIES | _COMPARISONS if is_of_rows else _HARMLESS | _QUERIES) and not has_index


def _is_end(merge: Merge, branch: SpeculatedBranch) -> bool:
    """Whether a branch's body contains a merge; for lists, whether it computes all parts."""
    if not branch.parts:
        return (branch.number, INSIDE) in marks(merge.node)
    parts = [value for value in merge.values if isinstance(value, Node) and (branch.number, PART) in marks(value)]
    return len(parts) == len(merge.values) == branch.parts


def _check_joined(loop: Loop, selected: Selection | Cut) -> None:
    """Raise `NotProved` unless `torch.cat` ignores parts of no rows: some part has rows, and all have one dtype."""
    if isinstance(selected, Selection):
        rows = selected.ids.meta["example_value"].numel() if selected.covers else 0
    else:
        rows = 0 if selected.totals else selected.rows.meta["example_value"].shape[0]  # all rows are cut
    lists = zip(*(merge.values for merge in loop.merges), strict=True)
    is_alike = all(len({part.meta["example_value"].dtype for part in parts}) == 1 for parts in lists)
    if not is_alike or not statically_known_true(rows > 0):
        raise NotProved("the concatenation may differ where experts have no tokens", loop.merges[0].node)


def _check_live_outs(marked: Marked, branch: SpeculatedBranch, loop: Loop, place: int) -> None:
    """Raise `NotProved` unless the live-outs are the loop's sum, before and after the merge at `place`."""
    end = loop.merges[place].node
    starts = {end.args[0], loop.merges[place - 1].node if place else loop.buffer}
    for number in range(branch.live_outs):
        before = marked.first(branch.number, f"{BEFORE}{number}")
        after = marked.first(branch.number, f"{AFTER}{number}") if not branch.parts else None
        if after is not end or before is None or before not in starts:
            raise NotProved(f"a variable that is used later changes only with tokens, at {branch.where}", after or end)
