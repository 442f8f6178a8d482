"""Build the program of a prologue from numbered values.

Numbers computed on the device cost one wait for it, and one more for each number that depends on an earlier one.
Metadata is small, so it is cheaper to copy the inputs to the host once and compute there. Values that all devices
compute exactly (integers and bools) are computed on the host; floating-point values, whose last bit may differ between
devices, stay where the user computed them.

On the CPU the prologue is one graph, except for large tensors that are built in many passes over memory: they have a
separate graph, which takes only numbers, for a compiler (`cost.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxpasses.graph.calls import operator_of
from fxpasses.graph.provenance import where
from fxpasses.graph.symbols import elements_of
from fxpasses.graph.traits import PLANS
from fxpasses.graph.values import Entry, Ref, ValueTable
from fxpasses.metadata.cost import elements_saved
from fxpasses.metadata.describe import comparison, describe
from fxpasses.metadata.element_reads import read_lists
from fxpasses.metadata.emission import Emitter, slice_of
from fxpasses.metadata.program import Check, Output, Program

# Compiling takes seconds, and a run has some thousand batches. It pays off if each batch saves writing this many
# elements, which takes about 2.5 ms on a CPU core.
WORTH_COMPILING = 1 << 22
_LARGE = 1 << 16  # elements; a smaller tensor is not worth a loop of its own


@dataclass(frozen=True)
class Assertion:
    """An assertion on the numbered value `condition`, made by `node`."""

    condition: int
    node: Node


@dataclass(frozen=True)
class Extra:
    """An extra input of the main graph: a value, one of its sizes, or the value in another form (see `Output`)."""

    ref: Ref
    dimension: int | None = None
    as_dtype: torch.dtype | None = None
    as_int: bool = False


@dataclass(frozen=True)
class Draft:
    """A prologue as numbered values, from which its program is built, and rebuilt after a pass changes it.

    inputs: the main graph's own placeholders. wanted: its extra inputs, in the order of their placeholders. written:
    positions of inputs that the main graph writes to.
    """

    table: ValueTable
    inputs: tuple[Node, ...]
    wanted: tuple[Extra, ...]
    assertions: tuple[Assertion, ...]
    written: tuple[int, ...] = ()

    def program(self) -> Program:
        return _Builder(self).build()

    def needed(self) -> set[int]:
        """The numbers of all values that the prologue computes or takes as inputs."""
        return set(_Builder(self).everything)


class _Builder:
    def __init__(self, draft: Draft) -> None:
        self.draft, self.table = draft, draft.table
        self.positions = {node: position for position, node in enumerate(draft.inputs)}
        self.checks = [_check_of(draft.table, assertion) for assertion in draft.assertions]
        operands: list[Any] = [operand for check in self.checks for operand in (check.left, check.right)]
        checked = [operand for operand in operands if isinstance(operand, Ref)]
        self.refs = list(dict.fromkeys([*(extra.ref for extra in draft.wanted), *checked]))
        self.measured = set(self.refs) - {extra.ref for extra in draft.wanted if extra.dimension is None} - set(checked)
        self.everything = slice_of(draft.table, self.refs)
        self.exact = _exact_entries(draft.table, self.everything)
        self.on_device = any(_device(self.table.entries[n]) not in (None, "cpu") for n in self.everything)

    def build(self) -> Program:
        if self.on_device:
            device_wanted = [ref for ref in self.refs if not self._belongs_to_host(ref)]
            worth_compiling = self._saved(device_wanted, set()) >= WORTH_COMPILING
        else:
            device_wanted = self._built_apart(self.refs)
            worth_compiling = bool(device_wanted)
        apart = set(device_wanted)
        imported = self._imports(device_wanted)
        host_wanted = list(dict.fromkeys([*(ref for ref in self.refs if ref not in apart), *imported]))
        host, host_inputs = self._emit(host_wanted, [], for_host=True)
        device, device_inputs = self._emit(device_wanted, imported, for_host=False) if device_wanted else (None, ())
        places = {ref: Output("device", i) for i, ref in enumerate(device_wanted)}
        places |= {ref: Output("host", i) for i, ref in enumerate(host_wanted)}
        roots = (self.table.entries[n] for n in self.everything if self.table.entries[n].kind == "root")

        def placed(operand: Any) -> Any:
            return places[operand] if isinstance(operand, Ref) else operand

        return Program(
            host=host,
            host_inputs=host_inputs,
            device=device,
            device_inputs=device_inputs,
            imports=tuple(
                (host_wanted.index(ref), getattr(self.table.entries[ref.number].fake, "device", None))
                for ref in imported
            ),
            outputs=tuple(
                replace(places[e.ref], dimension=e.dimension, as_dtype=e.as_dtype, as_int=e.as_int)
                for e in self.draft.wanted
            ),
            checks=tuple(replace(check, left=placed(check.left), right=placed(check.right)) for check in self.checks),
            roots=tuple(self.positions[e.node] for e in roots if isinstance(e.fake, torch.Tensor)),
            written=self.draft.written,
            on_accelerator=self.on_device and device is not None,
            worth_compiling=worth_compiling,
        )

    def _built_apart(self, refs: list[Ref]) -> list[Ref]:
        """On the CPU: the large tensors that no host value depends on, if compiling them pays."""
        large = [ref for ref in refs if self._is_large(ref)]
        on_host = set(slice_of(self.table, set(refs) - set(large)))
        found = [ref for ref in large if _content(ref) not in on_host and self._saved([ref], on_host)]
        return found if self._saved(found, on_host) >= WORTH_COMPILING else []

    def _is_large(self, ref: Ref) -> bool:
        """Whether a value is a large tensor, or a plan, which is computed from one."""
        entry = self.table.entries[ref.number]
        if entry.module is not None:  # opaque to a compiler
            return False
        elements = elements_of(entry.fake) if isinstance(entry.fake, torch.Tensor) else 0
        return (elements or 0) >= _LARGE or operator_of(entry.node) in PLANS

    def _saved(self, refs: list[Ref], on_host: set[int]) -> int:
        return elements_saved(self.table, refs, self._is_import, on_host)

    def _belongs_to_host(self, ref: Ref) -> bool:
        """Whether the host computes the value; a value on a device, only if nothing but its sizes is wanted."""
        is_on_host = _device(self.table.entries[ref.number]) in (None, "cpu")
        return _content(ref) in self.exact and (is_on_host or ref in self.measured)

    def _is_import(self, entry: Entry) -> bool:
        """Whether the device part imports the value from the host, because computing it would wait for the device."""
        if self.on_device and entry.number not in self.exact:
            return False
        if entry.kind == "item":
            whole = self.table.entries[entry.operands[0].number]
            return entry.base is None and (whole.read or operator_of(whole.node) in _ASKING)
        return (entry.read or operator_of(entry.node) in _ASKING) and not isinstance(entry.fake, (tuple, list))

    def _imports(self, device_wanted: list[Ref]) -> list[Ref]:
        if not device_wanted:
            return []
        numbers = slice_of(self.table, device_wanted, stop=self._is_import)
        entries = (self.table.entries[n] for n in numbers)
        return [
            Ref(e.number, e.number if isinstance(e.fake, torch.Tensor) else None) for e in entries if self._is_import(e)
        ]

    def _emit(self, wanted: list[Ref], imported: list[Ref], for_host: bool) -> tuple[GraphModule, tuple[int, ...]]:
        from_host = {ref.number for ref in imported}
        numbers = slice_of(self.table, wanted, stop=lambda entry: entry.number in from_host)
        given: dict[int, Node] = {}
        emitter = Emitter(self.table, lambda entry: given.get(entry.number), for_host and self.on_device)
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
        if for_host and not any(self.table.entries[n].kind == "write" for n in numbers):
            read_lists(emitter.graph)
        module = GraphModule(emitter.modules, emitter.graph, class_name="Prologue")
        return module, tuple(self.positions[root.node] for root in roots)


def _check_of(table: ValueTable, assertion: Assertion) -> Check:
    """The check of an assertion, with references to numbered values as operands."""
    condition: Any = Ref(assertion.condition)
    symbol, left, right = comparison(table, assertion.condition) or ("", condition, True)
    return Check(symbol, left, right, describe(table, left), describe(table, right), where(assertion.node))


# Operators whose results depend on the order of equal elements, which differs between devices.
_UNSTABLE = frozenset({"argsort", "kthvalue", "median", "mode", "msort", "nanmedian", "sort", "topk"})


# Floating-point operators that round as IEEE 754 says. A kernel may fuse two of them, and round once.
_ROUNDED_ALIKE = frozenset(
    {"add", "expand", "full", "full_like", "getitem", "masked_fill", "mul", "new_full", "ones", "reshape", "rsub",
     "sub", "to", "type", "unsqueeze", "view", "where", "zeros", "zeros_like"}
)  # fmt: skip
_ASKS_WHETHER_HIDDEN = "fxpasses::visible_pairs"  # of a mask's 0 and least value: rounding never makes one the other
# Operators that read numbers from their operands, so that on a device each call would wait.
_ASKING = frozenset(
    {_ASKS_WHETHER_HIDDEN, "fxpasses::attended_rows", "fxpasses::host_function", "fxpasses::rows_attended_from"}
)


def _exact_entries(table: ValueTable, numbers: Iterable[int]) -> set[int]:
    """Entries that all devices compute exactly: integers and bools that depend only on integers and bools, or on
    whether a mask made of these is 0 or hides."""
    exact: set[int] = set()
    nearly: set[int] = set()
    for number in numbers:
        entry = table.entries[number]
        name, operands = operator_of(entry.node), {*map(_content, entry.operands)}
        is_integral = entry.kind == "look" or _is_integral(entry.fake)
        if name in _UNSTABLE or entry.autocast or not operands <= exact | nearly:
            continue
        if is_integral and (operands <= exact or name == _ASKS_WHETHER_HIDDEN):
            exact.add(number)
        elif name in _ROUNDED_ALIKE:
            nearly.add(number)
    return exact


def _is_integral(fake: Any) -> bool:
    if isinstance(fake, (tuple, list)):
        return all(_is_integral(item) for item in fake)
    if isinstance(fake, torch.Tensor):
        return not fake.dtype.is_floating_point and not fake.dtype.is_complex
    return not isinstance(fake, (float, torch.SymFloat))


def _content(ref: Ref) -> int:
    """The number of the last write to the value, or the value's own number."""
    return ref.number if ref.version is None else ref.version


def _device(entry: Entry) -> str | None:
    return entry.fake.device.type if isinstance(entry.fake, torch.Tensor) else None
