"""Layers that are traced once: what `layers[0]` wrote to the graph is copied for `layers[1]`.

    for layer in self.layers:  h = layer(h, mask=mask)         traced for the first layer, copied for each equal one

Dynamo follows every instruction of every layer, 0.1 s for one of Llama's. Two layers are equal if the trace of the
second would be that of the first, but for the tensors that they own. It would, if it reads the same, and it reads

- its arguments: tensors of the same form, the same constants, the same objects (`Call`);
- what its module owns. Dynamo guards all that it reads there, so the guards say what it asked
  (`dynamo/equal_guards.py`);
- anything else, which is as it was, unless the program has changed an object since;
- the process's modes, which are compared.

A layer is not copied, and its likes are traced, if it changes an object that is older than itself, reads one that the
trace has changed, draws Python's random numbers, returns anything but tensors, makes sizes that depend on the batch's
numbers, has hooks, or contains an operator of higher order other than a checkpoint that writes nothing. Nor is one
copied inside a branch or a loop that another feature follows.

A mixture's layer makes sizes that depend on activations, how many tokens an expert has, and branches for experts with
tokens (`experts/branches.py`): a copy has sizes and branches of its own, which a pass has to prove as it does others.

The graph, its guards and its inputs are those that Dynamo would have made (`dynamo/node_copies.py`): no pass can tell.

Private names, checked on torch 2.11, 2.13 and 2.15, besides those of the handlers' sites: `VariableBuilder`,
`wrap_fx_proxy`; of `OutputGraph`, `current_tracer`, `guards` and `guard_on_key_order`; of translators, `num_calls`,
`block_stack` and `parent`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.source import LocalSource
from torch._dynamo.variables import (
    ConstantVariable,
    LazyVariableTracker,
    UnspecializedBuiltinNNModuleVariable,
    UnspecializedNNModuleVariable,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import Source
from torch.fx import Node

from fxpasses.dynamo.births import CHANGES, READS_STORED, TAKES, Owners, born, now
from fxpasses.dynamo.equal_guards import (
    TENSORS,
    Asked,
    Reader,
    Relocation,
    are_equal,
    asked_of,
    reader_of,
)
from fxpasses.dynamo.failures import FeatureRejected
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.identities import (
    BUILTINS,
    COMPARISONS,
    ITEMS,
    KEYS,
    is_asked_by,
    is_asked_in,
    is_asked_of,
    is_object,
)
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.made_sizes import made_since
from fxpasses.dynamo.module_calls import UNKNOWN, Call, leaves, nodes_of, rebuilt
from fxpasses.dynamo.module_paths import Renaming
from fxpasses.dynamo.node_copies import Copying, Different, Original, can_copy, form_of, inner_nodes
from fxpasses.dynamo.noted import noted_beside_graph
from fxpasses.dynamo.rules import checkpoint_writes
from fxpasses.dynamo.trace import Trace
from fxpasses.graph.building import nodes_after

_MEMBER = re.compile(r"(?:\._modules)?\['\d+'\]$|\[\d+\]$")  # how the source of a list's or a sequence's module ends
_MOST_FAILURES = 6  # of one class, after which no more copies are tried
_MOST_TRACED = 4  # of one class: where layers differ, as by an index that they read, no more are kept

handlers = Handlers()


@handlers.at(
    method("torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable", "call_function"),
    without="each of equal layers is traced",
)
def call(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    return trace.state(Layers).call(self, tx, args, kwargs, lambda: proceed(self, tx, args, kwargs))


@handlers.at(
    method("torch._dynamo.variables.higher_order_ops.CheckpointHigherOrderVariable", "_call_function"),
    order=5,
    without="each of equal checkpointed layers is traced",
)
def checkpoint(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """`checkpoint(layer, x)`. Dynamo takes arguments out of `kwargs`."""
    module, given = args[0].realize(), dict(kwargs)
    return trace.state(Layers).call(module, tx, args[1:], given, lambda: proceed(self, tx, args, kwargs), self.value)


@handlers.at(*CHANGES, order=5)
def change(trace: Trace, proceed: Proceed, effects: Any, *args: Any, **kwargs: Any) -> Any:
    trace.state(Layers).changes(effects, args[0])
    return NOT_HANDLED


@handlers.at(*TAKES, order=5)
def take_elements(trace: Trace, proceed: Proceed, iterator: Any, *args: Any, **kwargs: Any) -> Any:
    trace.state(Layers).used(born(iterator))
    return NOT_HANDLED


@handlers.at(READS_STORED, order=5)
def read_stored(trace: Trace, proceed: Proceed, self: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
    trace.state(Layers).used(born(item))
    return NOT_HANDLED


@handlers.at(method("torch._dynamo.variables.builder.VariableBuilder", "__call__"), order=5)
def build(trace: Trace, proceed: Proceed, self: Any, value: Any) -> Any:
    """Note an object of a layer that the trace has met elsewhere, whose guards are on another source."""
    found = proceed(self, value)
    source = getattr(found, "source", None)
    if source is not None and source != self.source:
        trace.state(Layers).met_before(self.source, source)
    return found


@handlers.at(*COMPARISONS, order=5)
def compare(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    trace.state(Layers).asked_for_identity(lambda: is_asked_by(inst.opname, tx.stack))
    return NOT_HANDLED


@handlers.at(BUILTINS, order=9)
def call_builtin(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    trace.state(Layers).asked_for_identity(lambda: is_asked_in(self.fn, args))
    return NOT_HANDLED


@handlers.at(KEYS, order=5)
def make_key(trace: Trace, proceed: Proceed, self: Any, vt: Any) -> Any:
    trace.state(Layers).asked_for_identity(lambda: is_object(vt))
    return NOT_HANDLED


@handlers.at(ITEMS, order=5)
def compare_items(trace: Trace, proceed: Proceed, one: Any, other: Any, /, *args: Any, **kwargs: Any) -> Any:
    trace.state(Layers).asked_for_identity(lambda: is_asked_of(one, other))
    return NOT_HANDLED


def changed(trace: Trace) -> None:
    trace.state(Layers).changed()


@dataclass
class _Traced:
    """A layer that was traced: its call, what it asked, and what it wrote to the graph.

    changes: how many objects that existed before had changed then. shared: sources of its objects that Dynamo knows
    under other sources, where their guards are. tensors: the inputs that it owns. calls: how often each of its modules
    was called. branches: those that it speculated on, as numbers.
    """

    call: Call
    changes: int
    asked: list[Asked]
    shared: list[tuple[Any, Any]]
    key_orders: list[Any]
    tensors: list[tuple[Any, Any]]
    original: Original
    results: Any
    calls: dict[str, int]
    branches: range


@dataclass(eq=False)
class _Recording:
    """A layer that is being traced. met_before: sources of its objects, and those under which Dynamo knows them."""

    born: int
    is_spoiled: bool = False
    met_before: list[tuple[Any, Any]] = field(default_factory=list)


class Layers:
    """The layers that a trace has met."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._kept: dict[Any, list[_Traced]] = defaultdict(list)
        self._traced: dict[Any, int] = defaultdict(int)
        self._open: list[_Recording] = []
        self._changes = 0
        self._owners = Owners()
        self._changed: set[int] = set()  # identities of the program's objects
        self._is_lost = False  # whether one has changed that is not known
        self._names: dict[Any, str] = {}  # of guards' sources
        self._copied: dict[Any, int] = defaultdict(int)  # by class
        self._failures: dict[Any, int] = defaultdict(int)  # until one was copied; and copies that were undone
        self._has_bodies = False  # whether checkpoints were copied

    def changes(self, effects: Any, item: Any) -> None:
        """Called for a change of one of Dynamo's variables."""
        identity, owner = self._owners.of(effects, item)
        when = -1 if item.is_tensor() else born(owner)
        if identity is not None:
            self._changed.add(identity)
        elif when < 0 and not item.is_tensor():
            self._is_lost = True
        self.changed(when)

    def changed(self, when: int = -1) -> None:
        """Called for a change of an object that was created at the time `when`; by default, before the trace.

        What the trace has made is reached through arguments, whose forms are compared, or is read as stored.
        """
        self._changes += when < 0
        if self._has_bodies and when < 0:
            self._check_store()
        self.used(when)

    def call(
        self, module: Any, tx: Any, args: Any, kwargs: Any, trace_it: Callable[[], Any], through: Any = None
    ) -> Any:
        """The result of a call of a module, copied or traced. through: the operator that calls it, if any."""
        if not self.may_copy(module, tx) or (called := Call.of(module, tx, args, kwargs, through)) is None:
            return NOT_HANDLED
        found = self.copied(called)
        return self.traced(called, trace_it) if found is None else found

    def _check_store(self) -> None:
        """What a checkpoint stores must not have been read by another (`stored_values`), and reads are not copied."""
        graph = self._trace.graph
        if graph is not None and graph.output.current_tracer.parent is not None:
            raise FeatureRejected(Feature.LAYERS, "a checkpoint stores, after checkpoints that were copied")

    def used(self, when: int) -> None:
        """Called where a use of an object depends on what the program did before, or changes it."""
        for recording in self._open:
            recording.is_spoiled |= when < recording.born

    def asked_for_identity(self, is_of_object: Callable[[], bool]) -> None:
        """Called where the program asks which object something is."""
        if self._open and is_of_object():
            self.used(-1)

    def met_before(self, own: Any, other: Any) -> None:
        for recording in self._open:
            recording.met_before.append((own, other))

    def may_copy(self, module: Any, tx: Any) -> bool:
        """Whether a call is one of a list's module, in the frame itself or in what it inlines."""
        if type(module) not in _MODULES or not isinstance(module.source, Source) or not any(module.value.children()):
            return False
        if not _MEMBER.search(module.source.name) or tx.output.current_tracer.parent is not None:
            return False
        kind, trace = type(module.value), self._trace
        if self._is_lost or self._failures[kind] >= _MOST_FAILURES:
            return False
        is_known = self._traced[kind] < _MOST_TRACED or bool(self._kept[kind])
        is_guarded = bool(config.guard_nn_modules)
        follows = any(is_following(trace) for is_following in trace.hooks("is_following"))
        return is_known and is_guarded and not (follows or trace.operators or trace.part or tx.output.export)

    def traced(self, call: Call, trace_it: Callable[[], Any]) -> Any:
        """Have a layer traced, and keep what it did, unless another layer's trace may do otherwise."""
        tx, root, recording = call.tx, call.tx.output.current_tracer.graph._root, _Recording(now())
        start, noted, calls, guards = (
            root.prev,
            noted_beside_graph(self._trace, tx.output),
            dict(tx.num_calls),
            len(tx.output.guards),
        )
        modules, sizes = set(tx.output.nn_modules), frozenset(tx.output.shape_env.var_to_range)
        answers, branches = len(self._trace.answers), len(self._trace.branches)
        self._open.append(recording)
        try:
            result = trace_it()
        finally:
            self._open.remove(recording)
        self._traced[call.kind] += 1
        if (
            self._traced[call.kind] > _MOST_TRACED
            or recording.is_spoiled
            or noted_beside_graph(self._trace, tx.output) != noted
        ):
            return result
        called = {name: count for name, count in tx.num_calls.items() if count != calls.get(name, 0)}
        nodes = [node for node in reversed(list(nodes_after(start, root))) if node.op != "placeholder"]
        results = nodes_of(result)
        if start._erased or any(name in calls for name in called) or results is UNKNOWN:
            return result
        if not {*leaves(results)} <= {*nodes, *call.forms}:
            return result
        every = list(tx.output.guards)
        if _has_hooks(call.module.value) or any(map(_is_ours, every[guards:])) or not call.is_unchanged():
            return result
        move = Relocation(call.module.source, _ELSEWHERE)
        asked = asked_of(self._naming(every, call.module.source.name), move)
        if asked is None:
            return result
        own = set(tx.output.nn_modules) - modules
        if not all(can_copy(tx.output, node) for node in nodes):
            return result
        bodies = set(_bodies(tx.output, nodes))
        if own - bodies:
            return result
        if bodies and checkpoint_writes.have_been_found(self._trace):
            return result
        made, speculated = made_since(tx.output.shape_env, sizes), range(branches, len(self._trace.branches))
        if (made or speculated) and (
            len(self._trace.answers) > answers or not self._can_make_again(tx, nodes, results, made, speculated)
        ):
            return result
        read = reader_of(tx.output)
        tensors = [(guard.source, _input(tx, guard.source, read)) for guard in asked if guard.kind in TENSORS]
        if not _are_all(tensors, nodes, call, move) or _has_numbers(tx, move):
            return result
        orders = [each for each in tx.output.guard_on_key_order if move.moves(each)]
        shared = [pair for pair in recording.met_before if move.moves(pair[0]) and not move.moves(pair[1])]
        original = Original.of(tx.output, nodes, made, {*leaves(results)})
        kept = _Traced(call, self._changes, asked, shared, orders, tensors, original, results, called, speculated)
        self._kept[call.kind].append(kept)
        return result

    def _can_make_again(
        self, tx: Any, nodes: list[Node], results: Any, sizes: Collection[Any], branches: range
    ) -> bool:
        """Whether copies of nodes make sizes like these, and copies of branches are all that speculation adds."""
        every = [*nodes, *inner_nodes(tx.output, nodes)]
        bound = [symbol for node in every for symbol in node.meta.get("unbacked_bindings") or ()]
        if sorted(bound, key=str) != sorted(sizes, key=str) or any(self._trace.is_metadata(size) for size in sizes):
            return False
        return all(can(self._trace, branches, every, [*leaves(results)]) for can in self._trace.hooks("can_be_copied"))

    def _naming(self, guards: Iterable[Any], name: str) -> Iterator[Any]:
        """The guards whose source has `name` in its own."""
        for guard in guards:
            source = guard.originating_source
            if source not in self._names:
                self._names[source] = source.name
            if name in self._names[source]:
                yield guard

    def copied(self, call: Call) -> Any:
        """The result of a layer as that of an equal one; None if there is none."""
        for traced in self._kept[call.kind]:
            replaced = traced.call.replaced_by(call) if traced.changes == self._changes else None
            found = self._copy(traced, call, replaced) if replaced is not None else None
            if found is not None:
                return found
        return None

    def _copy(self, traced: _Traced, call: Call, replaced: dict[Node, Node]) -> Any:
        tx, output = call.tx, call.tx.output
        move, read = Relocation(traced.call.module.source, call.module.source), reader_of(output)
        names = Renaming(traced.call, call)
        if any(names.path(name) in tx.num_calls for name in traced.calls) or _has_hooks(call.module.value):
            return None
        if not are_equal(traced.asked, [own for own, _ in traced.shared], self._changed, move, read):
            self._failures[call.kind] += not self._copied[call.kind]
            return None
        if not all(may_replace(self._trace, replaced) for may_replace in self._trace.hooks("may_replace")):
            return None
        if not all(_is_constant(tx, move(guard.source), read) for guard in traced.asked):
            return None
        noted, sizes = noted_beside_graph(self._trace, tx.output), frozenset(output.shape_env.var_to_range)
        nodes, tensors = output.current_tracer.graph.nodes, dict[Node, Node]()
        for source, node in traced.tensors:
            before = len(nodes)
            found = _input(tx, move(source), read)
            if found is None or form_of(found.meta["example_value"]) != form_of(node.meta["example_value"]):
                return None
            if len(nodes) > before:  # a new input, with the places of the original
                found.meta.update({key: node.meta[key] for key in _PLACES if key in node.meta})
                names.describe(found.meta)
            tensors[node] = found
        if len({*tensors.values(), *call.forms}) < len(set(tensors)) + len(call.forms):
            return None  # the traced one has more tensors
        copying = Copying(tx, traced.original, {**replaced, **tensors}, names.describe)
        returned = set(leaves(traced.results)).intersection(traced.original.nodes)
        try:
            variables = copying.copy(returned)
            if noted_beside_graph(self._trace, tx.output) != noted or not call.is_unchanged():
                raise Different("its operators have other effects")
            known = made_since(output.shape_env, sizes)
            if known != copying.expected() or any(self._trace.is_metadata(size) for size in known):
                raise Different("it makes other sizes")
        except (Different, TorchDynamoException):
            if made_since(output.shape_env, sizes):  # which operands from outside may remember
                raise FeatureRejected(Feature.LAYERS, "a copy of a layer makes other sizes") from None
            copying.undo(self._trace.erase)
            self._failures[call.kind] += _MOST_FAILURES // 2  # takes as long as a trace
            return None
        for copied in self._trace.hooks("copied") if traced.original.sizes or traced.branches else ():
            copied(self._trace, traced.branches, copying.copies, copying.symbols)
        self._copied[call.kind] += 1
        for own, other in traced.shared:
            self.met_before(move(own), other)
        self._has_bodies |= any(node.op == "get_attr" for node in traced.original.nodes)
        for guard in traced.asked:
            if guard.kind not in TENSORS:
                output.guards.add(guard.moved(move), collect_debug_stack=False)
        output.guard_on_key_order.update(map(move, traced.key_orders))
        tx.num_calls.update({names.path(name): count for name, count in traced.calls.items()})
        given = call.variables()
        passed = {node: given[other] for node, other in replaced.items() if other in given}
        return rebuilt(traced.results, {**passed, **variables})


_MODULES = (UnspecializedNNModuleVariable, UnspecializedBuiltinNNModuleVariable)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLACES = ("nn_module_stack", "stack_trace")
_ELSEWHERE = LocalSource("fxpasses_elsewhere")


def _bodies(output: Any, nodes: Iterable[Node]) -> Iterator[str]:
    """The names of the bodies of checkpoints, and of those in them."""
    for node in nodes:
        if node.op == "get_attr":
            yield str(node.target)
            yield from _bodies(output, output.nn_modules[node.target].graph.nodes)


def _built(tx: Any, source: Any, value: Any) -> Any:
    found = VariableBuilder(tx, source)(value)
    return found.realize() if isinstance(found, LazyVariableTracker) else found


def _input(tx: Any, source: Any, read: Reader) -> Node | None:
    """The graph's input for a tensor, which Dynamo makes if there is none; None if it takes it otherwise."""
    found = _built(tx, source, read(source))
    node = found.as_proxy().node if type(found) is TensorVariable else None
    return node if node is not None and node.op == "placeholder" else None


def _are_all(tensors: list[tuple[Any, Node | None]], nodes: list[Node], call: Call, move: Relocation) -> bool:
    """Whether `tensors` are all inputs of the graph that a layer owns and uses, and none is an argument as well."""
    inputs = {node for _, node in tensors}
    used = {operand for node in nodes for operand in node.all_input_nodes if operand.op == "placeholder"}
    own = {node for node in used - call.forms.keys() if move.moves(_source(node))}
    return None not in inputs and own <= inputs and inputs.isdisjoint(call.forms)


def _is_constant(tx: Any, source: Any, read: Reader) -> bool:
    """Whether Dynamo takes what it reads there for a constant. It notes each float, to see whether it changes."""
    value = read(source)
    return type(value) is not float or type(_built(tx, source, value)) is ConstantVariable


def _source(placeholder: Node) -> Any:
    return getattr(placeholder.meta.get("grapharg"), "source", None)


def _has_numbers(tx: Any, move: Relocation) -> bool:
    """Whether a number of a layer's own is a symbol."""
    return any(move.moves(source) for found in tx.output.shape_env.var_to_sources.values() for source in found)


def _has_hooks(module: torch.nn.Module) -> bool:
    """Whether a module, or one in it, has hooks; where they are idempotent, other guards than Dynamo's say so."""
    return any(getattr(part, name, None) for part in module.modules() for name in _HOOKS)


def _is_ours(guard: Any) -> bool:
    """Whether a guard is this package's own, which may be on anything."""
    return bool(guard.create_fn_name().startswith("FXPASSES"))
