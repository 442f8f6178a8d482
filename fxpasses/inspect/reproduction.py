"""Writes a recorded graph as a Python program: the captured graph, its inputs, and a comparison with eager mode.

A record is data and may come from anyone, so everything written is checked: names are identifiers, operators are those
of torch, operator, math and builtins, and constants are written by `repr`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from typing import Any

from fxpasses.inspect.model import MAIN, Graph, Node, Region, bodies_of
from fxpasses.inspect.readable import Printer

_TARGET = re.compile(r"(torch|_operator|math|builtins)(\.[A-Za-z_]\w*)+")
_METHOD = re.compile(r"[A-Za-z_]\w*")
_DEVICE = re.compile(r"(cpu|cuda|hpu|meta|mps|mtia|xpu)(:\d+)?")
_CHECKPOINT = "torch.ops.higher_order.tag_activation_checkpoint"
_FORBIDDEN = frozenset({"eval", "exec", "compile", "open", "__import__", "input", "breakpoint", "system", "load"})

_HEAD = '''"""A captured graph of {origin}; written by `fxpasses bisect`.

    python {file}

Compares eager mode with the passes {passes}, and exits with an error if they disagree.
{data}
"""

import math
import operator
import os
import sys

import torch
from torch.utils.checkpoint import checkpoint
{environment}
torch.manual_seed(0)
'''

_TAIL = """

def results(function):
    inputs = [value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
              for value in INPUTS]
    outputs = [value for value in function(*inputs) if isinstance(value, torch.Tensor)]
    leaves = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    differentiable = [value for value in outputs if value.requires_grad]
    gradients = ()
    if differentiable and leaves:
        ones = [torch.ones_like(value) for value in differentiable]
        gradients = torch.autograd.grad(differentiable, leaves, ones, allow_unused=True)
    return outputs, inputs, gradients


if __name__ == "__main__":
    options = {{"fastpack.passes": {passes!r}, "fastpack.lowering": "eager", "fastpack.strict": True}}
    compiled = torch.compile(program, backend="fastpack", options=options)
    names = ("outputs", "inputs after the run", "gradients")
    for name, expected, actual in zip(names, results(program), results(compiled)):
        try:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        except AssertionError as error:
            print(f"eager mode and the passes disagree: {{name}}: {{error}}")
            sys.exit(1)
    print("eager mode and the passes agree")
"""

AGREE = "eager mode and the passes agree"
DISAGREE = "eager mode and the passes disagree"


def outcome(printed: str) -> str:
    """The outcome of a reproduction by its output: "agree", "disagree", or the type of the error that ended it."""
    if DISAGREE in printed:
        return "disagree"
    if AGREE in printed:
        return "agree"
    last = next((line for line in reversed(printed.splitlines()) if line and not line[0].isspace()), "no message")
    return last.split(":", 1)[0]


class CannotReproduce(ValueError):
    """A part of a graph that cannot be written as a program, which the message names."""


def reproduction(
    graph: Graph, passes: list[str], file: str = "reproduction.py", environment: Mapping[str, str] | None = None
) -> str:
    """The text of the file, which sets `environment` before it compiles anything; raises `CannotReproduce`."""
    regions = {region.path: region for region in graph.captured.regions or ()}
    inputs = [node for node in regions[MAIN].nodes if node.op == "placeholder"]
    has_data = any(node.data is not None for node in inputs)
    data = (
        "Small integer inputs have the values of the run; the other inputs are random."
        if has_data
        else "The inputs are random: the record holds no data, and integers may need meaningful values."
    )
    origin = re.sub(r"[^\w .:/-]", "", graph.function) or "a program"
    settings = "".join(f"\nos.environ[{name!r}] = {value!r}" for name, value in (environment or {}).items())
    listed = ", ".join(passes) or "(none)"
    parts = [_HEAD.format(origin=origin, file=file, passes=listed, data=data, environment=settings)]
    for path in sorted(regions, key=lambda path: -path.count("/")):
        if not regions[path].in_prologue:
            parts.append(_function(regions[path], graph))
    parts.append("\nINPUTS = [\n" + "".join(f"    {_input(node, graph)},\n" for node in inputs) + "]\n")
    return "\n".join(parts) + _TAIL.format(passes=list(passes))


def _function(region: Region, graph: Graph) -> str:
    attributes, lines = [], []
    parameters = [_name(node.name) for node in region.nodes if node.op == "placeholder"]
    for node in region.nodes:
        if node.op == "get_attr":
            attributes.append(f"{_global(region, node)} = {_input(node, graph)}")
            lines.append(f"{_name(node.name)} = {_global(region, node)}")
        elif node.op == "output":
            lines.append(f"return {_PRINTER.argument(node.args[0])}")
        elif node.op != "placeholder":
            if len(node.args) != _SUBSCRIPTS.get(node.target, len(node.args)):
                raise CannotReproduce(f"the arguments of {node.name!r}")
            place = f"  # {node.source}" if node.source and str(node.source).isprintable() else ""
            assigned = "" if node.target == "_operator.setitem" else f"{_name(node.name)} = "
            lines.append(f"{assigned}{_PRINTER.call(node)}{place}")
    name = "program" if region.path == MAIN else _PRINTER.body(region.path)
    head = "".join(f"{line}\n" for line in attributes)
    return f"\n{head}{chr(10) if head else ''}def {name}({', '.join(parameters)}):\n" + "\n".join(
        f"    {line}" for line in lines
    )


_SUBSCRIPTS = {"_operator.getitem": 2, "_operator.setitem": 3}  # operators to their number of arguments


def _name(name: str) -> str:
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise CannotReproduce(f"the name {str(name)[:60]!r}")
    return name


class _Checked(Printer):
    """Writes no name, constant or operator that could be code of a record's author."""

    def body(self, path: str) -> str:
        # With a prefix: Dynamo would take a global function with the name of one of its own bodies for that body.
        return _name("inside_" + re.sub(r"\W", "_", path.removeprefix(f"{MAIN}/")))

    def constant(self, text: str) -> str:
        if text == "..." or re.fullmatch(r"torch\.[a-z]\w*", text):
            return text
        if re.fullmatch(r"-?(inf|nan)", text):
            return f'float("{text}")'
        if _DEVICE.fullmatch(text):
            return f'torch.device("{text}")'
        raise CannotReproduce(f"the constant {text[:60]!r}")

    def call(self, node: Node) -> str:
        if node.op == "call_method":
            if not _METHOD.fullmatch(node.target) or node.target.startswith("__") or node.target in _FORBIDDEN:
                raise CannotReproduce(f"the method {node.target!r}")
        elif node.target == _CHECKPOINT:
            return f"checkpoint({', '.join(map(self.argument, node.args))}, use_reentrant=False)"
        elif bodies_of(node) or not _TARGET.fullmatch(node.target) or node.short_target in _FORBIDDEN:
            raise CannotReproduce(f"the operator {node.target!r}")
        if node.target == "_operator.setitem":  # a call with a slice would break the graph
            target, index, value = node.args
            return f"{self.argument(target)}[{self.index(index)}] = {self.argument(value)}"
        return super().call(node)


_PRINTER = _Checked(_name)


def _input(node: Node, graph: Graph) -> str:
    """An expression for an input, with its recorded elements if there are any."""
    if not node.values:
        known = node.data if node.data is not None else graph.symbols.get(node.scalar)
        if isinstance(known, (bool, int, float)):
            return repr(known)
        raise CannotReproduce(f"the input {node.target!r}, whose value is not known")
    value = node.values[0]
    dtype = _dtype(value.dtype)
    if isinstance(node.data, (list, bool, int)):
        return f"torch.tensor({_numbers(node.data)}, dtype={dtype})"
    shape = tuple(_known(size, graph, node) for size in value.shape)
    if value.dtype.startswith(("float", "bfloat")):
        tensor = f"torch.randn({shape}, dtype={dtype})"
        return f"{tensor}.requires_grad_()" if value.requires_grad else tensor
    return f"torch.randint(0, 2, {shape}).to({dtype})"


def _numbers(data: Any) -> str:
    if isinstance(data, list):
        return f"[{', '.join(map(_numbers, data))}]"
    if isinstance(data, (bool, int)):
        return repr(data)
    raise CannotReproduce("the data of an input")


def _known(size: int | str, graph: Graph, node: Node) -> int:
    known = size if isinstance(size, int) else graph.symbols.get(size)
    if known is None:
        raise CannotReproduce(f"the size {size!r} of the input {node.target!r}")
    return known


def _dtype(name: str) -> str:
    if not re.fullmatch(r"[a-z]\w*", name):
        raise CannotReproduce(f"the dtype {name!r}")
    return f"torch.{name}"


def _global(region: Region, node: Node) -> str:
    return _name(f"{_PRINTER.body(region.path)}_{node.name}".upper())
