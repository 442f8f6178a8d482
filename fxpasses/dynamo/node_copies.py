"""Copies of nodes of a graph that Dynamo is writing, for other operands.

    h_1 = linear(h_0, w_0);  h_2 = gelu(h_1)          of `layers[0]`
    h_3 = linear(h_2, w_1);  h_4 = gelu(h_3)          the same nodes, for `layers[1]`

Each copy runs on its operands' fake tensors, as it would if Dynamo had traced it: views share memory, writes count, and
operators put their questions about sizes. Where that would only tell what is known from the original, the result is
made without (`dynamo/fresh_results.py`). What they have made must in the end be as the originals were when their layer
was traced, in all but its memory.

A checkpoint has a body, a graph of its own, which is copied with it. A size that is known only at run time has a symbol
of its own in each copy (`dynamo/made_sizes.py`). Where the nodes switch gradients or autocast, so do the copies.

Private names, checked on torch 2.11, 2.13 and 2.15: `torch._dynamo.utils.get_fake_value`, `set_example_value` and
`_disable_saved_tensors_hooks_during_tracing`; `wrap_fx_proxy`; of Dynamo's tracer, `create_node`, `proxy` and
`track_produced_symints`; of `OutputGraph`, `current_tracer`, `nn_modules` and `install_subgraph`; in a node's `meta`,
`unbacked_bindings`; of fake tensors, `nonzero_memo` and its likes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch._dynamo import utils
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, disable_fake_tensor_cache
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fxpasses.base.collector import visiting_what_is_new
from fxpasses.dynamo.equal_guards import storage_size
from fxpasses.dynamo.fresh_results import FreshResults, Made, distance, is_leaf, made_in, writes_in
from fxpasses.dynamo.made_sizes import Known, renamed
from fxpasses.graph.calls import operator_of
from fxpasses.graph.symbols import expression, is_symbolic
from fxpasses.graph.traits import CASTS


class Different(Exception):
    """A copy has another result than its original."""


def form_of(value: Any) -> Any:
    """What a trace may ask of a value of a graph, besides its contents and its memory."""
    return tuple(map(_form, pytree.tree_leaves(value)))


def form_anywhere(value: Any) -> Any:
    """The same of values that may begin at another place of their memory, as the rows of a matrix do.

    A trace that asks for the place has the answer, a number, in its graph, which is compared.
    """
    return tuple(_form(leaf, is_placed=False) for leaf in pytree.tree_leaves(value))


def _form(value: Any, is_placed: bool = True) -> Any:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        place = value.storage_offset() if value.layout is torch.strided and is_placed else 0
        sizes = tuple(map(expression, (*value.shape, *strides, place, storage_size(value))))
        flags = value.requires_grad, is_leaf(value), value.is_conj(), value.is_neg(), value.is_inference()
        return type(value), len(value.shape), sizes, value.dtype, value.device, value.layout, flags
    return type(value), expression(value) if is_symbolic(value) else repr(value)


def answered_by(value: Any) -> Any:
    """Of a fake tensor, which sizes and numbers have been made of its contents, and are not made again."""
    return tuple(getattr(value, name, None) is not None for name in _MEMOS)


def can_copy(output: Any, node: Node) -> bool:
    """Whether a copy of a node, on its operands' fake tensors, does all that tracing it has done."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        body = output.nn_modules.get(node.target)
        users = list(node.users)
        is_body = isinstance(body, GraphModule) and len(users) == 1 and users[0].args[:1] == (node,)
        return is_body and users[0].target is _CHECKPOINT and all(can_copy(output, inner) for inner in body.graph.nodes)
    if node.op == "call_function" and node.target in _MODES:
        return True
    if node.op == "call_function" and node.target in _WITHOUT_VALUES:
        return True
    is_call = node.op in ("call_function", "call_method") and "example_value" in node.meta
    return is_call and (node.target is _CHECKPOINT or not isinstance(node.target, HigherOrderOperator))


def inner_nodes(output: Any, nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes of the bodies of checkpoints."""
    for node in nodes:
        if node.op == "get_attr":
            inner = list(output.nn_modules[node.target].graph.nodes)
            yield from inner
            yield from inner_nodes(output, inner)


@dataclass(frozen=True)
class Original:
    """Nodes to copy, as they were when the last of them had been written.

    form: what is to be the same of a copy's value. forms: of the nodes' values, and of those in bodies. sizes: the
    symbols that they have made, and what was known of them. made: how to make the values of nodes whose copies need not
    run. writes: the nodes that only write to their first operand.
    """

    nodes: Sequence[Node]
    form: Callable[[Any], Any]
    forms: Mapping[Node, Any]
    sizes: Mapping[Any, Known]
    made: Mapping[Node, Made]
    writes: frozenset[Node]

    @staticmethod
    def of(
        output: Any,
        nodes: Sequence[Node],
        sizes: Mapping[Any, Known],
        returned: Collection[Node],
        form: Callable[[Any], Any] = form_of,
    ) -> Original:
        """returned: the nodes that are used outside, which a program may write to."""
        every = [*nodes, *inner_nodes(output, nodes)]
        forms = {node: form(node.meta["example_value"]) for node in every if "example_value" in node.meta}
        results = FreshResults(output, sizes, {})
        made = {}
        for found in made_in(every, sizes, returned):
            operand = found.source.meta["example_value"] if found.source is not None else None
            if form(results.like(found, operand)) == forms[found.node]:
                made[found.node] = found
        return Original(nodes, form, forms, sizes, made, frozenset(writes_in(every, sizes)))


class Copying:
    """replaced: for each original operand, what the copies take in its place.

    describe: is given the `meta` of each copy, which is that of its original, to correct it. arguments: of copies that
    have others than their originals, by original. copies: by original node. symbols: of sizes that are known only at
    run time, by those of the originals.
    """

    def __init__(
        self,
        tx: Any,
        original: Original,
        replaced: Mapping[Node, Node],
        describe: Callable[[dict[str, Any]], None],
        arguments: Mapping[Node, Any] = MappingProxyType({}),
    ) -> None:
        self._original, self._arguments = original, arguments
        self.tx, self._output, self._describe = tx, tx.output, describe
        self._replaced = dict(replaced)
        self.copies: dict[Node, Node] = {}
        self.symbols: dict[Any, Any] = {}
        self._fresh = FreshResults(self._output, original.sizes, self.symbols)
        self._made: list[Node] = []
        self._as_original: set[Node] = set()  # whose copies are so by the way in which they were made
        self._untracked: set[Any] = set()  # symbols that Dynamo does not know yet where to read
        self._bodies: list[str] = []
        self._had_gradients = torch.is_grad_enabled()
        self._entered: dict[Node, Any] = {}  # regions of autocast

    @visiting_what_is_new()
    def copy(self, wrapped: Collection[Node]) -> dict[Node, Any]:
        """Copy the nodes; returns Dynamo's variables for the copies of those in `wrapped`.

        If they make sizes that are known only at run time, no other copy has these, and fake results are not looked up:
        PyTorch would compute each of them twice, to keep it.

        Raises `Different`, and whatever an operator raises.
        """
        with disable_fake_tensor_cache(self._output.fake_mode) if self._original.sizes else nullcontext():
            self._copy()
        self._check()
        tracer = self._output.current_tracer
        return {node: self._variable(tracer, self.copies[node]) for node in wrapped}

    def _copy(self) -> None:
        tracer = self._output.current_tracer
        for node in self._original.nodes:
            target = self._body(node) if node.op == "get_attr" else node.target
            arguments = self._arguments.get(node, node.args)
            args, kwargs = map_arg((arguments, node.kwargs), lambda operand: self._replaced.get(operand, operand))
            copy = tracer.create_node(node.op, target, args, kwargs, node.name, node.type)
            self._replaced[node] = copy
            self._made.append(copy)
            self._note(node, copy)
            if node.op != "get_attr":
                self._run(node, copy)

    def _variable(self, tracer: Any, copy: Node) -> Any:
        """Dynamo's variable for a copy, made after the writes to it."""
        value = copy.meta.pop("example_value")  # which is to be given, or in the node, and not both
        return wrap_fx_proxy(self.tx, tracer.proxy(copy), example_value=value)

    def expected(self) -> dict[Any, Known]:
        """What is to be known of the symbols that the copies have made."""
        return {renamed(old, self.symbols): of.renamed(self.symbols) for old, of in self._original.sizes.items()}

    def undo(self, erase: Callable[[list[Node]], None]) -> None:
        for entered in reversed(self._entered.values()):
            _exit_autocast(entered)
        torch._C._set_grad_enabled(self._had_gradients)
        erase(self._made)
        for name in self._bodies:
            del self._output.nn_modules[name]

    def _note(self, node: Node, copy: Node) -> None:
        self.copies[node] = copy
        kept = {key: value for key, value in node.meta.items() if key not in _OWN}
        copy.meta = {**kept, **{key: value for key, value in copy.meta.items() if key in _OWN}}
        if "source_fn_stack" in kept:
            *outer, (_, target) = kept["source_fn_stack"]
            copy.meta["source_fn_stack"] = [*outer, (copy.name, target)]
        self._describe(copy.meta)

    def _run(self, node: Node, copy: Node) -> None:
        """Give a copy its example, a fake tensor or several."""
        copy.meta.pop("example_value", None)
        if node.target in _MODES:
            self._switch(copy)
            return
        if "example_value" not in node.meta:
            if node.target is operator.setitem:
                utils.get_fake_value(copy, self.tx, allow_non_graph_fake=True)
            return
        made = self._original.made.get(node)
        further = distance(made, copy.args[1]) if made is not None and node in self._arguments else 0
        if made is not None and further is not None:
            operand = copy.all_input_nodes[0].meta["example_value"] if made.source is not None else None
            value = self._fresh.of(made, operand, further)
            self._as_original.add(node)
        elif node in self._original.writes and self._is_as_written(node, copy):
            value = copy.args[0].meta["example_value"]  # type: ignore[union-attr]
            torch.autograd.graph.increment_version(value)
        elif _returns_operand(node):
            value = copy.args[0].meta["example_value"]  # type: ignore[union-attr]
        elif _is_item(node):
            operand, place = copy.args
            value = operand.meta["example_value"][place]  # type: ignore[union-attr]
        elif node.target is _CHECKPOINT:
            (reference, *_) = copy.all_input_nodes
            (results,) = self._output.nn_modules[reference.target].graph.output_node().args
            value = map_arg(results, lambda result: result.meta["example_value"])
        else:
            with utils._disable_saved_tensors_hooks_during_tracing():
                value = utils.get_fake_value(copy, self.tx, allow_non_graph_fake=True)
        utils.set_example_value(copy, value)
        self._learn(node, copy)
        if self._untracked and isinstance(value, _SIZED):
            self._track(copy, value)

    def _is_as_written(self, node: Node, copy: Node) -> bool:
        """Whether a copy's operand is already as the original's after its write, but for its elements."""
        value = copy.args[0].meta["example_value"]  # type: ignore[union-attr]
        is_plain = type(value) is FakeTensor and value.constant is None and not value._is_view()
        return is_plain and self._original.form(value) == renamed(self._original.forms[node], self.symbols)

    def _track(self, copy: Node, value: Any) -> None:
        """Let Dynamo know where bodies may read sizes that a copy has made."""
        tracer = self._output.current_tracer
        if copy.graph is tracer.graph:
            tracer.track_produced_symints(value, tracer.proxy(copy))
            self._untracked.difference_update(
                map(expression, value.shape if isinstance(value, torch.Tensor) else [value])
            )

    def _switch(self, copy: Node) -> None:
        if copy.target is torch._C._set_grad_enabled:
            torch._C._set_grad_enabled(*copy.args)
        elif copy.target is _enter_autocast:
            self._entered[copy] = _enter_autocast(*copy.args)
        else:
            _exit_autocast(self._entered.pop(copy.args[0]))  # type: ignore[arg-type]

    def _learn(self, node: Node, copy: Node) -> None:
        """Note the sizes that a copy makes."""
        bound, made = (each.meta.get("unbacked_bindings") or {} for each in (node, copy))
        if [*bound.values()] != [*made.values()]:
            raise Different(f"{copy.name} makes other sizes than {node.name}")
        self.symbols.update(zip(bound, made, strict=True))
        self._untracked.update(made)

    def _check(self) -> None:
        if self._entered or torch.is_grad_enabled() is not self._had_gradients:
            raise Different("the copies end in another mode")
        for node, form in self._original.forms.items():
            if node in self._as_original:
                continue
            copy = self.copies[node]
            if self._original.form(copy.meta["example_value"]) != renamed(form, self.symbols):
                raise Different(f"{copy.name} is not as {node.name}")

    def _body(self, node: Node) -> str:
        """The name of a copy of a checkpoint's body, for the copied operands of the checkpoint."""
        body = self._output.nn_modules[node.target]
        (user,) = node.users
        operands = [operand for operand in user.args[1:] if isinstance(operand, Node)]
        given = [self._replaced.get(operand, operand) for operand in operands]
        graph, copies = Graph(), dict[Node, Node]()
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                operand = given.pop(0)
                copy = graph.create_node("placeholder", operand.name, (), {}, operand.name, inner.type)
                utils.set_example_value(copy, operand.meta["example_value"])
            else:
                copy = graph.node_copy(inner, lambda operand: copies[operand])
            copies[inner] = copy
            outer, self._replaced = self._replaced, {**self._replaced, **copies}
            if inner.op == "get_attr":
                copy.target = self._body(inner)
            self._replaced = outer
            self._note(inner, copy)
            if inner.op not in ("placeholder", "get_attr", "output"):
                self._run(inner, copy)
        made = GraphModule(self._output.nn_modules, graph)
        made.meta = dict(body.meta)
        self._bodies.append(self._output.install_subgraph("wrap_body", made))
        return self._bodies[-1]


def _is_item(node: Node) -> bool:
    """Whether a node takes one of an operator's results."""
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return False
    return isinstance(node.args[0].meta.get("example_value"), (tuple, list)) and type(node.args[1]) is int


def _returns_operand(node: Node) -> bool:
    """Whether a conversion has nothing to convert, and returns its operand: it would for all tensors of this form."""
    is_conversion = operator_of(node) in CASTS and node.all_input_nodes == [node.args[0]]
    return is_conversion and node.all_input_nodes[0].meta.get("example_value") is node.meta["example_value"]


_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_MEMOS = ("nonzero_memo", "item_memo", "unique_memo", "unique_consecutive_memo")
_MODES = (torch._C._set_grad_enabled, _enter_autocast, _exit_autocast)
_WITHOUT_VALUES = (operator.setitem, operator.getitem)  # `x[i] = y`; the elements of `x.tolist()`
_SIZED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_OWN = frozenset({"example_value", "creation_timestamp", "unbacked_bindings"})  # of each node
