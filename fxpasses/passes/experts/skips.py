"""Prove that a loop over experts may go through experts without tokens, which the program passes over.

Three things make a `Skip` (`graph/skips.py`) superfluous: the program passes over an expert only if it has no pair; all
that its body does is to merge the rows of that expert's pairs; and what variables hold after the body is what they held
before, up to the merge. A merge of no rows changes nothing, in all kinds of loops that are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpasses.graph import effects
from fxpasses.graph.families import plain_operator_of
from fxpasses.graph.routing import is_integer, writers_of
from fxpasses.graph.skips import AFTER, BEFORE, CONDITION, INSIDE, PART, READ, Marked, Skip, marks
from fxpasses.graph.symbols import is_symbolic
from fxpasses.passes.experts.assertions import Sizes
from fxpasses.passes.experts.cuts import Cut
from fxpasses.passes.experts.loops import Loop, Merge, has_rows
from fxpasses.passes.experts.selection import Masks, Selection, Unknown

_SHAPE_ONLY = frozenset(
    {"contiguous", "detach", "flatten", "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view", "cpu"}
)
_CASTS = frozenset({"bool", "float", "int", "long", "to", "type"})
_REDUCTIONS = frozenset({"amax", "any", "count_nonzero", "sum"})
_NARROW = (torch.int8, torch.uint8, torch.int16)
_COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne", "greater", "not_equal", "sym_not"})
_NUMBERS = _COMPARISONS | {"add", "sub", "sym_sum", "sym_size.int"}
# Operators that fail for no tensors of known sizes; and those that ask for an expert's tokens, and for their number.
_HARMLESS = _SHAPE_ONLY | _CASTS | _COMPARISONS | {"getitem", "select"}
_QUERIES = frozenset({"where", "nonzero", "getitem", "sym_size", "size", "numel", "nelement", "len", "getattr"})
_FACTORIES = frozenset({"zeros", "new_zeros", "ones", "new_ones", "ones_like"})
# (operator, number) of comparisons that are true if and only if a count is not zero, and the opposite.
_SOME = {("gt", 0), ("ge", 1), ("ne", 0), ("greater", 0), ("not_equal", 0), ("greater_equal", 1)}
_NONE = {("eq", 0), ("lt", 1), ("le", 0), ("less", 1), ("less_equal", 0)}


@dataclass(frozen=True)
class Proof:
    """skips: those that a loop's grouping makes superfluous. conditions: the nodes that only they ask."""

    skips: tuple[Skip, ...]
    conditions: frozenset[Node]

    def conclude(self) -> None:
        for skip in self.skips:
            skip.proved = True


def prove(
    graph: Graph,
    skips: dict[int, Skip],
    loop: Loop,
    own: set[Node],
    routing: Selection | Cut | None,
    fake_mode: Any,
) -> Proof:
    """own: the loop's nodes, ends included, which the pass has checked. Raises `Unknown`."""
    if not skips or routing is None:
        return Proof((), frozenset())
    numbers = {number for node in own for number, role in marks(node) if role == INSIDE}
    places = Marked(graph)
    conditions: set[Node] = set()
    for number in sorted(numbers):
        skip = skips[number]
        branches = [place for place, merge in enumerate(loop.merges) if _is_end(merge, skip)]
        if not skip.ended or len(branches) != 1 or bool(skip.parts) != (loop.kind == "cat"):
            raise Unknown(f"what runs only with tokens, at {skip.where}, does more than to merge one expert's rows")
        condition, source = _condition_of(places, skip, branches[0], routing)
        _check_not_written(places, source, condition, until=max(places.position[merge.node] for merge in loop.merges))
        conditions.add(condition)
        _check_body(places, skip, own, fake_mode)
        if skip.parts:
            _check_joined(loop, routing)
        _check_pairs(places, skip, loop, branches[0])
    return Proof(tuple(skips[number] for number in sorted(numbers)), frozenset(conditions))


def prove_idle(graph: Graph, skips: dict[int, Skip], fake_mode: Any) -> None:
    """Prove skips whose bodies compute what nobody uses: `if e == padding: continue` in a loop over experts."""
    places = Marked(graph)
    for skip in skips.values():
        if skip.proved or not skip.ended or skip.pairs or not places.all(skip.number, INSIDE):
            continue
        try:
            _check_body(places, skip, set(), fake_mode)
        except Unknown:
            continue
        skip.proved = True


def prove_numbers(graphs: Iterable[Graph], skips: dict[int, Skip]) -> None:
    """Prove of numbers from NumPy's arrays that they may be Python's: nothing in the graphs reads them any more."""
    read = {number for graph in graphs for node in graph.nodes for number, role in marks(node) if role == READ}
    for skip in skips.values():
        skip.proved |= skip.kind == "numbers" and skip.ended and skip.number not in read


def erase_answers(graph: Graph) -> None:
    """Erase the questions that were answered while tracing, `count > 0`, which Dynamo leaves in a checkpoint's body."""
    for node in reversed(graph.nodes):
        is_number = is_symbolic(node.meta.get("example_value")) and plain_operator_of(node) in _NUMBERS
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
    name = plain_operator_of(node)
    writes = name.endswith("_") or name in effects.WRITERS
    return node.op.startswith("call") and not writes and not node.is_impure()


def _condition_of(places: Marked, skip: Skip, branch: int, routing: Selection | Cut) -> tuple[Node, Node]:
    """What the program asks, and the ids that it asks about; the body is passed over only if the branch has no rows."""
    node = places.first(skip.number, CONDITION)
    asked = _asked_in(skip, node) if node is not None else None
    if node is None or asked is None:
        raise Unknown(f"what the program asks at {skip.where} is not known to be whether the expert has tokens")
    source, expert = asked
    if isinstance(routing, Selection):
        right = source is _source(routing.ids) and expert == routing.first + routing.step * branch
    else:
        right = source is (_counted if routing.running else _ended)(routing.counts) and expert == branch
    if not right:
        raise Unknown(f"the program asks at {skip.where} for the tokens of another expert", node)
    return node, source


def _asked_in(skip: Skip, node: Node) -> tuple[Node, int] | None:
    if skip.kind == "hit":
        source = _listed(node)
        return (source, skip.index) if source is not None else None
    if skip.kind == "end":
        source = _ended(node)
        return (source, skip.index) if source is not None else None
    if skip.kind == "tensor":
        return _asked_by_truth(node, skip.truth)
    return _asked(node)


def _check_not_written(places: Marked, source: Node, condition: Node, until: int) -> None:
    """That nobody writes integers between the routing and the loop's end, nor to what leads from it to the question."""
    for node in places.writing_integers:
        if places.position[source] < places.position[node] <= until and node is not condition and not _is_fill(node):
            raise Unknown(f"`{node.name}` may write to the routing", node)
    chain, waiting = set(), [condition]
    while waiting:
        node = waiting.pop()
        if node is not source and node not in chain and node.op.startswith("call"):
            chain.add(node)
            waiting += node.all_input_nodes if plain_operator_of(node) not in _FACTORIES else ()
    for node in writers_of(chain):
        if not _is_fill(node):
            raise Unknown(f"`{node.name}` may write to what the program asks", node)


def _is_fill(node: Node) -> bool:
    """Whether a node writes ones to zeros that nobody has looked at yet: `zeros.scatter_(1, ids, 1)`."""
    zeros = node.args[0] if plain_operator_of(node) == "scatter_" else None
    try:
        return isinstance(zeros, Node) and bool(_one_hot(zeros))
    except Unknown:
        return False


def _check_body(places: Marked, skip: Skip, own: set[Node], fake_mode: Any) -> None:
    """That the rest of the body only computes: it cannot fail without tokens, nor writes, draws or asserts anything."""
    for node in places.all(skip.number, INSIDE):
        if node in own:
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("example_value"))
        try:
            if not _is_harmless(node):
                raise Unknown(f"`{node.name}` may fail where there are no tokens", node)
            _check_assertions(node, own)
            if node.op.startswith("call") and effects.observe(node, args, kwargs, fake_mode).writes:
                raise Unknown(f"`{node.name}` writes where there are tokens", node)
        except effects.Refused as refused:
            raise Unknown(f"{refused.text}, where there are tokens", node) from refused


def _check_assertions(node: Node, own: set[Node]) -> None:
    """That what the graph asserts of a size that a node of the body made holds without tokens."""
    waiting, seen = list(node.users), set()
    while waiting:
        user = waiting.pop()
        if user in seen or user in own:
            continue
        seen.add(user)
        if user.target in (torch.ops.aten._assert_scalar.default, torch._check):
            condition = user.args[0]
            name, bound = (
                (plain_operator_of(condition), condition.args[1]) if isinstance(condition, Node) else ("", None)
            )
            if name not in ("ge", "le") or type(bound) is not int or not Sizes().imply(user):
                raise Unknown(f"`{user.name}` may fail where there are no tokens", user)
        elif is_symbolic(user.meta.get("example_value")):
            waiting += user.users


def _is_harmless(node: Node) -> bool:
    if not node.op.startswith("call"):
        return True
    name, has_index = plain_operator_of(node).partition(".")[0], len(node.all_input_nodes) > 1
    is_of_rows = any(has_rows(operand) for operand in node.all_input_nodes)
    if name == "getitem" and is_of_rows:  # of a tuple of tensors, and not the first token
        return not isinstance(node.args[0].meta.get("example_value"), torch.Tensor)  # type: ignore[union-attr]
    return name in (_QUERIES | _COMPARISONS if is_of_rows else _HARMLESS | _QUERIES) and not has_index


def _is_end(merge: Merge, skip: Skip) -> bool:
    """Whether a branch's end is in the body: what it merges, or all tensors that are joined with the others'."""
    if not skip.parts:
        return (skip.number, INSIDE) in marks(merge.node)
    marked = [value for value in merge.values if isinstance(value, Node) and (skip.number, PART) in marks(value)]
    return len(marked) == len(merge.values) == skip.parts


def _check_joined(loop: Loop, routing: Selection | Cut) -> None:
    """That `torch.cat` is the same with parts of no rows as without: there are others, and they are of one dtype."""
    if isinstance(routing, Selection):
        lowest = min(routing.first, routing.first + routing.step * (routing.count - 1))
        rows = routing.ids.meta["example_value"].numel() if (lowest, routing.count) == (0, routing.choices) else 0
    else:
        rows = 0 if routing.totals else routing.rows.meta["example_value"].shape[0]  # all of which are cut
    lists = zip(*(merge.values for merge in loop.merges), strict=True)
    is_alike = all(len({part.meta["example_value"].dtype for part in parts}) == 1 for parts in lists)
    if not is_alike or not statically_known_true(rows > 0):
        raise Unknown("what is joined may be another tensor where experts have no tokens", loop.merges[0].node)


def _check_pairs(places: Marked, skip: Skip, loop: Loop, branch: int) -> None:
    """That the variables which the body changes hold the sum, before it and after it."""
    end = loop.merges[branch].node
    if skip.parts and skip.pairs:
        raise Unknown(f"a variable that is used later changes only with tokens, at {skip.where}", end)
    for place in range(skip.pairs):
        before = places.first(skip.number, f"{BEFORE}{place}")
        after = places.first(skip.number, f"{AFTER}{place}")
        starts = {end.args[0], loop.merges[branch - 1].node if branch else loop.buffer}
        if after is not end or before is None or before not in starts:
            raise Unknown(f"a variable that is used later changes only with tokens, at {skip.where}", after)


# What a tensor says of the routing: (ids, e) if it has an element that is not zero if and only if e is among the ids.


def _asked_by_truth(node: Node, truth: bool) -> tuple[Node, int] | None:
    if not truth:
        if (plain_operator_of(node), node.args[1] if len(node.args) > 1 else None) not in _NONE:
            return None
        inner = node.args[0]
        return _asked(inner) if isinstance(inner, Node) and _is_count(inner) else None
    return _asked(node)


def _is_count(node: Node) -> bool:
    """Whether a tensor is a number of pairs, so that comparing it with 0 is no question for expert 0."""
    name = plain_operator_of(node)
    if name in _CASTS | _SHAPE_ONLY:
        return isinstance(node.args[0], Node) and _is_count(node.args[0])
    if name in ("getitem", "select"):
        return isinstance(node.args[0], Node) and _counted(node.args[0]) is not None
    return name in _REDUCTIONS


def _asked(node: Node) -> tuple[Node, int] | None:
    name = plain_operator_of(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if name == "eq" and is_integer(source) and type(node.args[1]) is int:
        return _source(source), node.args[1]
    if name in ("getitem", "select"):
        return _element_asked(node, source)
    if (name, node.args[1] if len(node.args) > 1 else None) in _SOME:
        return _asked(source) if _is_count(source) else None
    if name in _CASTS | _REDUCTIONS and node.meta["example_value"].dtype in _NARROW:
        return None  # a number of pairs may become 0
    return _asked(source) if name in _REDUCTIONS | _CASTS | _SHAPE_ONLY | {"item"} else None


def _element_asked(node: Node, source: Node) -> tuple[Node, int] | None:
    """`counts[e]`, `one_hot(ids, E).permute(2, 1, 0)[e]`."""
    counted = _counted(source)
    if counted is not None:
        if source.meta["example_value"].ndim != 1:
            return None
        index = node.args[1] if plain_operator_of(node) == "getitem" else node.args[2]
        return (counted, index) if type(index) is int and index >= 0 else None
    ended = _ended(source)
    if ended is not None:  # the rows of the first expert end at their number
        first = plain_operator_of(node) == "getitem" and type(node.args[1]) is int and node.args[1] == 0
        return (ended, 0) if first else None
    try:
        ids, axes = _one_hot(source)
    except Unknown:
        return None
    if plain_operator_of(node) == "select":
        place, index = node.args[1], node.args[2]
        return (_source(ids), index) if axes[place] is None and type(index) is int and index >= 0 else None  # type: ignore[index]
    parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    chosen = [(place, part) for place, part in enumerate(parts) if part != slice(None)]
    if len(chosen) != 1 or Ellipsis in parts or None in parts:
        return None
    place, index = chosen[0]
    return (_source(ids), index) if axes[place] is None and type(index) is int and index >= 0 else None


def _listed(node: Node) -> Node | None:
    """The ids of which a tensor lists the different ones, ascending: `(counts > 0).nonzero()`, `ids.unique()`."""
    name = plain_operator_of(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if name == "unique":
        return _source(source)
    if name == "nonzero" or (name == "where" and len(node.args) == 1):
        return _counted(source)
    if name == "getitem":
        return _listed(source) if node.args[1] == 0 and plain_operator_of(source) in ("where", "nonzero") else None
    return _listed(source) if name in _SHAPE_ONLY else None


def _counted(node: Node) -> Node | None:
    """The ids of which element e of a vector is the number of those that are e, or is not zero if there are any."""
    name = plain_operator_of(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.dtype in _NARROW:
        return None  # 256 pairs would be none
    if name in _SHAPE_ONLY:  # in another order, or bytes of another type, these are counts of others
        is_vector = max((*example.shape, 1)) == example.numel()
        return _counted(source) if is_vector and example.shape.numel() == source.meta["example_value"].numel() else None
    if (name, node.args[1] if len(node.args) > 1 else None) in _SOME or name in _CASTS:
        return _counted(source)
    if name == "bincount" and not set(node.kwargs) - {"minlength"} and len(node.args) == 1:
        return _source(source)
    if name == "scatter_add" and len(node.args) == 4:
        return _ones_added(node.args)
    if name in _REDUCTIONS:
        dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        try:
            ids, axes = _one_hot(source)
        except Unknown:
            return None
        dims = dims if isinstance(dims, (tuple, list)) else (dims,)
        if not all(isinstance(dim, int) for dim in dims) or node.kwargs.get("keepdim", len(node.args) > 2):
            return None
        left = [axis for place, axis in enumerate(axes) if place not in {dim % len(axes) for dim in dims}]
        return _source(ids) if left == [None] else None
    return None


def _ended(node: Node) -> Node | None:
    """The ids of which element e of a vector is the number of those that are e or less."""
    name = plain_operator_of(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if name in ("cpu", "contiguous", "detach"):
        return _ended(source)
    examples: list[Any] = [part.meta.get("example_value") for part in (node, source)]
    if not all(isinstance(example, torch.Tensor) for example in examples):
        return None
    if name != "cumsum" or examples[1].ndim != 1 or examples[0].dtype not in (torch.int32, torch.int64):
        return None
    given = [*node.args[1:], *(node.kwargs[key] for key in ("dim",) if key in node.kwargs)]
    return _counted(source) if given in ([0], [-1]) and not set(node.kwargs) - {"dim"} else None


def _one_hot(node: Node) -> tuple[Node, list[int | None]]:
    """See `Masks.one_hot`; that nobody writes in between is checked for integers altogether."""
    return Masks(lambda node: True).one_hot(node)


def _ones_added(args: Sequence[Any]) -> Node | None:
    """`zeros.scatter_add(0, ids, ones)`."""
    zeros, dim, ids, ones = args
    if any(isinstance(part, Node) and len(part.users) != 1 for part in (zeros, ones)):
        return None  # they may be something else by then
    made = [plain_operator_of(part) if isinstance(part, Node) else "" for part in (zeros, ones)]
    if dim != 0 or made[0] not in ("zeros", "new_zeros") or made[1] not in ("ones_like", "ones", "new_ones"):
        return None
    return _source(ids)


def _source(node: Node) -> Node:
    """The ids, without what only changes their shape or width."""
    while plain_operator_of(node) in _SHAPE_ONLY | {"to", "long", "int"}:
        inner = node.args[0]
        kinds = [part.meta["example_value"].dtype for part in (node, inner) if isinstance(part, Node)]
        if not isinstance(inner, Node) or not is_integer(inner) or {*_NARROW, torch.bool}.intersection(kinds):
            break
        if plain_operator_of(node) == "view" and kinds[0] != kinds[1]:
            break  # other numbers
        node = inner
    return node
