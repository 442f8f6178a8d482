"""Speculation: a trace takes branches that run only for experts with tokens, and records the obligations.

    for e in range(4):
        tok, slot = torch.where(idx == e)
        if tok.numel() == 0:  # only the router knows
            continue
        out.index_add_(0, tok, f(x[tok], e))

Without speculation, the graph ends at the condition:

    eq = idx == 0;  where = torch.where(eq);  tok = where[0];  return tok, where[1], ...

With it, all branches are in one graph, and nodes are marked with their roles (`experts/branches.py`):

    eq = idx == 0;     where = torch.where(eq);      tok = where[0];                  # eq: CONDITION of branch 0
    getitem = x[tok];  y = f(getitem, 0);            out.index_add_(0, tok, y)        # each INSIDE of branch 0
    eq_1 = idx == 1;   where_1 = torch.where(eq_1);  tok_1 = where_1[0];              # eq_1: CONDITION of branch 1
    ...

No trace can know whether an expert has tokens. The condition is taken to hold, without a record in the shape
environment: nothing that is traced later depends on it. Python's state is monitored from the jump to the branch's
post-dominator. A live-out that holds another tensor than before is recorded for the pass. Any other difference (a
counter, a list that grew, an attribute, an iterator that advanced, a random number) means that skipping the branch may
change the program's result: no pass could discharge the branch, and tracing stops at once (`Unprovable`), not least
because a loop such as `while (ids == pad).any()` would be traced forever. The same holds for a new assertion, unless it
bounds a size that the branch itself created (`rows[start:stop]` has 0 rows or more, and no more than `rows`): such a
bound says nothing about older symbols, and it is in the graph for the pass to check.

`for e in hit`, over a tensor of the experts that have tokens, is a loop over all experts with such a branch: in this
loop alone, `hit` is replaced by all experts, and numbers read from it are known.

A pass must discharge every branch, else the trace is taken back (`dynamo/retracing.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch._dynamo import variables
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.fx import Node

from fxpasses.dynamo.births import now
from fxpasses.dynamo.dynamo_names import user_line
from fxpasses.dynamo.failures import Unprovable
from fxpasses.dynamo.made_sizes import renamed
from fxpasses.dynamo.unproved import function_of
from fxpasses.experts.branches import AFTER, BEFORE, CONDITION, INSIDE, SpeculatedBranch, mark, marks, set_marks
from fxpasses.experts.capture.assumed_values import (
    AssumedValues,
    Read,
    counted_mask,
    ends_compared,
    is_routing,
    list_of_hits,
)
from fxpasses.experts.capture.liveness import follow, live_at
from fxpasses.experts.routing import Routing, writes_integers
from fxpasses.experts.routing_facts import Nothing
from fxpasses.graph.building import nodes_after
from fxpasses.graph.symbols import is_unbacked

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_COUNTS = (0, 1, 2, 3, 10**9)
_PLAIN = (bool, int, float, complex, str, bytes)  # compared by `repr`, because 0.0 == -0.0


class _Known:
    """A snapshot of the shape environment: its symbols, and the number of assertions about each."""

    def __init__(self, shape_env: Any) -> None:
        self._shape_env = shape_env
        self._symbols = frozenset(shape_env.var_to_range)
        self._counts = {key: len(found) for key, found in shape_env.deferred_runtime_asserts.items()}

    def is_asserted_more(self) -> bool:
        """Whether an older symbol has since been constrained, other than as the bound of a newer one."""
        lists = self._shape_env.deferred_runtime_asserts.items()
        return any(self._is_more(found.expr) for key, every in lists for found in every[self._counts.get(key, 0) :])

    def _is_more(self, asserted: Any) -> bool:
        older = asserted.free_symbols & self._symbols
        is_bound = isinstance(asserted, (sympy.Le, sympy.Lt)) and older <= self._shape_env.backed_var_to_val.keys()
        return older == asserted.free_symbols or bool(older and not is_bound)


class OpenBranch:
    """A branch that is being traced, from `start` to its post-dominator, and the state before it.

    noted: see `Speculation._noted`.
    """

    def __init__(self, branch: SpeculatedBranch, tx: Any, start: int, post_dominator: int, noted: Any) -> None:
        self.branch, self.tx, self.start, self.post_dominator, self.noted = branch, tx, start, post_dominator, noted
        self.live_outs = live_at(tx.instructions, post_dominator, tx.f_globals)
        self.variables = dict(tx.symbolic_locals)
        self.stack = list(tx.stack[:-1])  # without the condition, or the loop's next element
        self.blocks = len(tx.block_stack)
        self.graph = tx.output.current_tracer.graph
        self.last_node = self.graph._root.prev
        self.known = _Known(tx.output.shape_env)
        self.born = now()
        self.spoiled = False


class Speculation:
    """The speculated branches of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.branches, self.discharged = trace.branches, trace.discharged
        self._answers, self._given_up = trace.answers, trace.attempt.given_up
        self.values = AssumedValues()
        self.open: list[OpenBranch] = []  # outermost first
        self._loops: dict[tuple[Any, int], tuple[Any, Any]] = {}  # by translator and FOR_ITER: the node, and a count
        self._lists: dict[int, tuple[Any, Any]] = {}  # lists of all experts, by id: the list, and the node of the hits

    def refusal(self, text: str) -> Unprovable:
        """The exception for a use that invalidates an earlier speculation."""
        self.new("refused")
        return Unprovable(text)

    def new(self, kind: str, **fields: Any) -> SpeculatedBranch:
        self.branches.append(SpeculatedBranch(len(self.branches), kind, user_line(), **fields))
        return self.branches[-1]

    def is_given_up(self, tx: Any) -> bool:
        """Whether other frames have failed to prove the branches of the function that is being traced."""
        return bool(self._given_up) and function_of(tx.f_code) in self._given_up

    # Jumps

    def truth(self, tx: Any, instruction: Any, value: Any, jumps_if: bool) -> bool | None:
        """The assumed truth of a condition at a jump; None if the condition does not concern routing."""
        known = self.values.of(value)
        if known is not None and known.numel() == 1:
            self.values.reads.append(Read(value.as_proxy().node, is_truth=True))
            return bool(known)
        found = _condition(value, self.values.routing) if not self.is_given_up(tx) else None
        if found is None:
            return None
        truth, node, fields = found
        branch = self.new(truth=truth, **fields)
        mark(node, branch, CONDITION)
        places = {other: place for place, other in enumerate(tx.instructions)}
        target, following = places[instruction.target], tx.instruction_pointer
        passed_over = following if truth is jumps_if else target
        self._begin(tx, following - 1, follow(tx.instructions, passed_over), branch)
        return truth

    # Loops over the experts that have tokens

    def all_experts(self, tx: Any, tensor: Any) -> Any:
        """Dynamo's variable for all experts, in place of `tensor`, which lists those with tokens; or None."""
        node = tensor.as_proxy().node
        is_looped_over = tx.instructions[tx.instruction_pointer].opname == "FOR_ITER"
        if not is_unbacked_size(node) or not is_looped_over or self.is_given_up(tx):
            return None
        value = self.values.if_all_are_hit(node)
        if value is None:
            return None
        device = node.meta["example_value"].device
        build = variables.TorchInGraphFunctionVariable
        constant = variables.ConstantVariable.create
        options = {"dtype": constant(value.dtype), "device": constant(device)}
        every: Any = build(torch.arange).call_function(tx, [constant(value.shape[0])], options)
        if value.ndim == 2:
            every = every.call_method(tx, "unsqueeze", [constant(1)], {})
        self.values.note(every.as_proxy().node, value)
        self._loops[tx, tx.instruction_pointer] = (list_of_hits(node), itertools.count())
        return every

    def list_of_all_experts(self, tx: Any, tensor: Any) -> Any:
        """The same for `tensor.tolist()`, if the program only iterates over the list; or None."""
        node = tensor.as_proxy().node
        if not is_unbacked_size(node) or not self.is_only_looped_over(tx) or self.is_given_up(tx):
            return None
        value = self.values.if_all_are_hit(node)
        if value is None or value.ndim != 1:
            return None
        numbers = [variables.ConstantVariable.create(int(number)) for number in value]
        made = variables.TupleVariable(numbers)
        self._lists[id(made)] = (made, list_of_hits(node))
        return made

    def begin_list(self, tx: Any, value: Any) -> None:
        """Called at the start of `for e in hit.tolist()`."""
        made, node = self._lists.get(id(value), (None, None))
        if made is value and node is not None:
            self._loops[tx, tx.instruction_pointer] = (node, itertools.count())

    def begin_round(self, tx: Any, place: int) -> None:
        """Called after FOR_ITER, the instruction at `place`, has taken the next element."""
        node, count = self._loops.get((tx, place), (None, None))
        if node is None or tx.instruction_pointer != place + 1:
            return
        branch = self.new("hit", index=next(count))
        mark(node, branch, CONDITION)
        self._begin(tx, place, place, branch)

    def is_only_looped_over(self, tx: Any) -> bool:
        """Whether the program only loops over the value that is about to be pushed."""
        code, place = tx.instructions, tx.instruction_pointer
        if code[place].opname == "GET_ITER":
            return code[place + 1].opname == "FOR_ITER"
        if code[place].opname != "STORE_FAST":
            return False
        name = code[place].argval
        uses = [at for at, i in enumerate(code) if i.argval == name and "FAST" in i.opname and at != place]
        following = tuple(i.opname for i in code[uses[0] : uses[0] + 3]) if len(uses) == 1 else ()
        return following == ("LOAD_FAST", "GET_ITER", "FOR_ITER")

    # Branches

    def _begin(self, tx: Any, start: int, end: int, branch: SpeculatedBranch) -> None:
        branch.function = function_of(tx.f_code)
        self.open.append(OpenBranch(branch, tx, start, end, self._noted(tx.output)))

    def before_step(self, tx: Any) -> None:
        """Called before the translator traces its next instruction; raises `Unprovable`."""
        place = tx.instruction_pointer
        while any(opened.tx is tx and opened.post_dominator == place for opened in self.open):
            opened = self.open[-1]
            if opened.tx is not tx or opened.post_dominator != place:  # an outer branch ends before this one
                raise _unprovable(opened)
            self._end(opened)
            self.open.pop()
        for opened in self.open:
            again = opened.tx is tx and opened.start == place  # without reaching its post-dominator
            if opened.spoiled or again or not is_running(opened.tx, tx):
                raise _unprovable(opened)

    @contextmanager
    def allowing_changes(self) -> Iterator[None]:
        spoiled = [opened.spoiled for opened in self.open]
        yield
        for opened, before in zip(self.open, spoiled, strict=True):
            opened.spoiled = before

    def changed(self, born: int = -1) -> None:
        """Called for a change of a Python object that was created at the time `born`, perhaps by the branch itself.

        By default, the object is older than the trace.
        """
        for opened in self.open:
            opened.spoiled |= born < opened.born

    # Copies of layers (`dynamo/rules/equal_layers.py`)

    def may_replace(self, operands: Mapping[Node, Node]) -> bool:
        """Whether nothing is known of operands, or of what replaces them, that may shape a trace."""
        return all(old is new or (self._is_plain(old) and self._is_plain(new)) for old, new in operands.items())

    def _is_plain(self, node: Node) -> bool:
        return isinstance(self.values.routing.of(node), Nothing) and self.values.known(node) is None

    def can_copy(self, branches: range, nodes: Collection[Node], results: Collection[Node]) -> bool:
        """Whether the marks of `branches` are on `nodes` alone, and nothing is assumed of the values of `results`."""
        if not all(self.branches[number].ended and self.branches[number].function for number in branches):
            return False
        if any(map(writes_integers, nodes)) or any(self.values.known(node) is not None for node in results):
            return False
        own = set(nodes)
        others = {node for graph in {node.graph for node in nodes} for node in graph.nodes} - own
        return not any(number in branches for node in others for number, _ in marks(node))

    def copy(self, branches: range, copies: Mapping[Node, Node], symbols: Mapping[Any, Any]) -> None:
        """Add copies of branches, which have to be proved as well, and their marks on copies of nodes."""
        first = len(self.branches)
        for number in branches:
            branch = self.branches[number]
            made = replace(branch, number=len(self.branches), symbol=renamed(branch.symbol, symbols))
            made.empty = renamed(branch.empty, symbols)
            self.branches.append(made)
            if number in self.discharged:
                self.discharged.add(made.number)
        for old, new in copies.items():
            own = [(number - branches.start + first, role) for number, role in marks(old) if number in branches]
            set_marks(new, own)

    # Copies of rounds (`experts/capture/equal_rounds.py`)

    def copy_round(self, opened: OpenBranch, copies: Mapping[Node, Node]) -> None:
        """Add the branch of the next round of a loop over the experts that have tokens, whose nodes are copies."""
        node, count = self._loops[opened.tx, opened.start]
        branch = replace(opened.branch, number=len(self.branches), index=next(count))
        self.branches.append(branch)
        mark(node, branch, CONDITION)
        if opened.branch.number in self.discharged:
            self.discharged.add(branch.number)
        for old, new in copies.items():
            set_marks(new, [(branch.number, role) for number, role in marks(old) if number == opened.branch.number])

    def _noted(self, output: Any) -> tuple[Any, ...]:
        """Effects that no variable holds: random numbers, hooks, answers of the batch."""
        return len(output.random_calls), tuple(output.side_effects.tensor_hooks), len(self._answers)

    def _end(self, opened: OpenBranch) -> None:
        branch, tx = opened.branch, opened.tx
        is_where_it_was = len(tx.block_stack) == opened.blocks and tx.output.current_tracer.graph is opened.graph
        is_where_it_was &= len(tx.stack) == len(opened.stack)
        if opened.spoiled or not is_where_it_was or opened.known.is_asserted_more():
            raise _unprovable(opened)
        if self._noted(tx.output) != opened.noted:
            raise _unprovable(opened)
        names = [name for name in opened.live_outs if name in opened.variables or name in tx.symbolic_locals]
        pairs = [(opened.variables.get(name), tx.symbolic_locals.get(name)) for name in names]
        pairs += list(zip(opened.stack, tx.stack, strict=True))
        different: list[Any] = [pair for pair in pairs if not _same(*pair, branch)]
        if not all(isinstance(value, TensorVariable) for pair in different for value in pair):
            raise _unprovable(opened)  # no pass could prove that a number, a list or a new variable is unchanged
        made = list(nodes_after(opened.last_node, opened.graph._root))
        for node in made:
            mark(node, branch, INSIDE)
        for place, (before, after) in enumerate(different):
            mark(before.as_proxy().node, branch, f"{BEFORE}{place}")
            mark(after.as_proxy().node, branch, f"{AFTER}{place}")
        branch.live_outs = len(different)
        branch.ended = True
        if not made and not different and not branch.parts:
            self.discharged.add(branch.number)


def _unprovable(opened: OpenBranch) -> Unprovable:
    return Unprovable(f"the branch for experts with tokens, at {opened.branch.where}, may have side effects")


def is_running(tx: Any, callee: Any) -> bool:
    """Whether `callee` is `tx`, or is inlined into it."""
    while callee is not None and callee is not tx:
        callee = getattr(callee, "parent", None)
    return callee is not None


def is_unbacked_size(node: Any) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.ndim > 0 and is_unbacked(example.shape[0])


def _condition(value: Any, routing: Routing) -> tuple[bool, Node, dict[str, Any]] | None:
    """For a condition on an expert's tokens: its truth value if there are some, its node, and the branch's fields."""
    if isinstance(value, SymNodeVariable):
        expression, node = value.sym_num.node.expr, value.as_proxy().node
        if not is_unbacked(value.sym_num) or not all(symbol.is_integer for symbol in expression.free_symbols):
            return None
        ask = _count_asked if len(expression.free_symbols) == 1 else _end_asked
        asked = ask(expression, node, routing)
        if asked is None:
            return None
        asked_of, counts, fields = asked
        symbol, empty = fields["symbol"], fields.get("empty", 0)
        none, *some = (_truth(expression.xreplace({symbol: empty + sympy.Integer(count)})) for count in counts)
        if none is None or any(truth is None or truth is none for truth in some):
            return None
        return not none, asked_of, fields
    if isinstance(value, TensorVariable):
        node = value.as_proxy().node
        example = node.meta.get("example_value")
        if not isinstance(example, torch.Tensor) or any(size != 1 for size in example.shape):
            return None
        truth = is_routing(routing, node)
        return None if truth is None else (truth, node, {"kind": "tensor"})
    return None


def _count_asked(expression: Any, node: Node, routing: Routing) -> tuple[Node, tuple[int, ...], dict[str, Any]] | None:
    """`count > 0`, `tok.numel() == 0`: the counted tensor, and sample counts, the one for no tokens first."""
    (symbol,) = expression.free_symbols
    asked = counted_mask(node, symbol)
    if asked is None or routing.presence(asked) is None:
        return None
    example = asked.meta.get("example_value")  # absent where Dynamo unrolls `tolist`
    is_flag = isinstance(example, torch.Tensor) and example.ndim == 0 and example.dtype is torch.bool
    return asked, (0, 1) if is_flag else _COUNTS, {"kind": "count", "symbol": symbol}


def _end_asked(expression: Any, node: Node, routing: Routing) -> tuple[Node, tuple[int, ...], dict[str, Any]] | None:
    """`ends[e - 1] == ends[e]`: expert e has no rows, because its rows end where the previous expert's end."""
    ends = ends_compared(routing, node) if len(expression.free_symbols) == 2 else None
    if ends is None:
        return None
    tensor, index, (before, symbol) = ends
    if {before, symbol} != expression.free_symbols:
        return None
    return tensor, _COUNTS, {"kind": "end", "index": index, "symbol": symbol, "empty": before}


def _truth(value: Any) -> bool | None:
    if value in (sympy.true, sympy.false):
        return bool(value)
    return bool(value != 0) if value.is_number else None


def _same(before: Any, after: Any, branch: SpeculatedBranch) -> bool:
    before, after = (v.unwrap() if hasattr(v, "unwrap") else v for v in (before, after))
    if before is after:
        return True
    if before is None or after is None:
        return False
    if branch.symbol is not None and isinstance(after, SymNodeVariable):
        empty = after.sym_num.node.expr.xreplace({branch.symbol: sympy.sympify(branch.empty)})
        return bool(empty == _integer(before))
    if type(before) is not type(after):
        return False
    if before.is_python_constant() and after.is_python_constant():
        one, other = before.as_python_constant(), after.as_python_constant()
        return type(one) is type(other) and (one is other or (type(one) in _PLAIN and repr(one) == repr(other)))
    if isinstance(before, TensorVariable):
        return before.as_proxy().node is after.as_proxy().node
    return False


def _integer(variable: Any) -> Any:
    """The expression of one of Dynamo's numbers, or None."""
    if isinstance(variable, SymNodeVariable):
        return variable.sym_num.node.expr
    known = variable.as_python_constant() if variable.is_python_constant() else None
    return sympy.Integer(known) if type(known) is int else None
