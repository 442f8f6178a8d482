"""Compute a packed batch's metadata once per batch, not once per layer.

Before, in each layer (here inside its checkpoint body):

    max_1 = l_lengths_.max();  item: "Sym(u0)" = max_1.item()
    mask = torch.full((12, 12), -inf)
    inside = pos < item;  mask[inside] = 0
    a = scaled_dot_product_attention(q, k, v, attn_mask = mask)

After, the layers take `packed_0: "f32[12, 12]"`, an input of the graph, and the prologue computes it:

    max_1 = input_0.max();  item = max_1.item();  full = torch.full((12, 12), -inf);  ...;  return (full,)

*Find* the closure of the metadata (`metadata/closure.py`), *decide* for each frontier value whether it becomes an input
or is recomputed in place from smaller ones (views, sums of host numbers, plain factories), and *cut*. The report says
what the pass leaves alone, and why.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch.fx import GraphModule, Node

from fxpasses.graph.building import replace_operand
from fxpasses.graph.calls import operator_of
from fxpasses.graph.provenance import module_of, where
from fxpasses.graph.reachability import reached
from fxpasses.graph.regions import Region
from fxpasses.graph.symbols import (
    bytes_of,
    constant,
    declare_equal,
    expression,
    integer_behind,
    is_symbolic,
    is_unbacked,
    scalar_tensor,
    symbol,
)
from fxpasses.graph.values import Entry, Ref, Scalar, Tensor, Value, number_of
from fxpasses.metadata.analysis import RANGES, Closure
from fxpasses.metadata.closure import find_closure
from fxpasses.metadata.draft import Assertion, Draft, Extra
from fxpasses.metadata.mask_indices import index_by_positions
from fxpasses.passes.pipeline import Context
from fxpasses.report import Reason, Refusal, Report

# A tensor that is made once and larger than this (bytes) stays where a compiler may fuse it away:
# `one_hot(ids, vocabulary)`.
_LARGE = 1 << 30

# If nothing is read on the host, tensors that one node makes stay in the graph if they are no larger than this (bytes):
# the prologue of a small BERT's mask of 16 KiB made its step 1.05 times as long. Larger ones are worth a prologue that
# several graphs of a step share, such as those of layers that are compiled one by one.
_SMALL = 1 << 18


class HoistMetadata:
    """The pass. Sets `context.program` and appends the prologue's outputs to the graph's placeholders."""

    name = "hoist_metadata"
    exact = True

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        main = Region(gm)
        banned = {node: Refusal(node.name, Reason.INPUT_WRITTEN, _SHARED) for node in context.shared_inputs}
        closure = find_closure(main, context.fake_mode, banned)
        if index_by_positions(main, closure, context.fake_mode, context.may_change):
            closure = find_closure(main, context.fake_mode, banned)
        if large := _too_large(closure):
            banned |= large
            closure = find_closure(main, context.fake_mode, banned)
        while left_out := (cut := _Cut(main, closure, context, report)).run():
            # These values stay, and use others that may become inputs.
            assert not left_out <= banned.keys(), "a value that was left out is provided all the same"
            banned |= {node: Refusal(node.name, Reason.LEFT_OUT, "", where(node)) for node in left_out}
            closure = find_closure(main, context.fake_mode, banned)
        report.refusals = [*_refusals(closure), *cut.small]
        return report


_MADE_ONCE = "a prologue would take longer than the one node that makes it, of which nothing is read"
_SHARED = "another input shares its memory"


def _too_large(closure: Closure) -> dict[Node, Refusal]:
    """Allocations that the prologue would hold, and that a compiler might fuse away."""
    found = {}
    for use in closure.uses:
        for memory, _ in use.versions:
            entry = closure.table.entries[memory.alloc]
            size = bytes_of(entry.fake) if entry.kind != "root" and isinstance(entry.fake, torch.Tensor) else None
            if closure.table.occurrences(entry) == 1 and size is not None and size > _LARGE:
                found[memory.node] = Refusal(memory.node.name, Reason.TOO_LARGE, f"{size} bytes", where(memory.node))
    return found


_KEEP: Final = "keep"


@dataclass(frozen=True)
class _Constant:
    value: int | float | bool


# The decision on a node: it stays, or a constant replaces it, or an input (a scalar, or a tensor at its last version).
_Decision = Literal["keep"] | _Constant | Ref


class _Cut:
    def __init__(self, main: Region, closure: Closure, context: Context, report: Report) -> None:
        self.main = main
        self.closure = closure
        self.table = closure.table
        self.context = context
        self.report = report
        self.decisions: dict[Node, _Decision] = {}
        self.inputs: dict[tuple[Region, Ref], Node] = {}
        self.frontier: list[Extra] = []
        self.sizes: set[Any] = set()  # unbacked symbols that an input binds
        self.small: list[Refusal] = []
        self.asserting = {node for _, node in closure.assertions}
        self.original_inputs = main.placeholders()

    def run(self) -> set[Node]:
        """Rewrite the graph; or leave it unchanged, and return the nodes whose values may not be provided."""
        for use in self.closure.uses:
            self._decide(use.region, use.operand)
        reads = self._reads()
        if not reads and self._is_all_small():
            return set()
        if left_out := self._left_out():
            return left_out
        provides = any(isinstance(decision, Ref) for decision in self.decisions.values())
        asserts = bool(reads and self.asserting)
        if not provides and not (asserts and self.context.may_change(self.closure.assertions[0][1])):
            return set()
        assertions = self._assertions()
        for first, second in self.table.same:
            _declare_all_equal(first, second)
        for region in self.main.walk():
            self._rewrite(region)
        for region in self.main.walk():
            self._erase(region)
            region.gm.graph.lint()
            region.gm.recompile()
        inputs, wanted = tuple(self.original_inputs), tuple(self.frontier)
        draft = Draft(self.table, inputs, wanted, tuple(assertions), self._written_inputs())
        self.context.program, self.context.draft = draft.program(), draft
        self._describe(reads)
        return set()

    # Deciding

    def _left_out(self) -> set[Node]:
        """The nodes of values that may not become inputs. A value is one change, however many nodes hold it."""
        rows = dict.fromkeys(_row(decision) for decision in self.decisions.values() if isinstance(decision, Ref))
        changes = [row for row in rows if self.table.entries[row].kind != "root"]
        left_out = {row for row in changes if not self.context.may_change(self.table.entries[row].node)}
        if left_out:  # values that the prologue computes on the way to another input are provided with it
            left_out -= self._behind(set(changes) - left_out)
        return {node for node, value in self.closure.values.items() if _last_row(value) in left_out}

    def _behind(self, numbers: set[int]) -> set[int]:
        """The rows that the values of `numbers` are computed from."""

        def behind(number: int) -> list[int]:
            entry = self.table.entries[number]
            parts = [part for ref in entry.operands for part in (ref.number, ref.version)]
            return [other for other in (entry.base, entry.previous, entry.target, *parts) if other is not None]

        return set(reached(numbers, behind))

    def _decide(self, region: Region, node: Node) -> None:
        """Decide on a closure node that is used by a node outside the closure, or by one that stays."""
        waiting = [(region, node)]
        while waiting:
            region, node = waiting.pop()
            if node in self.decisions:
                continue
            decision = self.decisions[node] = self._decision(node)
            if decision is not _KEEP:
                continue
            if node.op == "placeholder":
                operand = region.operands.get(node)
                if isinstance(operand, Node) and region.parent is not None:
                    waiting.append((region.parent, operand))
            else:
                waiting += [(region, operand) for operand in node.all_input_nodes if operand in self.closure.values]

    def _decision(self, node: Node) -> _Decision:
        value = self.closure.values[node]
        if isinstance(value, Scalar):
            return self._scalar_decision(node, self.table.entries[value.number])
        if isinstance(value, Tensor):
            memory = value.memory
            content = self.table.entries[memory.version]
            if self.table.entries[memory.alloc].kind != "root" and value.number == memory.alloc and content.work:
                return Ref(memory.alloc, memory.version)
        return _KEEP

    def _is_all_small(self) -> bool:
        """Whether the values that may become inputs take few bytes, and one node makes each: a prologue would cost more
        than it saves, and the report says so.

        False if an operator of this package makes one of them, such as a plan, which takes the host's time.
        """
        provided = dict.fromkeys(_row(decision) for decision in self.decisions.values() if isinstance(decision, Ref))
        entries = [self.table.entries[row] for row in provided]
        if any(self.table.occurrences(entry) > 1 for entry in entries) or sum(map(_bytes, entries)) > _SMALL:
            return False
        if any("fxpasses" in str(self.table.entries[row].node.target) for row in self._behind(set(provided))):
            return False
        for node in (entry.node for entry in entries if entry.kind != "root"):
            self.small.append(Refusal(node.name, Reason.SMALL, _MADE_ONCE, where(node), module_of(node)[0]))
        return True

    def _scalar_decision(self, node: Node, entry: Entry) -> _Decision:
        if entry.kind == "root":
            return _KEEP
        known = node.meta.get("example_value", entry.fake)
        number = constant(known)
        if number is not None:
            return _Constant(number)
        found = symbol(known)
        if found is not None and not is_unbacked(known):
            root = self._input_for_symbol(found)
            if root is not None:
                return Ref(root)
        return Ref(entry.number) if entry.read and entry.kind == "op" else _KEEP

    def _input_for_symbol(self, found: Any) -> int | None:
        for node in self.original_inputs:
            value = self.closure.values.get(node)
            if isinstance(value, Scalar) and symbol(node.meta["example_value"]) == found:
                return value.number
        return None

    # Rewriting

    def _provide(self, region: Region, ref: Ref) -> Node:
        """The node of `region` that holds a frontier value, which is created the first time."""
        if (region, ref) in self.inputs:
            return self.inputs[region, ref]
        entry = self.table.entries[ref.number]
        if region.parent is not None:
            outer = self._provide(region.parent, ref)
            node = _append_placeholder(region, outer.name, outer.meta["example_value"], entry)
            assert region.call is not None
            region.call.args = (*region.call.args, outer)
            region.operands[node] = outer
        elif entry.kind == "root":
            node = entry.node
        else:
            node = self._add_input(ref, entry)
        self.inputs[region, ref] = node
        return node

    def _add_input(self, ref: Ref, entry: Entry) -> Node:
        """A placeholder of the main graph for a frontier value; AOTAutograd accepts only tensors and integers."""
        fake = entry.fake
        if isinstance(fake, torch.Tensor):
            node = self._append_input(Extra(ref), fake, entry)
            for dimension, size in enumerate(fake.shape):
                if symbol(size) is not None and is_unbacked(size) and symbol(size) not in self.sizes:
                    self._append_input(Extra(ref, dimension=dimension), size, entry)
                elif is_unbacked(size):
                    self._bind_parts(size, entry)
            return node
        if isinstance(fake, torch.SymFloat):
            number = self._append_input(Extra(ref, as_dtype=torch.float64), scalar_tensor(fake), entry)
            return self._derive("call_method", "item", (number,), fake, entry)
        if isinstance(fake, torch.SymBool):
            number = self._append_input(Extra(ref, as_int=True), integer_behind(fake), entry)
            return self._derive("call_function", operator.eq, (number, 1), number.meta["example_value"] == 1, entry)
        return self._append_input(Extra(ref), fake, entry)

    def _bind_parts(self, size: Any, entry: Entry) -> None:
        """Make `u1` a separate input if a size is `u1 + 1`, which binds no symbol for Inductor."""
        for found in sorted(expression(size).free_symbols - self.sizes, key=str):
            extra = self.table.source_of(found)
            if extra is None:
                continue
            number, dimension = extra
            fake = self.table.entries[number].fake
            if dimension is None:
                self._append_input(Extra(Ref(number)), fake, entry)
            else:
                self._append_input(Extra(Ref(number, number), dimension=dimension), fake.shape[dimension], entry)

    def _append_input(self, extra: Extra, fake: Any, entry: Entry) -> Node:
        node = _append_placeholder(self.main, f"packed_{len(self.frontier)}", fake, entry)
        node._dynamo_source = None
        self.frontier.append(extra)
        self.context.example_inputs.append(fake)
        if symbol(fake) is not None:
            self.sizes.add(symbol(fake))
        return node

    def _derive(self, op: str, target: Any, args: tuple[Any, ...], fake: Any, entry: Entry) -> Node:
        """A number that is computed from an input, at the top of the main graph."""
        first = next(node for node in self.main.gm.graph.nodes if node.op != "placeholder")
        with self.main.gm.graph.inserting_before(first):
            node = self.main.gm.graph.create_node(op, target, args)
        kept = ("stack_trace", "unbacked_bindings") if target == "item" else ("stack_trace",)
        node.meta = {name: value for name, value in entry.node.meta.items() if name in kept}
        node.meta["example_value"] = fake
        return node

    def _rewrite(self, region: Region) -> None:
        graph = region.gm.graph
        for node in list(graph.nodes):
            decision = self.decisions.get(node)
            survivors = [user for user in node.users if self._survives(user)]
            if not isinstance(decision, (_Constant, Ref)) or not survivors:
                continue
            replacement = decision.value if isinstance(decision, _Constant) else self._provide(region, decision)
            for user in survivors:
                replaced = replacement
                if user.op == "output" and node in self.closure.copied:
                    with graph.inserting_before(user):
                        replaced = graph.call_method("clone", (replacement,))
                        replaced.meta = {
                            name: known for name, known in node.meta.items() if name != "unbacked_bindings"
                        }
                replace_operand(user, node, replaced)

    def _survives(self, node: Node) -> bool:
        is_replaced = node in self.closure.values and self.decisions.get(node) is not _KEEP
        return node not in self.asserting and not is_replaced

    def _erase(self, region: Region) -> None:
        """Erase the closure nodes that are no longer needed, and the operands of a body that have become unused."""
        for node in reversed(list(region.gm.graph.nodes)):
            is_unused_operand = region.call is not None and not node.users
            if not self._survives(node) and (node.op != "placeholder" or is_unused_operand):
                region.erase(node)

    def _assertions(self) -> list[Assertion]:
        """The distinct assertions, except ranges and conditions that are known to hold."""
        first: dict[int, Assertion] = {}
        for _, node in self.closure.assertions:
            condition = node.args[0]
            value = self.closure.values[condition] if isinstance(condition, Node) else None
            if isinstance(value, Scalar) and node.target not in RANGES:
                first.setdefault(value.number, Assertion(value.number, node))
        return list(first.values())

    def _written_inputs(self) -> tuple[int, ...]:
        obstacles = (self.closure.obstacles.get(node) for node in self.original_inputs)
        return tuple(i for i, found in enumerate(obstacles) if found is not None and found[0] is Reason.INPUT_WRITTEN)

    # Reporting

    def _reads(self) -> list[Node]:
        """The nodes of the closure at which the host waits for the device, before the pass."""
        bound = {n: number_of(value) for n, value in self.closure.values.items() if n.meta.get("unbacked_bindings")}
        return [node for node, number in bound.items() if number is not None and self.table.entries[number].read]

    def _describe(self, reads: list[Node]) -> None:
        entries = [self.table.entries[extra.ref.number] for extra in self.frontier if extra.dimension is None]
        tensors = [entry for entry in entries if isinstance(entry.fake, torch.Tensor)]
        distinct_reads = {number_of(self.closure.values[node]) for node in reads}
        built = sum(self.table.occurrences(entry) for entry in tensors)
        self.report.changed = True
        self.report.figures = {
            "host_reads_before": len(reads),
            "host_reads_after": len(distinct_reads),
            "tensors_built_before": built,
            "tensors_built_after": len(tensors),
            "inputs_added": len(self.frontier),
            "assertions_moved": len(self.asserting),
        }
        parts = [f"{len(reads)} host read{'s' * (len(reads) > 1)} became {len(distinct_reads)}"] if reads else []
        if built > len(tensors):
            parts.append(f"{built} tensors built in layers became {len(tensors)}")
        elif tensors:
            parts.append(f"{len(tensors)} tensor{'s' * (len(tensors) > 1)} moved to the prologue")
        self.report.summary = ", ".join(parts) + ", once per batch"
        for entry in entries:
            place = where(entry.node)
            self.report.changes.append(f"{entry.node.name} ×{self.table.occurrences(entry)} at {place} → packed input")


def _bytes(entry: Entry) -> int:
    """The size of a tensor in the traced batch; more than any limit if it is not known."""
    if not isinstance(entry.fake, torch.Tensor):
        return 0
    size = bytes_of(entry.fake)
    return _LARGE if size is None else size


def _row(ref: Ref) -> int:
    """The row of the table that makes a value; for memory that was written to, the last write."""
    return ref.number if ref.version is None else ref.version


def _last_row(value: Value) -> int | None:
    return value.memory.version if isinstance(value, Tensor) else number_of(value)


def _append_placeholder(region: Region, name: str, fake: Any, entry: Entry) -> Node:
    node = region.add_placeholder(name, fake)
    if entry.node.meta.get("stack_trace"):
        node.meta["stack_trace"] = entry.node.meta["stack_trace"]
    return node


def _declare_all_equal(first: Any, second: Any) -> None:
    if isinstance(first, (tuple, list)):
        for one, other in zip(first, second, strict=True):
            _declare_all_equal(one, other)
    elif is_symbolic(first) or isinstance(first, torch.Tensor):
        declare_equal(first, second)


def _refusals(closure: Closure) -> list[Refusal]:
    """Values that were nearly hoisted, and host reads that stay."""
    found = dict(closure.refusals)
    for node, (reason, text) in closure.obstacles.items():
        reads = node.meta.get("unbacked_bindings") and operator_of(node) != "getitem"
        if reads and node not in found:
            found[node] = Refusal(node.name, reason, text, where(node))
    return [replace(refusal, module=module_of(node)[0]) for node, refusal in found.items()]
