"""`fastpack.outputs="lazy"`: logits that are returned beside a loss are computed only if something reads them.

Before, a causal model's graph returns its logits, so they exist in full, and every row is needed:

    return loss, logits

After, it returns only the loss, and the caller gets a `LazyTensor` in place of the logits. If the graph cannot be run
twice with the same result, because it draws random numbers, writes to its inputs, or communicates, outputs stay. Once
something has read a lazy output, the frame is compiled again, with all of its outputs.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._sympy.printers import PythonPrinter

from fxpasses.base.containment import contained
from fxpasses.base.once import warn_once
from fxpasses.dynamo.checks import Check
from fxpasses.dynamo.dynamo_names import guard_compiled_graph
from fxpasses.dynamo.guarding import can_guard
from fxpasses.graph.aliases import storages, written_operands
from fxpasses.graph.bodies import nodes_in
from fxpasses.graph.calls import OperatorCall, operator_of
from fxpasses.graph.collectives import communicates
from fxpasses.graph.copying import copy_graph_module
from fxpasses.graph.effects import draws
from fxpasses.graph.reachability import reached
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import is_unbacked
from fxpasses.loss.lazy_tensor import Source, lazy_output
from fxpasses.loss.region import candidates, find_regions
from fxpasses.metadata.runtime.prologue import autocast_state
from fxpasses.report import Reason, Refusal, Report
from fxpasses.rows.nodes import shape_of

# Frames that had a lazy output read. Dynamo's guards know a frame only by its code.
_read: weakref.WeakSet[CodeType] = weakref.WeakSet()


@dataclass(frozen=True, eq=False)
class LeftOut:
    """A graph without some outputs. gm: the graph. whole: the one with all outputs. positions: those left out.

    reads: the positions of the inputs that these depend on. examples: theirs. sizes: compute their sizes from the
    inputs. code: the frame's. report: what was done. may_draw: whether the graph has operators that may draw random
    numbers.
    """

    gm: GraphModule
    whole: GraphModule
    positions: tuple[int, ...]
    reads: tuple[int, ...]
    examples: tuple[Any, ...]
    sizes: Sequence[Callable[..., Any]]
    code: CodeType | None
    report: Report
    may_draw: bool

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """`compiled`, with lazy tensors in place of the outputs that it does not compute."""
        sizes, may_draw = self.sizes, self.may_draw
        kept: Any = self.gm.graph.output_node().args[0]
        count = len(kept) + len(self.positions)
        autocast = autocast_state()
        positions, examples, captured = self.positions, self.examples, self.whole.forward

        def run(*inputs: Any) -> Any:
            if any(isinstance(value, FakeTensor) for value in inputs):  # DDPOptimizer wants the sizes of results
                return captured(*inputs)
            before = _random_state(inputs) if may_draw else ()
            found = iter(compiled(*inputs))
            drew = may_draw and any(map(_differ, before, _random_state(inputs)))
            if drew and self.code is not None:
                _read.add(self.code)

            def compute(*inputs: Any) -> Sequence[Any]:
                if drew:
                    raise RuntimeError(
                        "this output was not computed, and would be computed with other random numbers than the loss: "
                        'the next call computes it, or compile with options={"fastpack.outputs": "exact"}'
                    )
                with contextlib.ExitStack() as stack:
                    for device in ("cpu", "cuda"):
                        known = {own: dtype for own, dtype, _ in autocast}
                        enabled = device in known
                        if enabled or torch.is_autocast_enabled(device):
                            stack.enter_context(torch.autocast(device, dtype=known.get(device), enabled=enabled))
                    every = captured(*inputs)
                return [every[at] for at in positions]

            with contained("leaving out what a program returns", "It is computed, and so is the rest once more."):
                source = Source(compute, inputs, self.reads, self._is_read)
                lazy = [
                    lazy_output(of(*inputs), example.dtype, example.device, example.requires_grad, source, at)
                    for at, (of, example) in enumerate(zip(sizes, examples, strict=True))
                ]
                placed = dict(zip(positions, lazy, strict=True))
                return tuple(placed[at] if at in placed else next(found) for at in range(count))
            return captured(*inputs)

        return run

    def _is_read(self, is_computed: bool) -> None:
        """From now on the outputs are computed in each step: an error because inputs have changed is the only one."""
        if self.code is not None:
            _read.add(self.code)
        if not is_computed:
            return
        warn_once(
            ("lazy outputs", self.code),
            'an output that "fastpack.outputs": "lazy" had not computed was read. It was computed, by the graph as it '
            "was captured, and is from now on computed in each step.",
            4,
        )


@dataclass(frozen=True)
class SavedLeftOut:
    """What another process makes a `LeftOut` from, besides the graph without the outputs."""

    whole: GraphModule
    positions: tuple[int, ...]
    reads: tuple[int, ...]
    examples: tuple[Any, ...]
    may_draw: bool

    @classmethod
    def of(cls, left_out: LeftOut) -> SavedLeftOut:
        return cls(left_out.whole, left_out.positions, left_out.reads, left_out.examples, left_out.may_draw)

    def again(self, gm: GraphModule, code: CodeType | None) -> LeftOut:
        """Called while Dynamo compiles `gm`, the graph without the outputs. Raises `RuntimeError` if something has read
        such an output, or if no guard can tell."""
        sizes = _sizes(self.whole, self.examples)
        if sizes is None or code is None or code in _read or not _guard(code):
            raise RuntimeError("the outputs that are left out may be read")
        report = Report("lazy_outputs", figures={"lazy_outputs": len(self.positions)})
        return LeftOut(gm, self.whole, self.positions, self.reads, self.examples, sizes, code, report, self.may_draw)


def leave_out(gm: GraphModule, code: CodeType | None, is_whole: bool) -> LeftOut | Report | None:
    """The graph without its logits; a report of why they stay; or None if it does not return any beside a loss.

    code: the frame's. is_whole: whether the graph is the whole program. Called while Dynamo compiles the graph.
    """
    if not torch.is_grad_enabled():
        return None
    results: Any = gm.graph.output_node().args[0]
    logits = _logits(gm)
    positions = tuple(at for at, node in enumerate(results) if node in logits)
    trained = [node for at, node in enumerate(results) if at not in positions and _is_loss(node)]
    if not positions or not trained:
        return None
    report = Report("lazy_outputs")
    sizes = _sizes(gm, [results[at].meta["example_value"] for at in positions])
    refusal = _refusal(gm, [results[at] for at in positions], is_whole)
    if refusal is None and sizes is None:
        refusal = Refusal(results[positions[0]].name, Reason.UNKNOWN_SIZE)
    shared = {storage for at in positions for storage in storages(results[at])}
    others = [node for at, node in enumerate(results) if at not in positions and isinstance(node, Node)]
    if refusal is None and any(not shared.isdisjoint(storages(node)) for node in others):
        refusal = Refusal(results[positions[0]].name, Reason.ESCAPES)
    if refusal is None and code is not None and code in _read:
        refusal = Refusal(results[positions[0]].name, Reason.READ_IN_FULL, "the program has read it before")
    if refusal is None and (code is None or not _guard(code)):
        refusal = Refusal(results[positions[0]].name, Reason.UNCHECKED_TORCH, "no guard can tell that it is read")
    if refusal is not None:
        report.refusals.append(refusal)
        return report
    rest = copy_graph_module(gm)
    for name in ("compile_subgraph_reason",):
        if hasattr(gm, name):
            setattr(rest, name, getattr(gm, name))
    output = rest.graph.output_node()
    kept: Any = output.args[0]
    output.args = (tuple(node for at, node in enumerate(kept) if at not in positions),)
    rest.graph.eliminate_dead_code(is_impure_node=_stays)
    rest.recompile()
    report.changed = True
    report.changes = [f"`{results[at].name}` is computed if something reads it" for at in positions]
    report.summary = f"{len(positions)} output{'s' * (len(positions) > 1)} computed if read"
    report.figures = {"lazy_outputs": len(positions)}
    examples = tuple(results[at].meta["example_value"] for at in positions)
    assert sizes is not None
    reads = _inputs_of(gm, [results[at] for at in positions])
    may_draw = any(map(_is_opaque, nodes_in(gm)))
    return LeftOut(rest, gm, positions, reads, examples, sizes, code, report, may_draw)


def _inputs_of(gm: GraphModule, results: Sequence[Node]) -> tuple[int, ...]:
    """The positions of the inputs that some results depend on; all, if the graph writes to anything."""
    inputs = gm.graph.find_nodes(op="placeholder")
    if any(written_operands(node) for node in nodes_in(gm)):
        return tuple(range(len(inputs)))
    found = reached(list(results), lambda node: node.all_input_nodes)
    return tuple(at for at, node in enumerate(inputs) if node in found)


def _logits(gm: GraphModule) -> set[Node]:
    """The values with all columns of large products whose rows are read one by one."""
    found: set[Node] = set()
    for region in find_regions(Region(gm), candidates(gm.graph)):
        for node, form in region.forms.items():
            own = form if isinstance(form, tuple) else (form,)
            if not isinstance(form, tuple) and own[0].columns == int(shape_of(region.products[0].node)[-1]):
                found.add(node)
    return found


def _is_loss(node: Any) -> bool:
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    return isinstance(example, torch.Tensor) and example.requires_grad and example.dim() == 0


def _refusal(gm: GraphModule, logits: Sequence[Node], is_whole: bool) -> Refusal | None:
    """Why outputs cannot be computed later; None if they can."""
    first = logits[0].name
    if not is_whole:
        return Refusal(first, Reason.READ_IN_FULL, "the program goes on after the graph")
    if communicates(gm):
        return Refusal(first, Reason.COLLECTIVE, "the graph would communicate twice")
    if any(is_unbacked(node.meta["example_value"]) for node in logits):
        return Refusal(first, Reason.UNKNOWN_SIZE)
    given = {storage for node in nodes_in(gm) if node.op in ("placeholder", "get_attr") for storage in storages(node)}
    for node in nodes_in(gm):
        if _draws(node, logits[0].meta["example_value"].fake_mode):
            return Refusal(first, Reason.RANDOM, f"`{node.name}` would draw other numbers")
        if operator_of(node) == "embedding" and OperatorCall.of(node).argument("max_norm") is not None:
            return Refusal(first, Reason.INPUT_WRITTEN, f"`{node.name}` would write to its weight twice")
        for written in written_operands(node):
            if written.op == "placeholder" or not given.isdisjoint(storages(written)):
                return Refusal(first, Reason.INPUT_WRITTEN, f"`{written.name}` would be written twice")
    return None


def _is_opaque(node: Node) -> bool:
    """Whether a node calls an operator of another library, whose tags may be missing."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace not in ("aten", "prims", "fxpasses")


def _draws(node: Node, fake_mode: Any) -> bool:
    """Whether a node draws random numbers."""
    if not node.op.startswith("call"):
        return False
    name, call = operator_of(node), OperatorCall.of(node)
    if "dropout" in name and "::" not in name:
        p, training = call.argument("p", 0.5), call.argument("training", call.argument("train", True))
        return training is not False and p not in (0, 0.0)
    if call.argument("dropout_p") not in (None, 0, 0.0):
        return True
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if packet is None and isinstance(node.target, FunctionType):  # a Python function, which may call anything
        return draws(node, fake_mode)
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    if packet is None or name == "scaled_dot_product_attention":
        return False
    overloads = (getattr(packet, each) for each in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _stays(node: Node) -> bool:
    """Whether a node is needed even without users: any node except a call that only makes a value."""
    if node.op in ("placeholder", "output"):
        return True
    example = node.meta.get("example_value")
    makes = isinstance(example, (torch.Tensor, tuple, list, int, torch.SymInt)) and not isinstance(example, bool)
    return not (makes and node.op.startswith("call") and not written_operands(node) and example != ())


def _guard(code: CodeType) -> bool:
    """Add a guard to the graph that Dynamo compiles: nothing has read a lazy output of its frame."""
    if not can_guard():
        return False
    check = Check(lambda: code not in _read, None, code, "outputs that are read")
    return guard_compiled_graph(check, [], "nothing has read a lazy output")


def _random_state(inputs: Sequence[Any]) -> list[torch.Tensor]:
    devices = {x.device for x in inputs if isinstance(x, torch.Tensor) and x.is_cuda}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in sorted(devices, key=str))]


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.equal(one, other)


def _sizes(gm: GraphModule, examples: Sequence[Any]) -> list[Callable[..., Any]] | None:
    """For each example, a function from the graph's inputs to its sizes; None if the inputs do not determine them."""
    places: dict[Any, Callable[..., Any]] = {}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        given = node.meta.get("example_value")
        if isinstance(given, torch.SymInt):
            places.setdefault(given.node.expr, _number(position))
        elif isinstance(given, torch.Tensor):
            for axis, size in enumerate(given.shape):
                if isinstance(size, torch.SymInt):
                    places.setdefault(size.node.expr, _axis(position, axis))
    found = [_evaluated([_expression(size) for size in example.shape], places) for example in examples]
    return None if None in found else found  # type: ignore[return-value]


def _number(position: int) -> Callable[..., Any]:
    return lambda inputs: inputs[position]


def _axis(position: int, axis: int) -> Callable[..., Any]:
    return lambda inputs: inputs[position].shape[axis]


def _expression(size: Any) -> Any:
    return sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size)


def _evaluated(sizes: Sequence[Any], places: dict[Any, Callable[..., Any]]) -> Callable[..., Any] | None:
    symbols = sorted({found for size in sizes for found in size.free_symbols}, key=str)
    if not places.keys() >= set(symbols):
        return None
    printed = ", ".join(PythonPrinter().doprint(size) for size in sizes)
    of = eval(f"lambda {', '.join(map(str, symbols))}: [{printed}]", {"math": math})

    def run(*inputs: Any) -> Any:
        return of(*(places[found](inputs) for found in symbols))

    return run
