"""The metadata of a graph that Dynamo is still writing, and its values for the batch being traced.

The rules are those of `metadata/analysis.py`: a number or a data-dependent size is metadata if it is computed
from integer inputs and sizes alone, with memory versions, through checkpoint bodies. A program like the prologue's
computes values from the real inputs, each once: value numbering recognises the same value in all layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
from torch._dynamo.source import RandomValueSource
from torch.fx import Graph, GraphModule, Node

from fxpasses.dynamo.dispatch_state import as_in_new_thread
from fxpasses.dynamo.passed_choices import is_passed
from fxpasses.graph.provenance import source
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import integer_behind, is_unbacked, symbol, symbol_as_created
from fxpasses.graph.values import Allocation, Many, Ref, Scalar, Tensor, Value
from fxpasses.metadata.analysis import Walk
from fxpasses.metadata.draft import Draft, Extra
from fxpasses.metadata.program import Program
from fxpasses.metadata.runtime.prologue import Prologue
from fxpasses.report import Reason

log = logging.getLogger(__name__)

# Operators whose result has a size that depends on one integer or bool argument, not on the other tensor's values.
_SIZED_BY_METADATA = frozenset({"getitem", "masked_select", "repeat_interleave"})
# Why the contents of an allocation become unknown after a use outside the closure.
_OVERWRITTEN = frozenset({Reason.WRITTEN_BY_LAYER, Reason.INPUT_WRITTEN, Reason.UNKNOWN_OPERATOR})


class NotKnown(Exception):
    """A symbol is not metadata, or its value cannot be computed."""


class PartialGraph:
    """output: Dynamo's `OutputGraph`. autocast: its state around the frame. on_failure: called with a walk's error."""

    def __init__(self, output: Any, autocast: Any, on_failure: Callable[[Exception], None]) -> None:
        self.output = output
        self._on_failure = on_failure
        self._autocast = autocast
        self._inference = torch.is_inference_mode_enabled()
        self._values: dict[Extra, Any] = {}
        self.is_walking = False
        self._over = False
        self._regions: dict[Any, _PartialRegion] = {}
        self.walk = _PartialWalk(output.fake_mode)

    def close(self) -> None:
        """The capture is over: ignore Dynamo's later changes of the graph, such as dead-code elimination."""
        self.walk_on()
        self._over = True

    def erase(self, nodes: list[Node]) -> None:
        """Take nodes out of a graph that is being written, which nothing else reads."""
        gone = set(nodes)
        for region in self._regions.values():
            while region.last in gone:
                region.last = region.last.prev
        for node in reversed(nodes):
            node.graph.erase_node(node)

    # Queries

    def is_metadata(self, node: Node) -> bool:
        self.walk_on()
        return isinstance(self.walk.values.get(node), (Scalar, Tensor))

    def is_number(self, found: Any) -> bool:
        """Whether a value of metadata defines a symbol."""
        self.walk_on()
        return found in self.walk.numbers

    def extra(self, found: Any) -> Extra:
        """The value that defines a symbol; raises `NotKnown`."""
        self.walk_on()
        try:
            return self.walk.numbers[found]
        except KeyError:
            raise NotKnown(str(found)) from None

    def value(self, found: Any) -> int | float:
        """The value of a symbol for the inputs being traced; raises `NotKnown`."""
        extra = self.extra(found)
        if extra not in self._values:
            self._values[extra] = self._compute(extra)
        return self._values[extra]

    def compute(self, symbols: Iterable[Any]) -> None:
        """Compute the values of those symbols that are metadata in one run."""
        self.walk_on()
        found = {self.walk.numbers[s] for s in symbols if s in self.walk.numbers}
        extras = sorted(found - self._values.keys(), key=str)
        try:
            values = self._run(extras) if extras else []
        except NotKnown:
            return  # each is tried by itself
        self._values.update((e, int(v) if isinstance(v, bool) else v) for e, v in zip(extras, values, strict=True))

    def tensors(self, nodes: list[Node]) -> list[torch.Tensor] | None:
        """The values of tensors of metadata for the inputs being traced; None if one is not known."""
        self.walk_on()
        found = [self.walk.values.get(node) for node in nodes]
        extras = [Extra(Ref(value.number, value.memory.version)) for value in found if isinstance(value, Tensor)]
        if len(extras) < len(nodes):
            return None
        try:
            return self._run(extras)
        except NotKnown:
            return None

    def is_size(self, found: Any) -> bool:
        """Whether a symbol is a size of an input, which Dynamo knows."""
        return found in self.output.shape_env.var_to_sources

    def size(self, found: Any) -> Any:
        """The value of such a size for the batch being traced."""
        return self.output.shape_env.backed_var_to_val.get(found)

    def size_source(self, found: Any) -> str:
        """Dynamo's source expression for such a size, `L['x'].size()[1]`."""
        name = self.output.shape_env.var_to_sources[found][0].name
        return name() if callable(name) else name

    def source_of(self, root: Node) -> str:
        """Dynamo's source expression for an input of the graph; raises `NotKnown` if it has none."""
        if name := source(root):
            return name
        example = root.meta["example_value"]
        size = symbol_as_created(example) if isinstance(example, torch.SymInt) else None
        if not self.is_size(size):
            raise NotKnown(f"`{root.name}` is no input of the frame")
        return self.size_source(size)

    def program(self, extras: list[Extra]) -> tuple[Program, list[Node]]:
        """A program that computes `extras`, and the placeholders of its inputs."""
        table = self.walk.closure.table
        roots = [entry.node for entry in table.entries if entry.kind == "root"]
        draft = Draft(table, tuple(roots), tuple(extras), ())
        needed = draft.needed()
        roots = [entry.node for entry in table.entries if entry.kind == "root" and entry.number in needed]
        return replace(draft, inputs=tuple(roots)).program(), roots

    def outside(self) -> AbstractContextManager[None]:
        """Run our operators in the state in which the frame was called, wherever its trace is now."""
        return as_in_new_thread(self._autocast, self._inference, self.output.fake_mode)

    def _compute(self, extra: Extra) -> int | float:
        (value,) = self._run([extra])
        return int(value) if isinstance(value, bool) else value

    def _run(self, extras: list[Extra]) -> list[Any]:
        try:
            program, roots = self.program(extras)
            with self.outside():
                inputs = [input_of(node) for node in roots]
                return list(Prologue(program, autocast=self._autocast)(inputs))
        except Exception as error:  # an error of the user's program recurs when the program runs
            raise NotKnown(f"{type(error).__name__}: {error}") from error

    # Walking

    def walk_on(self) -> None:
        """Walk the nodes that Dynamo has written since the last query. Queries by the walk itself do not recurse."""
        if self.is_walking or self._over:
            return
        self.is_walking = True
        try:
            with self.outside():
                self._catch_up()
        except Exception as error:  # the analysis may no longer hold, so the frame is traced again without hints
            log.debug("the walk over Dynamo's graph failed", exc_info=error)
            self._over = True
            self._on_failure(error)
        finally:
            self.is_walking = False

    def _catch_up(self) -> None:
        if any(region.was_rolled_back() for region in self._regions.values()):
            self._regions = {}
            self.walk = self.walk.anew()
        for tracer in self._tracers():
            region = self._regions.get(tracer)
            if region is None:
                parent = self._regions.get(tracer.parent) if tracer.parent is not None else None
                region = self._regions[tracer] = _PartialRegion(self.output, tracer, parent)
            region.advance(self.walk)

    def _tracers(self) -> list[Any]:
        """Dynamo's tracers of the graphs being written, outermost first."""
        found, tracer = [], self.output.current_tracer
        while tracer is not None:
            found.append(tracer)
            tracer = tracer.parent
        return found[::-1]


class _PartialWalk(Walk):
    """A walk over an incomplete graph, in which later uses of a value are unknown."""

    def __init__(self, fake_mode: Any) -> None:
        super().__init__(Region(GraphModule({}, Graph())), fake_mode, {}, nothing=False)
        self.numbers: dict[Any, Extra] = {}  # by symbol

    def anew(self) -> _PartialWalk:
        """A new walk from the start, with the same numbers for inputs and symbols."""
        other = _PartialWalk(self.fake_mode)
        other.closure.table = self.closure.table
        other.numbers = self.numbers
        inputs = {entry.node for entry in self.closure.table.entries if entry.kind == "root"}
        other.values.update((node, value) for node, value in self.values.items() if node in inputs)
        other.symbols.update((found, value) for found, value in self.symbols.items() if value in other.values.values())
        return other

    def obstacle_of_input(self, node: Node, example: Any) -> tuple[Reason, str] | None:
        if isinstance(example, torch.Tensor) and (is_passed(input_of(node)) or example.dtype.is_floating_point):
            return Reason.ACTIVATION, f"`{node.name}`"  # whether it is a mask alone shows when all users are there
        if isinstance(getattr(node.meta.get("grapharg"), "source", None), RandomValueSource):
            return Reason.RANDOM, f"`{node.name}`"  # of `random.randint`, which the frame calls after its guards
        return super().obstacle_of_input(node, example)

    def visit(self, region: Region, node: Node, autocast: tuple[Any, ...]) -> tuple[Any, ...]:
        after = super().visit(region, node, autocast)
        if node in self.values:
            self._note_symbols(self.values[node], node.meta.get("example_value"))
        elif node.meta.get("unbacked_bindings"):
            stand_in, example = self._stand_in(node, autocast), node.meta.get("example_value")
            self._note_symbols(stand_in, example)
            if isinstance(stand_in, Tensor) and isinstance(example, torch.Tensor):
                self._number_sizes(stand_in, example)
        return after

    def _note_symbols(self, value: Value, example: Any) -> None:
        if isinstance(value, Many) and isinstance(example, (tuple, list)):
            for item, part in zip(value.items, example, strict=False):
                self._note_symbols(item, part)
        elif isinstance(value, Scalar):
            number = integer_behind(example) if isinstance(example, torch.SymBool) else example
            found = symbol(number) if not isinstance(number, torch.SymFloat) else number.node.expr
            for name in (found, _unbacked_as_created(number)):
                if name is not None:
                    self.numbers.setdefault(name, Extra(Ref(value.number)))
        elif isinstance(value, Tensor) and isinstance(example, torch.Tensor):
            for dimension, size in enumerate(example.shape):
                found = symbol(size) if is_unbacked(size) else None
                for name in (found, _unbacked_as_created(size)):
                    if name is not None:
                        ref = Ref(value.number, value.memory.version)
                        self.numbers.setdefault(name, Extra(ref, dimension=dimension))

    def _stand_in(self, node: Node, autocast: tuple[Any, ...]) -> Value:
        """`x[mask]` for an activation x: a value of the same size with made-up contents."""
        name = getattr(node.target, "__name__", str(node.target))
        outside = [operand for operand in node.all_input_nodes if operand not in self.values]
        if name not in _SIZED_BY_METADATA or not node.args or outside != [node.args[0]]:
            return None
        return self._numbered_by_looks(node, outside[0], autocast)

    def _number_sizes(self, stand_in: Tensor, example: torch.Tensor) -> None:
        """Number the sizes of an activation: they may be metadata, as in `labels[:, : x[:, :n].shape[1]]`."""
        for dimension, size in enumerate(example.shape):
            found = symbol(size) if is_unbacked(size) else None
            if found is not None and found not in self.symbols:
                graph = Graph()
                tensor = graph.placeholder("tensor")
                number = self._number(graph.call_method("size", (tensor, dimension)), {tensor: stand_in})
                if number is not None:
                    self.symbols[found] = number

    def _body(self, region: Region, call: Node, autocast: tuple[Any, ...]) -> None:
        """Walk a complete body. The nodes before its queries were walked while Dynamo was writing it."""
        outside = [(memory, memory.version) for operand in call.all_input_nodes for memory in self._memories(operand)]
        name = call.args[0]
        assert isinstance(name, Node)
        region.bodies[call] = Region(getattr(region.gm, str(name.target)), region, call)
        super()._body(region, call, autocast)
        for memory, version in outside:
            if memory.version != version:
                self._ban(memory, Reason.WRITTEN_BY_LAYER, f"by `{call.name}`", call)

    def _ban(self, memory: Allocation, reason: Reason, text: str, culprit: Node, subject: Node | None = None) -> None:
        if reason not in _OVERWRITTEN:
            return
        for node in [node for node, value in self.values.items() if memory in _memories(value)]:
            del self.values[node]
            self.obstacles[node] = reason, text


def _unbacked_as_created(size: Any) -> Any:
    """The unbacked symbol of a size, even if it has since been found to equal something; else None."""
    found = symbol_as_created(size) if isinstance(size, torch.SymInt) else None
    return found if getattr(found, "is_Symbol", False) and size.node.hint is None else None


def _memories(value: Value) -> tuple[Allocation, ...]:
    items = value.items if isinstance(value, Many) else (value,)
    return tuple(item.memory for item in items if isinstance(item, Tensor))


class _PartialRegion(Region):
    """The graph of one of Dynamo's tracers, and how far it has been walked."""

    def __init__(self, output: Any, tracer: Any, parent: Region | None) -> None:
        super().__init__(cast(GraphModule, _Modules(tracer.graph, output.nn_modules)))
        self.parent = parent
        self._tracer = tracer
        self.last: Node | None = None
        self._autocast: tuple[Any, ...] = ()

    def was_rolled_back(self) -> bool:
        """Whether Dynamo has erased nodes that were already walked."""
        return self.last is not None and self.last._erased

    def advance(self, walk: _PartialWalk) -> None:
        for node in self.placeholders():  # Dynamo inserts them before the other nodes at any time
            if node in walk.values or node in walk.obstacles:
                continue
            size = symbol(node.meta.get("example_value"))
            if self.parent is not None and size in walk.symbols:
                walk.values[node] = walk.symbols[size]
            elif self._has_operand(node):
                walk.visit(self, node, self._autocast)
        graph = self._tracer.graph
        node = self.last.next if self.last is not None else next(iter(graph.nodes), graph._root)
        while node is not graph._root:
            if node.next is graph._root and node.op != "placeholder" and "example_value" not in node.meta:
                return  # Dynamo is still writing this node
            if node.op != "placeholder":
                self._autocast = walk.visit(self, node, self._autocast)
            self.last = node
            node = node.next

    def _has_operand(self, node: Node) -> bool:
        """Find what is behind a placeholder, which Dynamo records some time after it creates the placeholder."""
        if self.parent is None:
            return "grapharg" in node.meta or not isinstance(node.meta.get("example_value"), torch.Tensor)
        for outer, inner in self._tracer.lifted_freevars.items():
            if getattr(inner, "node", None) is node and hasattr(outer, "node"):
                self.operands[node] = outer.node
                return True
        return False


class _Modules:
    """A stand-in for the `GraphModule` that Dynamo will create: a graph, and submodules by name."""

    def __init__(self, graph: Graph, modules: dict[str, Any]) -> None:
        self.graph, self._modules = graph, modules

    def __getattr__(self, name: str) -> Any:
        try:
            return self._modules[name]
        except KeyError:
            raise AttributeError(name) from None


def input_of(placeholder: Node) -> Any:
    """The input behind a placeholder, before the program runs."""
    example = placeholder.meta["example_value"]
    if isinstance(example, torch.SymInt):
        return int(example.node.hint)
    return placeholder.meta["grapharg"].example
