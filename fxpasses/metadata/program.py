"""The program of a prologue, as data: passes extract it from a graph, and the runtime runs it once per batch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule


@dataclass(frozen=True)
class Check:
    """An assertion that compares `left` and `right`, outputs of the host program or constants.

    comparison: "==", "<=", ... or "" if `left` itself must hold. left_text, right_text: the operands in a message.
    """

    comparison: str
    left: int | float | bool | Output
    right: int | float | bool | Output
    left_text: str
    right_text: str
    where: str


@dataclass(frozen=True)
class Output:
    """A position among the outputs of a program's host or device graph.

    dimension: take the tensor's size along it, instead of the tensor. as_dtype: convert the number to a CPU tensor
    without dimensions. as_int: convert the bool to 0 or 1.
    """

    side: str
    position: int
    dimension: int | None = None
    as_dtype: torch.dtype | None = None
    as_int: bool = False


@dataclass(frozen=True)
class Program:
    """A prologue in two parts.

    host: a graph on CPU tensors and integers. `host_inputs` are positions among the main graph's inputs; tensors on
    another device are copied to the host first, all of one device in one transfer.
    device: a graph on an accelerator's tensors, or on large CPU tensors that are worth compiling, or None. Its inputs
    are the main graph's inputs at `device_inputs`, followed by the outputs of the host graph at `imports`; tensors
    among the latter are copied to the device given there.
    The fake values of a graph's inputs and outputs are in the nodes' `meta["example_value"]`.
    outputs: the origin of each extra input of the main graph. checks: evaluated after the host part.
    roots: positions of the tensor inputs on which any output depends.
    written: positions of integer inputs that the main graph writes to; if one shares memory with a root, the program is
    not valid.
    on_accelerator: whether the device graph runs on an accelerator. worth_compiling: whether compiling it saves much.
    """

    host: GraphModule
    host_inputs: tuple[int, ...]
    device: GraphModule | None
    device_inputs: tuple[int, ...]
    imports: tuple[tuple[int, torch.device | None], ...]
    outputs: tuple[Output, ...]
    checks: tuple[Check, ...]
    roots: tuple[int, ...]
    written: tuple[int, ...] = ()
    on_accelerator: bool = False
    worth_compiling: bool = False

    def key(self) -> str:
        """A fingerprint: programs with equal keys compute equal results from equal inputs, whatever their graphs."""
        positions = (*self.host_inputs, *self.device_inputs)
        kinds = [self.roots.index(i) if i in self.roots else "size" for i in positions]
        text: list[Any] = [_code(self.host), _code(self.device), kinds, self.imports, self.outputs, self.checks]
        return hashlib.sha256(repr(text).encode()).hexdigest()


def _code(module: GraphModule | None) -> str:
    """The code of a graph and of its submodules."""
    modules = () if module is None else module.modules()
    return "\n".join(part.code for part in modules if isinstance(part, GraphModule))
