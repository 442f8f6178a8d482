"""Rounds of a loop over experts that are traced once: what the second wrote to the graph is copied for the others.

    for e in hit:                          hit stands for all experts (`experts/capture/speculation.py`)
        tok, slot = torch.where(mask[e])   where(mask[1]); ...    traced for expert 1, copied for 2, 3, ...
        out.index_add_(0, tok, f(x[tok], w[e]) * weights[tok, slot, None])

Dynamo follows every instruction of every round, 40 ms for one of Qwen3's. The trace of a round would be that of
another, but for the expert, if it begins in the same state and does not depend on which expert it is.

- The state: speculation has it that a round changes no object that is older than itself, and that all variables that
  are live at its end are as before, here without an exception. A round is only copied if it has added neither a guard
  nor an input, nor anything else that is kept outside of the graph; and if the tensors that it has used are as before
  in all but their contents: the first round gives the sum a gradient.
- The expert is known by its tensor, the loop's variable. All uses of the number that it is known to be are noted
  (`assumed_values.Read`). A copy has its own number where it is the index of a tensor, `mask[e]`, and where it has
  decided a jump, it has to decide it alike. Where it was used otherwise, as in `experts[e]` of a list of modules or in
  arithmetic, or where the routing analysis was asked, rounds are traced.

Copies run on fake tensors, and their results have to be as the originals', but for where in a memory they begin
(`dynamo/node_copies.py`). Each has a branch of its own, which a pass has to prove.

Private names, checked on torch 2.13, besides those of the handlers' sites: `items` and `index` of
`ListIteratorVariable`; of `OutputGraph`, `current_tracer`, `guards`, `guard_on_key_order` and `nn_modules`; of
translators, `num_calls`; the keys of `nn_module_stack`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.variables.lists import ListIteratorVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx import Node

from fxpasses.dynamo.equal_guards import content_of
from fxpasses.dynamo.failures import FeatureRejected
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.interceptions import Handlers, Proceed, opcodes
from fxpasses.dynamo.made_sizes import made_since
from fxpasses.dynamo.node_copies import Copying, Different, Original, can_copy, form_anywhere, form_of
from fxpasses.dynamo.noted import noted_beside_graph
from fxpasses.dynamo.trace import Trace
from fxpasses.experts.capture.assumed_values import Read
from fxpasses.experts.capture.speculation import OpenBranch, Speculation
from fxpasses.experts.routing import writes_integers
from fxpasses.graph.building import nodes_after

_MOST_TRIES = 3  # rounds of a loop that may be the original; the first has effects that the others have not

handlers = Handlers(checked=("2.13.0",))


@handlers.at(opcodes("FOR_ITER"), order=-1, without="each round of a loop over experts is traced")
def for_iter(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    rounds, place = trace.state(Rounds), tx.instruction_pointer - 1
    rounds.ended(tx, place)
    result = proceed(tx, inst)
    rounds.begun(tx, place)
    return result


@dataclass(frozen=True)
class _State:
    """What a round must leave as it is, and what it adds to: the symbols of sizes, reads, and calls of modules.

    guards: to which it adds none that says anything new. operands: the tensors that the round before has used, and what
    a trace may ask of them, which it must leave as well, and use no others.
    """

    kept: Any
    guards: list[Any]
    operands: Mapping[Node, Any]
    sizes: frozenset[Any]
    reads: int
    calls: Mapping[str, int]


@dataclass(frozen=True)
class _Round:
    """A traced round. reads: of its expert's number. calls: how often it has called each module."""

    opened: OpenBranch
    element: Node
    original: Original
    reads: list[Read]
    calls: Mapping[str, int]


class Rounds:
    """The loops over experts of one trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._speculation = trace.state(Speculation)
        self._begun: tuple[OpenBranch, _State] | None = None
        self._last: OpenBranch | None = None

    def begun(self, tx: Any, place: int) -> None:
        """Called after FOR_ITER, when speculation has begun a round of its loop."""
        opened = self._speculation.open[-1] if len(self._speculation.open) == 1 else None
        if opened is None or opened.tx is not tx or opened.start != place or opened.branch.kind != "hit":
            return
        last, self._last, self._begun = self._last, opened, None
        if last is None or last.tx is not tx or last.start != place or self._is_in_another_graph(tx):
            return
        if 0 < opened.branch.index <= _MOST_TRIES:
            self._begun = opened, self._state(tx, _operands_of(_nodes_of(last)))

    def ended(self, tx: Any, place: int) -> None:
        """Called before FOR_ITER, when the branch of a round has ended, if it was one: copies it for the elements left.

        Those for which it cannot be copied are left to be traced.
        """
        opened, state = self._begun or (None, None)
        if opened is None or state is None or opened.tx is not tx or opened.start != place or not opened.branch.ended:
            return
        self._begun = None
        iterator = tx.stack[-1]
        left = _left(iterator)
        if len(left) < 2:
            return
        traced = self._traced(opened, state, left[0])
        if traced is None:
            return
        for distance, element in enumerate(left[1:], 1):
            if not self._copy(traced, element, distance):
                return
            iterator.index += 1

    def _is_in_another_graph(self, tx: Any) -> bool:
        trace = self._trace
        return bool(tx.output.current_tracer.parent is not None or trace.operators or trace.part or tx.output.export)

    def _state(self, tx: Any, operands: Collection[Node] = ()) -> _State:
        output, values = tx.output, self._speculation.values
        inputs = len(output.current_tracer.graph.find_nodes(op="placeholder"))
        kept = [inputs, len(output.guard_on_key_order), set(output.nn_modules), values.asked]
        kept += [len(self._trace.answers), len(self._trace.branches), noted_beside_graph(self._trace, output)]
        forms = {node: form_of(_value(node)) for node in operands}
        sizes = frozenset(output.shape_env.var_to_range)
        return _State(kept, list(output.guards), forms, sizes, len(values.reads), dict(tx.num_calls))

    def _traced(self, opened: OpenBranch, before: _State, element: Node) -> _Round | None:
        """The round that has just ended, if its trace would be another round's as well."""
        tx, values = opened.tx, self._speculation.values
        output, now = tx.output, self._state(tx)
        if now.kept != before.kept or opened.branch.live_outs or opened.branch.parts or opened.last_node._erased:
            return None
        if not {*map(content_of, now.guards)} <= {*map(content_of, before.guards)}:
            return None
        nodes = _nodes_of(opened)
        operands = _operands_of(nodes) - {element}
        if any(node not in before.operands or form_of(_value(node)) != before.operands[node] for node in operands):
            return None
        is_of_operators = all(node.op.startswith("call") and can_copy(output, node) for node in nodes)
        if not is_of_operators or any(map(writes_integers, nodes)) or not {*element.users} <= {*nodes}:
            return None
        reads = values.reads[before.reads :]
        if not all(read.is_truth or read.index_of in nodes for read in reads):
            return None
        sizes = made_since(output.shape_env, before.sizes)
        bound = [symbol for node in nodes for symbol in node.meta.get("unbacked_bindings") or ()]
        if sorted(bound, key=str) != sorted(sizes, key=str) or any(map(self._trace.is_metadata, sizes)):
            return None
        original = Original.of(output, nodes, sizes, (), form_anywhere)
        calls = {name: count - before.calls.get(name, 0) for name, count in now.calls.items()}
        return _Round(opened, element, original, reads, {name: count for name, count in calls.items() if count})

    def _copy(self, traced: _Round, element: Node, distance: int) -> bool:
        """Copy a round for the element of a later one; returns whether that was possible."""
        tx, others = traced.opened.tx, {traced.element: element}
        if element.users or form_anywhere(_value(element)) != form_anywhere(_value(traced.element)):
            return False
        indices: dict[Node, Any] = {}
        for read in traced.reads:
            old, new = (self._speculation.values.known_with(read.node, each) for each in ({}, others))
            if old is None or new is None or (read.is_truth and bool(old) is not bool(new)):
                return False
            if read.index_of is not None:
                indices[read.index_of] = (read.index_of.args[0], new.item())
        before = self._state(tx)
        copying = Copying(tx, traced.original, others, _later(traced.calls, distance), indices)
        try:
            copying.copy(())
            known = made_since(tx.output.shape_env, before.sizes)
            after = self._state(tx)
            if after.kept != before.kept or len(after.guards) > len(before.guards) or known != copying.expected():
                raise Different("it has other effects")
            if any(map(self._trace.is_metadata, known)):
                raise Different("its sizes are metadata")
        except (Different, TorchDynamoException):
            if made_since(tx.output.shape_env, before.sizes):  # which operands from outside may remember
                raise FeatureRejected(Feature.ROUNDS, "a copy of a round makes other sizes") from None
            copying.undo(self._trace.erase)
            return False
        self._speculation.copy_round(traced.opened, copying.copies)
        for name, count in traced.calls.items():
            tx.num_calls[name] += count
        return True


def _left(iterator: Any) -> list[Node]:
    """The element that an iterator has given last, and those that are left; none if not all are tensors."""
    if type(iterator) is not ListIteratorVariable or not iterator.index:
        return []
    items = iterator.items[iterator.index - 1 :]
    return [item.as_proxy().node for item in items] if all(type(item) is TensorVariable for item in items) else []


def _nodes_of(opened: OpenBranch) -> list[Node]:
    """The nodes of a round that has just ended."""
    return list(nodes_after(opened.last_node, opened.graph._root))[::-1]


def _operands_of(nodes: list[Node]) -> set[Node]:
    """The values that nodes use, but for their own."""
    used = {operand for node in nodes for operand in node.all_input_nodes}
    return {node for node in used.difference(nodes) if "example_value" in node.meta}


def _value(node: Node) -> Any:
    return node.meta["example_value"]


def _later(calls: Mapping[str, int], distance: int) -> Callable[[dict[str, Any]], None]:
    """Corrects in a node's `meta` how often its modules were called before, for a round that is later by `distance`.

    The second call of a module has `@1` at the end of its key, and so on.
    """

    def describe(meta: dict[str, Any]) -> None:
        stack = meta.get("nn_module_stack", {})
        if any(value[0] in calls for value in stack.values()):
            meta["nn_module_stack"] = {key(old, value[0]): value for old, value in stack.items()}

    def key(old: str, path: str) -> str:
        identity, _, count = old.partition("@")
        later = int(count or 0) + distance * calls.get(path, 0)
        return f"{identity}@{later}" if later else identity

    return describe
