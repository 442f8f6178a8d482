"""Under DDP, cuts the graph at DDP's buckets after the passes, and not when Dynamo has captured it.

AOTAutograd's backward returns all gradients at its end, so DDP could not reduce the first ones while the rest are
computed. PyTorch's DDPOptimizer therefore cuts the graph into pieces, one for each bucket. Dynamo wraps it around the
backend, which then sees pieces: each computes the metadata again, and cuts split loops. Here it moves to the inside:

    before:  Dynamo → DDPOptimizer → for each piece: passes, prologue, lowering
    after:   Dynamo → passes, prologue → DDPOptimizer → for each piece: lowering

PyTorch's optimizer does the cutting, with three corrections. It orders pieces by their data dependencies alone, so a
piece may run before an earlier one that writes to memory it reads or draws random numbers: here pieces keep their
order. It overlooks parameters that an operator takes in a list, as grouped products take those of experts. And it
passes numbers between pieces, although AOTAutograd takes no floats: here each piece recomputes them from the inputs.

Private names, checked on torch 2.13: the constructor, methods and attributes of DDPOptimizer that are listed below, and
its call of `torch.fx.passes.split_module.split_module`; `TracingContext.ddp_optimizer_ctx` and `fakify_first_call`. If
the class lacks one of its own, it stays outside. If it cuts in another way, the graph is compiled whole, with a
warning.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule, Node

from fxpasses.graph.copying import copy_graph_module
from fxpasses.graph.symbols import symbol
from fxpasses.report import OnReport, Report

NAME = "ddp_buckets"  # in the record

Compiled = Callable[..., Any]
Lower = Callable[[GraphModule, Sequence[Any]], Compiled]

_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
_METHODS = ("compile_fn", "add_param_args", "add_param", "_ignore_parameter")
_ATTRIBUTES = ("backend_compile_fn", "bucket_bytes_cap", "first_bucket_cap")

# The optimizer that Dynamo wrapped around the backend for the current frame, and that `moved_inside` removed.
_optimizer: ContextVar[Any] = ContextVar("fxpasses_ddp_optimizer", default=None)


def optimizer_among(wrappers: Iterable[Any]) -> Any | None:
    """The DDPOptimizer whose `compile_fn` is among a backend's wrappers, if any, and if it has the expected names."""
    for wrapper in wrappers:
        owner: Any = getattr(wrapper, "__self__", None)
        if all(hasattr(owner, name) for name in (*_METHODS, *_ATTRIBUTES)) and wrapper == owner.compile_fn:
            return owner
    return None


@contextlib.contextmanager
def moved_inside(optimizer: Any | None) -> Iterator[None]:
    """For one trace, have `compile_in_buckets` cut by `optimizer`, or not at all if it is None."""
    token = _optimizer.set(optimizer)
    try:
        yield
    finally:
        _optimizer.reset(token)


def wanted() -> bool:
    """Whether `compile_in_buckets` would cut."""
    return _optimizer.get() is not None


def compile_in_buckets(lower: Lower, gm: GraphModule, example_inputs: Sequence[Any], on_report: OnReport) -> Compiled:
    """Compile `gm` with `lower`: piece by piece if the current trace is of a model under DDP, else as a whole."""
    outer = _optimizer.get()
    if outer is None:
        return lower(gm, example_inputs)
    optimizer = _class()(outer.bucket_bytes_cap, lower, outer.first_bucket_cap)
    gm = copy_graph_module(gm)
    try:
        with _cut_by_split(gm) as cuts:
            compiled = optimizer.compile_fn(gm, list(example_inputs))
        pieces = len(optimizer.buckets)
        if pieces > 1 and not cuts:
            raise RuntimeError(f"DDPOptimizer of torch {torch.__version__} does not cut by `split_module`")
    except Exception:
        _forget_pieces()
        raise
    if pieces > 1:
        summary = f"compiled in {pieces} pieces, at DDP's buckets: gradients are reduced while backward runs"
        on_report(Report(NAME, summary=summary, figures={"pieces": pieces}))
    return compiled


@functools.cache
def _class() -> Any:
    """DDPOptimizer, extended to count the parameters that a node takes in lists and by keyword."""
    base: Any = importlib.import_module("torch._dynamo.backends.distributed").DDPOptimizer

    class Optimizer(base):
        def add_param_args(self, bucket: Any, node: Node) -> None:
            for operand in node.all_input_nodes:
                value = operand.meta.get("example_value") if operand.op == "placeholder" else None
                if isinstance(value, torch.nn.Parameter) and value.requires_grad and not self._ignore_parameter(value):
                    self.add_param(bucket, value, str(operand.target))

    return Optimizer


@contextlib.contextmanager
def _cut_by_split(gm: GraphModule) -> Iterator[list[GraphModule]]:
    """Have DDPOptimizer cut `gm`, and nothing else, by `_split`; yields the graphs that it cut.

    Entered under Dynamo's compile lock, so no other compilation sees the patch.
    """
    module: Any = importlib.import_module("torch.fx.passes.split_module")
    original = module.split_module
    cuts: list[GraphModule] = []

    @functools.wraps(original)
    def split_module(whole: GraphModule, root: Any, piece_of: Callable[[Node], int], *args: Any, **kwargs: Any) -> Any:
        if whole is not gm:
            return original(whole, root, piece_of, *args, **kwargs)
        cuts.append(whole)
        return _split(original, whole, piece_of)

    module.split_module = split_module
    try:
        yield cuts
    finally:
        module.split_module = original


def _split(split_module: Callable[..., Any], gm: GraphModule, piece_of: Callable[[Node], int]) -> Any:
    """PyTorch's `split_module`, with the pieces in order. `gm` is changed."""
    pieces = {node: piece_of(node) for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")}
    _name_sizes(gm.graph, pieces)
    _repeat_numbers(gm.graph, pieces)
    return split_module(gm, None, pieces.__getitem__, keep_original_order=True)


def _name_sizes(graph: Graph, pieces: dict[Node, int]) -> None:
    """Give each size that a node creates a node of its own, with which `split_module` passes it on.

    Dynamo makes these nodes; those that nothing used any more are gone.
    """
    named = {symbol(node.meta["example_value"]) for node in graph.nodes if _is_number(node)}
    for node, piece in list(pieces.items()):
        value = node.meta.get("example_value")
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        for axis, size in enumerate(shape):
            if symbol(size) in node.meta.get("unbacked_bindings", ()) and symbol(size) not in named:
                with graph.inserting_after(node):
                    name = graph.call_function(torch.ops.aten.sym_size.int, (node, axis))
                name.meta["example_value"] = size
                pieces[name] = piece
                named.add(symbol(size))


def _repeat_numbers(graph: Graph, pieces: dict[Node, int]) -> None:
    """Recompute numbers that follow from the graph's inputs in each piece that uses them; adds copies to `pieces`."""
    repeatable: set[Node] = set()
    copies: dict[tuple[int, Node], Node] = {}
    for user in list(graph.nodes):
        if user not in pieces:
            continue
        if _is_repeatable(user, repeatable):
            repeatable.add(user)
        piece = pieces[user]
        for number in user.all_input_nodes:
            if number in repeatable and pieces[number] != piece:
                user.replace_input_with(number, _repeated(number, piece, user, repeatable, copies))
    pieces.update({copy: piece for (piece, _), copy in copies.items()})


def _is_repeatable(node: Node, repeatable: set[Node]) -> bool:
    """Whether a node computes a number from the graph's input numbers, or from repeatable ones."""
    if not _is_number(node) or not node.all_input_nodes:
        return False
    if node.op == "call_method" and node.target == "item":
        return all(getattr(operand, "_dynamo_source", "") is None for operand in node.all_input_nodes)  # a packed float
    return all(n in repeatable or (n.op == "placeholder" and _is_number(n)) for n in node.all_input_nodes)


def _is_number(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), _NUMBERS)


def _repeated(
    number: Node, piece: int, user: Node, repeatable: set[Node], copies: dict[tuple[int, Node], Node]
) -> Node:
    """`number`, recomputed in `piece` before `user`, its first user there."""
    waiting = [number]
    while waiting:
        node = waiting[-1]
        missing = [n for n in node.all_input_nodes if n in repeatable and (piece, n) not in copies]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        if (piece, node) not in copies:
            with node.graph.inserting_before(user):
                copies[piece, node] = node.graph.node_copy(node, lambda n: copies.get((piece, n), n))
    return copies[piece, number]


def _forget_pieces() -> None:
    """Remove DDPOptimizer's state for pieces from Dynamo's context, so that the graph can be compiled whole."""
    context: Any = TracingContext.try_get()
    if context is not None:
        context.ddp_optimizer_ctx = None
        context.fakify_first_call = False
