"""Emit a graph from numbered values.

Entries are emitted in the order of their numbers, which is a topological order. A write goes into the buffer that holds
the previous version if that version is dead, else into a copy.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from fxpasses.graph.reachability import reached
from fxpasses.graph.values import Entry, Ref, ValueTable


def slice_of(
    table: ValueTable, wanted: Iterable[Ref], stop: Callable[[Entry], bool] = lambda entry: False
) -> list[int]:
    """The backward slice of `wanted`: the ascending numbers of all entries that it needs; not past a `stop`."""

    def needed_by(number: int) -> Iterable[int]:
        entry = table.entries[number]
        base = [entry.base] if entry.base is not None else []
        return [*_numbers(entry.operands), *base] if not stop(entry) else []

    return sorted(reached(_numbers(wanted), needed_by))


def _numbers(refs: Iterable[Ref]) -> set[int]:
    return {number for ref in refs for number in (ref.number, ref.version) if number is not None}


class Emitter:
    """Emits a slice of the table into a new graph.

    given: returns the node of an entry that is an input of this graph, else None. on_host: whether the graph computes
    on copies on the CPU, so that the CPU replaces all devices.
    """

    def __init__(self, table: ValueTable, given: Callable[[Entry], Node | None], on_host: bool) -> None:
        self.table = table
        self.graph = Graph()
        self.given = given
        self.on_host = on_host
        self.nodes: dict[int, Node] = {}  # scalars, tuples and inputs, by number
        self.buffers: dict[int, Node] = {}  # memory, by version
        self.modules: dict[str, torch.nn.Module] = {}  # the modules that the graph calls
        self._addresses: dict[tuple[int, Node], Node] = {}
        self._autocast: list[tuple[tuple[Any, ...], Node]] = []

    def emit(self, numbers: list[int], wanted: Iterable[Ref]) -> None:
        """Emit the entries `numbers`, which are ascending, and closed under operands except for inputs."""
        last_use: dict[int, float] = {}
        for number in numbers:
            for ref in self.table.entries[number].operands:
                if ref.version is not None:
                    last_use[ref.version] = number
        last_use |= {ref.version: float("inf") for ref in wanted if ref.version is not None}
        written = {self.table.entries[n].base for n in numbers if self.table.entries[n].kind == "write"}
        for number in numbers:
            self._emit(self.table.entries[number], last_use, written)
        self._leave_autocast(0)

    def value(self, ref: Ref) -> Node:
        """The node that holds a wanted value."""
        if ref.version is None:
            return self.nodes[ref.number]
        return self._address(ref.number, self.buffers[ref.version])

    def _emit(self, entry: Entry, last_use: dict[int, float], written: set[int | None]) -> None:
        given = self.given(entry)
        if given is not None:
            self.nodes[entry.number] = self.buffers[entry.number] = given
        elif entry.kind == "write":
            self._emit_write(entry, last_use)
        elif entry.kind == "look":
            self.buffers[entry.number] = self._emit_look(entry)
        elif entry.kind == "item":
            if entry.base is None:
                self.nodes[entry.number] = self.buffers[entry.number] = self._item(entry, self.nodes)
        elif entry.base is None:
            self._enter(entry.autocast)
            node = self._call(entry, self.value)
            if self.on_host and entry.number in written and isinstance(entry.fake, torch.Tensor):
                # On the device this was new memory; on the host `.cpu()` and `.to()` may return their operand.
                node = self.graph.call_method("clone", (node,))
            self.nodes[entry.number] = self.buffers[entry.number] = node

    def _emit_look(self, entry: Entry) -> Node:
        device = torch.device("cpu") if self.on_host else entry.fake.device
        point = self.graph.call_function(torch.empty, ((),), {"dtype": entry.fake.dtype, "device": device})
        sizes = tuple(self.nodes[size.number] if isinstance(size, Ref) else size for size in entry.args)
        return self.graph.call_method("expand", (point, sizes))

    def _emit_write(self, entry: Entry, last_use: dict[int, float]) -> None:
        assert entry.previous is not None and entry.base is not None
        buffer = self.buffers[entry.previous]
        if last_use[entry.previous] > entry.number:
            buffer = self.graph.call_method("clone", (buffer,))
        previous = entry.previous
        self._enter(entry.autocast)
        self._call(entry, lambda ref: self._address(ref.number, buffer) if ref.version == previous else self.value(ref))
        self.buffers[entry.number] = buffer

    def _address(self, number: int, buffer: Node) -> Node:
        """The view `number` of the memory in `buffer`."""
        entry = self.table.entries[number]
        if entry.base is None or entry.base == number:
            return buffer
        if (number, buffer) not in self._addresses:
            self._addresses[number, buffer] = (
                self._item(entry, {entry.operands[0].number: self._address(entry.operands[0].number, buffer)})
                if entry.kind == "item"
                else self._call(entry, lambda ref: self._viewed(ref, buffer))
            )
        return self._addresses[number, buffer]

    def _viewed(self, ref: Ref, buffer: Node) -> Node:
        is_tensor = isinstance(self.table.entries[ref.number].fake, torch.Tensor)
        return self._address(ref.number, buffer) if is_tensor and ref.version is None else self.value(ref)

    def _item(self, entry: Entry, containers: dict[int, Node]) -> Node:
        return self.graph.call_function(operator.getitem, (containers[entry.operands[0].number], entry.path))

    def _call(self, entry: Entry, resolve: Callable[[Ref], Node]) -> Node:
        def convert(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return resolve(leaf)
            if self.on_host and isinstance(leaf, torch.device):
                return torch.device("cpu")
            return leaf

        args, kwargs = map_aggregate((entry.args, entry.kwargs), convert)
        target = entry.node.target
        if self.on_host:
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            if target == "to" and len(args) > 1 and isinstance(args[1], str):
                args = (args[0], torch.device("cpu"), *args[2:])
            if isinstance(entry.fake, torch.Tensor) and target == entry.fake.device.type:  # `x.cuda()`, `x.xpu()`
                target, args, kwargs = "cpu", args[:1], {}
        op = entry.node.op
        if entry.module is not None:
            op, target = "call_module", f"module_{len(self.modules)}"
            self.modules[target] = entry.module
        node = self.graph.create_node(op, target, tuple(args), dict(kwargs))
        node.meta = {k: v for k, v in entry.node.meta.items() if k in ("stack_trace", "nn_module_stack")}
        node.meta["example_value"] = entry.fake
        return node

    def _enter(self, state: tuple[Any, ...]) -> None:
        """Enter the autocast regions that surround the node in the user's program."""
        pairs = zip(self._autocast, state, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] == pair[1], pairs))
        self._leave_autocast(shared)
        for arguments in state[shared:]:
            self._autocast.append((arguments, self.graph.call_function(_enter_autocast, arguments)))

    def _leave_autocast(self, depth: int) -> None:
        while len(self._autocast) > depth:
            _, enter = self._autocast.pop()
            self.graph.call_function(_exit_autocast, (enter,))
