"""Build the program of a prologue from numbered values.

Host numbers cost one wait for the device if they are computed where the inputs are, and one more for each number that
depends on a former one. Metadata is small: it is cheaper to bring the inputs to the host, once, and compute all host
numbers there. What is exact on both sides (integers and bools) is computed on the host; floating-point values, whose
last bit may differ between devices, stay where the user computed them.

On the CPU all of it is one graph, but for large tensors that are built in many passes over memory: those are a graph of
their own, which takes numbers alone, for a compiler (`prologue_cost.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxpasses.graph.calls import operator_of
from fxpasses.graph.describe import comparison, describe
from fxpasses.graph.emission import Emitter, slice_of
from fxpasses.graph.prologue_cost import elements_saved
from fxpasses.graph.provenance import where
from fxpasses.graph.symbols import elements_of
from fxpasses.graph.values import Entry, Ref, ValueTable
from fxpasses.prologue_program import Check, Output, Program

# A compiler takes some seconds, and a run some thousand batches. This many elements (about 2.5 ms on a CPU core) must
# be saved in each to be worth it.
WORTH_COMPILING = 1 << 22
_LARGE = 1 << 16  # elements; a smaller tensor is not worth a loop of its own


@dataclass(frozen=True)
class Assertion:
    """An assertion on the numbered value `condition`, made by `node`."""

    condition: int
    node: Node


@dataclass(frozen=True)
class Extra:
    """An extra input of the main graph: a value, or a size of it, or it in another form (see `Output`)."""

    ref: Ref
    dimension: int | None = None
    as_dtype: torch.dtype | None = None
    as_int: bool = False


@dataclass(frozen=True)
class Draft:
    """A prologue as numbered values, from which its program is built, and built again where a pass changes it.

    inputs: the main graph's own placeholders. wanted: what it takes besides, in the order of its other placeholders.
    written: positions of inputs that the main graph writes to.
    """

    table: ValueTable
    inputs: tuple[Node, ...]
    wanted: tuple[Extra, ...]
    assertions: tuple[Assertion, ...]
    written: tuple[int, ...] = ()

    def program(self) -> Program:
        program = _Builder(self.table, list(self.inputs), list(self.wanted), list(self.assertions)).build()
        return replace(program, written=self.written)

    def needed(self) -> set[int]:
        """The numbers of all values that the prologue makes or takes."""
        return set(_Builder(self.table, list(self.inputs), list(self.wanted), list(self.assertions)).everything)


class _Builder:
    def __init__(self, table: ValueTable, inputs: list[Node], extras: list[Extra], assertions: list[Assertion]) -> None:
        self.table = table
        self.positions = {node: position for position, node in enumerate(inputs)}
        self.extras = extras
        self.wanted = [extra.ref for extra in extras]
        self.checks = [_check_operands(table, assertion) for assertion in assertions]
        operands = [ref for check in self.checks for ref in (check.left, check.right) if isinstance(ref, Ref)]
        self.everything = slice_of(table, [*self.wanted, *operands])
        self.exact = _exact_entries(table, self.everything)
        self.on_device = any(_device(table.entries[n]) not in (None, "cpu") for n in self.everything)

    def build(self) -> Program:
        check_refs = [ref for check in self.checks for ref in (check.left, check.right) if isinstance(ref, Ref)]
        refs = list(dict.fromkeys([*self.wanted, *check_refs]))
        if self.on_device:
            device_wanted = [ref for ref in refs if not self._belongs_to_host(ref)]
            worth_compiling = self._saved(device_wanted, set()) >= WORTH_COMPILING
        else:
            device_wanted = self._built_apart(refs)
            worth_compiling = bool(device_wanted)
        apart = set(device_wanted)
        imported = self._imports(device_wanted)
        host_wanted = list(dict.fromkeys([*(ref for ref in refs if ref not in apart), *imported]))
        host, host_inputs = self._emit(host_wanted, [], on_host=self.on_device)
        device, device_inputs = self._emit(device_wanted, imported, on_host=False) if device_wanted else (None, ())
        places = {ref: Output("device", i) for i, ref in enumerate(device_wanted)}
        places |= {ref: Output("host", i) for i, ref in enumerate(host_wanted)}
        roots = (self.table.entries[n] for n in self.everything if self.table.entries[n].kind == "root")
        return Program(
            host=host,
            host_inputs=host_inputs,
            device=device,
            device_inputs=device_inputs,
            imports=tuple((host_wanted.index(ref), self._device_of(ref)) for ref in imported),
            outputs=tuple(
                replace(places[e.ref], dimension=e.dimension, as_dtype=e.as_dtype, as_int=e.as_int) for e in self.extras
            ),
            checks=tuple(check.place(places) for check in self.checks),
            roots=tuple(self.positions[e.node] for e in roots if isinstance(e.fake, torch.Tensor)),
            on_accelerator=self.on_device and device is not None,
            worth_compiling=worth_compiling,
        )

    def _built_apart(self, refs: list[Ref]) -> list[Ref]:
        """On the CPU: the large tensors that no host value is made of, where a compiler is worth its time for them."""
        large = [ref for ref in refs if self._is_large(ref)]
        on_host = set(slice_of(self.table, set(refs) - set(large)))
        found = [ref for ref in large if _content(ref) not in on_host and self._saved([ref], on_host)]
        return found if self._saved(found, on_host) >= WORTH_COMPILING else []

    def _is_large(self, ref: Ref) -> bool:
        """Whether a value is a large tensor, or a plan, which is made of one."""
        entry = self.table.entries[ref.number]
        if entry.module is not None:  # no compiler looks into it
            return False
        return (_elements(entry) or 0) >= _LARGE or entry.node.target is torch.ops.fxpasses.attention_plan.default

    def _saved(self, refs: list[Ref], on_host: set[int]) -> int:
        return elements_saved(self.table, refs, self._is_import, on_host)

    def _belongs_to_host(self, ref: Ref) -> bool:
        entry = self.table.entries[ref.number]
        return _content(ref) in self.exact and _device(entry) in (None, "cpu")

    def _is_import(self, entry: Entry) -> bool:
        """Whether the device part takes the value from the host: to get it, it would have to wait for the device."""
        if self.on_device and entry.number not in self.exact:
            return False
        if entry.kind == "item":
            return entry.base is None and self.table.entries[entry.operands[0].number].read
        return entry.read and not isinstance(entry.fake, (tuple, list))

    def _imports(self, device_wanted: list[Ref]) -> list[Ref]:
        if not device_wanted:
            return []
        numbers = slice_of(self.table, device_wanted, stop=self._is_import)
        entries = (self.table.entries[n] for n in numbers)
        return [
            Ref(e.number, e.number if isinstance(e.fake, torch.Tensor) else None) for e in entries if self._is_import(e)
        ]

    def _device_of(self, ref: Ref) -> torch.device | None:
        fake = self.table.entries[ref.number].fake
        return fake.device if isinstance(fake, torch.Tensor) else None

    def _emit(self, wanted: list[Ref], imported: list[Ref], on_host: bool) -> tuple[GraphModule, tuple[int, ...]]:
        from_host = {ref.number for ref in imported}
        numbers = slice_of(self.table, wanted, stop=lambda entry: entry.number in from_host)
        given: dict[int, Node] = {}
        emitter = Emitter(self.table, lambda entry: given.get(entry.number), on_host)
        roots = [self.table.entries[n] for n in numbers if self.table.entries[n].kind == "root"]
        for position, root in enumerate(roots):
            given[root.number] = emitter.graph.placeholder(f"input_{position}")
        for position, ref in enumerate(imported):
            given[ref.number] = emitter.graph.placeholder(f"host_{position}")
        for number, node in given.items():
            node.meta["example_value"] = self.table.entries[number].fake
        emitter.emit(numbers, wanted)
        outputs = tuple(emitter.value(ref) for ref in wanted)
        for ref, node in zip(wanted, outputs, strict=True):
            node.meta["example_value"] = self.table.entries[ref.number].fake
        emitter.graph.output(outputs)
        module = GraphModule(emitter.modules, emitter.graph, class_name="Prologue")
        return module, tuple(self.positions[root.node] for root in roots)


@dataclass(frozen=True)
class _CheckOperands:
    comparison: str
    left: Any
    right: Any
    left_text: str
    right_text: str
    where: str

    def place(self, places: dict[Ref, Output]) -> Check:
        left = places[self.left] if isinstance(self.left, Ref) else self.left
        right = places[self.right] if isinstance(self.right, Ref) else self.right
        return Check(self.comparison, left, right, self.left_text, self.right_text, self.where)


def _check_operands(table: ValueTable, assertion: Assertion) -> _CheckOperands:
    compared = comparison(table, assertion.condition)
    place = where(assertion.node)
    if compared is None:
        condition = Ref(assertion.condition)
        return _CheckOperands("", condition, True, describe(table, condition), "True", place)
    symbol, left, right = compared
    return _CheckOperands(symbol, left, right, describe(table, left), describe(table, right), place)


# Their results depend on the order of equal elements, which is another on another device.
_UNSTABLE = frozenset({"argsort", "kthvalue", "median", "mode", "msort", "nanmedian", "sort", "topk"})


def _exact_entries(table: ValueTable, numbers: Iterable[int]) -> set[int]:
    """Entries that any device computes alike: integers and bools, made of integers and bools."""
    exact: set[int] = set()
    for number in numbers:
        entry = table.entries[number]
        operands = map(_content, entry.operands)
        stable = operator_of(entry.node) not in _UNSTABLE and not entry.autocast
        integral = entry.kind == "look" or _is_integral(entry.fake)
        if stable and integral and all(operand in exact for operand in operands):
            exact.add(number)
    return exact


def _is_integral(fake: Any) -> bool:
    if isinstance(fake, (tuple, list)):
        return all(_is_integral(item) for item in fake)
    if isinstance(fake, torch.Tensor):
        return not fake.dtype.is_floating_point and not fake.dtype.is_complex
    return not isinstance(fake, (float, torch.SymFloat))


def _content(ref: Ref) -> int:
    """The number of the last write to the value, or its own."""
    return ref.number if ref.version is None else ref.version


def _elements(entry: Entry) -> int | None:
    return elements_of(entry.fake) if isinstance(entry.fake, torch.Tensor) else None


def _device(entry: Entry) -> str | None:
    return entry.fake.device.type if isinstance(entry.fake, torch.Tensor) else None
