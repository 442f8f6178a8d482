"""When Inductor's code for a graph allocates and frees memory, read from the code itself.

    buf0 = empty_strided_cpu((1024, 512), (512, 1), torch.float32)      + 2 MiB
    cpp_fused_gelu_0(mm, buf0)
    del mm                                                              an input is dropped
    buf1 = reinterpret_tensor(buf0, (512, 1024), ...); del buf0  # reuse
    buf2 = extern_kernels.mm(buf1, permute_1)
    del buf1                                                            - 2 MiB

The scheduler has fused and ordered operators, and buffers take the place of others: the code is what is left of it, in
PyTorch's caches as well. What it allocates inside of operators is not in it.

Private names, checked on torch 2.11, 2.13 and 2.15: `CompiledFxGraph.source_code`, a module in Python whose function
`call` takes a list of inputs, and the functions that it calls to allocate (`empty_strided_cpu`), to look at memory in
another way (`reinterpret_tensor`) and to check results of operators (`assert_size_stride`).
"""

from __future__ import annotations

import ast
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule

from fxpasses.graph.symbols import in_batch, is_symbolic, symbols_in_batch
from fxpasses.memory.limits import rounded

_COMMON = 4  # bytes of an element, where the graph has no tensor of a size
_VIEWS = ("reinterpret_tensor", "alloc_from_pool", "copy_if_misaligned", "copy_misaligned")
Sizes = Mapping[str, Any]
ItemSize = Callable[[Sequence[int], Sequence[int]], int]


@dataclass
class WrapperCode:
    """The statements of `call`, by number. changes: the bytes that each allocates for results of its own, less those
    that it frees. dropped: the one that drops an input, by name; inputs that are not here are there to the end.
    operators: the names of operators outside of Inductor's kernels, with the statements that call them."""

    changes: list[int] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    operators: list[tuple[str, int]] = field(default_factory=list)

    @property
    def end(self) -> int:
        return len(self.changes)


class NotRead(Exception):
    """The code has a form that is not known here."""


def code_of(gm: GraphModule, source: str) -> WrapperCode:
    """Read Inductor's code for a graph of AOTAutograd, at the sizes of the batch being traced. Raises `NotRead`."""
    inputs = {node.name: node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")}
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    sizes: dict[str, Any] = {name: in_batch(value) for name, value in inputs.items() if is_symbolic(value)}
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for node in gm.graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                sizes |= {str(found): value for found, value in symbols_in_batch(leaf).items()}
                shape, strides = _of_batch(leaf.shape), _of_batch(leaf.stride())
                if shape is not None and strides is not None:
                    known.setdefault((shape, strides), leaf.element_size())
    device = next((value.device.type for value in tensors.values() if value.device.type != "cpu"), "cpu")

    def item_size(shape: Sequence[int], strides: Sequence[int]) -> int:
        return known.get((tuple(shape), tuple(strides)), _COMMON)

    return read(source, tensors, sizes, device, item_size)


def _of_batch(sizes: Sequence[Any]) -> tuple[int, ...] | None:
    found = [size if isinstance(size, int) else in_batch(size) for size in sizes]
    return None if None in found else tuple(map(int, found))


def read(source: str, inputs: Collection[str], sizes: Sizes, device: str, item_size: ItemSize) -> WrapperCode:
    """Read a module's code.

    inputs: the names of the graph's. sizes: the values of symbols, and of inputs that are numbers, by name. device: the
    type of device whose memory counts. item_size: the bytes of an element, by size and strides, for operators' results,
    of which the code does not say it. Raises `NotRead`.
    """
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    found = [node for node in functions if node.name == "call"]
    if len(found) != 1 or any(node.name.startswith("partition_") for node in functions):
        raise NotRead("it is not one function `call`")
    reader = _Reader(inputs, dict(sizes), device, item_size)
    for statement in _statements(found[0].body):
        reader.read(statement)
    return reader.found


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        elif isinstance(statement, (ast.For, ast.While, ast.If, ast.Try)):
            raise NotRead(f"{type(statement).__name__} in it")
        else:
            yield statement


class _Reader:
    """What is known before a statement: the memory of names, by number, and how many names each number has."""

    def __init__(self, inputs: Collection[str], sizes: dict[str, Any], device: str, item_size: ItemSize) -> None:
        self.found = WrapperCode()
        self._inputs, self._sizes, self._device, self._item_size = inputs, sizes, device, item_size
        self._memory: dict[str, frozenset[int]] = {}
        self._bytes: dict[int, int] = {}
        self._made: dict[int, int] = {}  # by memory: the statement that allocates it
        self._parts: dict[tuple[int, str], int] = {}
        self._names: Counter[int] = Counter()
        self._numbers = itertools.count()
        self._inputs_at: dict[int, str] = {}
        for name in inputs:
            self._inputs_at[number := next(self._numbers)] = name
            self._bytes[number] = 0
            self._bind(name, frozenset([number]))

    def read(self, statement: ast.stmt) -> None:
        self.found.changes.append(0)
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    self._bind(target.id, frozenset())
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            self._assign(statement.targets[0].id, statement.value)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            self._call(statement.value)
        elif isinstance(statement, ast.Assign) and not _is_unpacking(statement):
            raise NotRead(ast.unparse(statement)[:80])

    def _assign(self, name: str, value: ast.expr) -> None:
        if isinstance(value, ast.Name):
            if value.id in self._memory:
                self._bind(name, self._memory[value.id])
            else:
                self._note_size(name, value)
        elif isinstance(value, ast.Subscript):
            self._bind(name, self._part(_name(value.value), ast.unparse(value.slice)))
        elif isinstance(value, ast.Call):
            function = _name(value.func)
            if function.startswith("empty_strided"):
                self._new(name, self._allocated(function, value))
            elif function in _VIEWS:
                self._bind(name, self._memory.get(_name(value.args[0]), frozenset()))
            elif function == "get_raw_stream":
                pass
            else:
                self._note_operator(function)
                self._new(name, 0)
        else:
            self._note_size(name, value)

    def _call(self, call: ast.Call) -> None:
        function = _name(call.func)
        if function == "assert_size_stride" and len(call.args) > 2:
            self._check(_name(call.args[0]), self._numbers_in(call.args[1]), self._numbers_in(call.args[2]))
        elif "." in function:
            self._note_operator(function)

    def _part(self, whole: str, index: str) -> frozenset[int]:
        """The memory of one of an operator's results, which lives as long as all of them do, or longer."""
        if len(self._memory.get(whole, ())) == 0:
            raise NotRead(f"{whole}[{index}]")
        first = min(self._memory[whole])
        if (first, index) not in self._parts:
            self._parts[first, index] = number = next(self._numbers)
            self._bytes[number], self._made[number] = 0, self._made.get(first, self.found.end - 1)
            self._memory[whole] |= {number}
            self._names[number] += 1
        return frozenset([self._parts[first, index]])

    def _check(self, name: str, shape: Sequence[int], strides: Sequence[int]) -> None:
        """The size of an operator's result."""
        if name in self._inputs:
            return
        for number in self._memory.get(name, frozenset()):
            if self._bytes[number] == 0:
                size = _extent(shape, strides) * self._item_size(shape, strides)
                self._grow(number, rounded(size, self._device))

    def _note_operator(self, function: str) -> None:
        namespace, _, name = function.removeprefix("torch.ops.").partition(".")
        name = name.partition(".")[0]
        self.found.operators.append(
            (name if namespace in ("aten", "extern_kernels") else f"{namespace}::{name}", self.found.end - 1)
        )

    def _allocated(self, function: str, call: ast.Call) -> int:
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        device = function.removeprefix("empty_strided").removeprefix("_") or ast.unparse(named["device"])
        if self._device not in device:
            return 0
        dtype = getattr(torch, ast.unparse(named.get("dtype") or call.args[2]).removeprefix("torch."))
        elements = _extent(self._numbers_in(call.args[0]), self._numbers_in(call.args[1]))
        return rounded(elements * int(dtype.itemsize), self._device)

    def _numbers_in(self, shape: ast.expr) -> list[int]:
        try:
            value = eval(compile(ast.Expression(shape), "", "eval"), {"__builtins__": {}, **_FUNCTIONS, **self._sizes})
            return [int(each) for each in value]
        except (ArithmeticError, NameError, TypeError, ValueError) as error:
            raise NotRead(f"the size {ast.unparse(shape)}") from error

    def _note_size(self, name: str, value: ast.expr) -> None:
        """A number of the code; unknown ones matter only where a size needs them."""
        try:
            self._sizes[name] = eval(
                compile(ast.Expression(value), "", "eval"), {"__builtins__": {}, **_FUNCTIONS, **self._sizes}
            )
        except Exception:
            self._sizes.pop(name, None)

    def _new(self, name: str, size: int) -> None:
        self._bytes[number := next(self._numbers)] = 0
        self._made[number] = self.found.end - 1
        self._bind(name, frozenset([number]))
        self._grow(number, size)

    def _grow(self, number: int, size: int) -> None:
        self._bytes[number] = size
        self.found.changes[self._made[number]] += size

    def _bind(self, name: str, numbers: frozenset[int]) -> None:
        """Let a name stand for memory; what has no name any more is free."""
        before = self._memory.pop(name, frozenset())
        if numbers:
            self._memory[name] = numbers
        self._names.update(numbers)
        self._names.subtract(before)
        for number in before:
            if self._names[number] == 0:
                if number in self._inputs_at:
                    self.found.dropped[self._inputs_at[number]] = self.found.end - 1
                self.found.changes[-1] -= self._bytes[number]


def _is_unpacking(statement: ast.stmt) -> bool:
    """Whether it is `a, b, = args`."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return len(targets) == 1 and isinstance(targets[0], ast.Tuple) and isinstance(statement.value, ast.Name)  # type: ignore[attr-defined]


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """The number of elements from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


_FUNCTIONS = {"max": max, "min": min, "abs": abs, "math": math, "int": int}
