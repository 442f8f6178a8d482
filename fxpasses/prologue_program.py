"""The program of a prologue, as data: what a pass cuts out of a graph, and the runtime computes once per batch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule


@dataclass(frozen=True)
class Check:
    """An assertion on host numbers: outputs `left` and `right` of the host program, or constants, compared.

    comparison: "==", "<=", ... or "" where `left` itself must hold. left_text, right_text: the operands in words.
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

    dimension: the size of the tensor there along it, instead of the tensor. as_dtype: the number there as a CPU tensor
    of no dimensions. as_int: the bool there as 0 or 1.
    """

    side: str
    position: int
    dimension: int | None = None
    as_dtype: torch.dtype | None = None
    as_int: bool = False


@dataclass(frozen=True)
class Program:
    """A prologue in two parts.

    host: a graph on CPU tensors and integers. `host_inputs` are positions among the main graph's inputs; tensors that
    lie on another device are copied to the host first, all of one device in one transfer.
    device: a graph of what lies on an accelerator; on the CPU, of large tensors that a compiler is worth its time for;
    or None. Its inputs are the main graph's inputs at `device_inputs`, and then the outputs of the host graph at
    `imports`, tensors among them copied to the device given there.
    Fake values of what a graph takes and returns are in the nodes' `meta["example_value"]`.
    outputs: where each extra input of the main graph comes from. checks: evaluated after the host part.
    roots: positions of the tensor inputs on which any output depends.
    written: positions of integer inputs that the main graph writes to; where one shares memory with a root, the program
    is not valid.
    on_accelerator: whether the device graph runs there. worth_compiling: whether a compiler saves much on it.
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
        """A fingerprint: programs with equal keys compute equal results from equal inputs, in whatever graph."""
        positions = (*self.host_inputs, *self.device_inputs)
        kinds = [self.roots.index(i) if i in self.roots else "size" for i in positions]
        text: list[Any] = [_code(self.host), _code(self.device), kinds, self.imports, self.outputs, self.checks]
        return hashlib.sha256(repr(text).encode()).hexdigest()


def _code(module: GraphModule | None) -> str:
    """The code of a graph and of the graphs that it calls."""
    modules = () if module is None else module.modules()
    return "\n".join(part.code for part in modules if isinstance(part, GraphModule))
