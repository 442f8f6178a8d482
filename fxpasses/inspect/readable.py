"""Nodes as Python text: a stage that reads like the program, one node per line, with its type and source line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fxpasses.graph.provenance import in_program
from fxpasses.inspect.model import Node, Stage, TensorValue


class Printer:
    """Writes calls and arguments of nodes. name: the text of a node's name. Subclasses write other things otherwise."""

    def __init__(self, name: Callable[[str], str] = str) -> None:
        self.name = name

    def body(self, path: str) -> str:
        return str(path).rsplit("/", 1)[-1]

    def constant(self, text: str) -> str:
        return str(text)

    def call(self, node: Node) -> str:
        given = [self.argument(value) for value in node.args]
        if node.target == "_operator.getitem" and len(given) == 2:
            return f"{given[0]}[{self.index(node.args[1])}]"
        if node.target == "_operator.setitem" and len(given) == 3:
            given[1] = f"[{self.index(node.args[1])}]"
        given += [f"{self.name(name)}={self.argument(value)}" for name, value in node.kwargs.items()]
        if node.op == "call_method" and given:
            return f"{given[0]}.{node.target}({', '.join(given[1:])})"
        target = node.target.replace("_operator.", "operator.", 1).removeprefix("builtins.")
        return f"{target}({', '.join(given)})"

    def argument(self, value: Any) -> str:
        if isinstance(value, list):
            return f"({', '.join(map(self.argument, value))}{',' * (len(value) == 1)})"
        if not isinstance(value, dict):
            return repr(value)
        if "node" in value:
            return self.name(value["node"])
        if "body" in value:
            return self.body(value["body"])
        if "slice" in value:
            return f"slice({', '.join(map(self.argument, value['slice']))})"
        if "dict" in value:
            return f"{{{', '.join(f'{key!r}: {self.argument(item)}' for key, item in value['dict'])}}}"
        return self.constant(str(value.get("constant")))

    def index(self, value: Any) -> str:
        """An argument within square brackets."""
        if isinstance(value, list):
            return ", ".join(map(self.index, value)) + "," * (len(value) == 1) if value else "()"
        if isinstance(value, dict) and "slice" in value:
            parts = ("" if part is None else self.argument(part) for part in value["slice"])
            return ":".join(parts).removesuffix(":")
        return self.argument(value)


def readable(stage: Stage) -> str:
    lines: list[str] = []
    for region in stage.regions or ():
        lines += [f"# {region.path}" + (f", run by {region.call}" if region.call else ""), ""]
        lines += [f"    {line(node)}" for node in region.nodes]
        lines.append("")
    if stage.checks:
        lines += ["# checked with the prologue", "", *(f"    assert {check}" for check in stage.checks), ""]
    return "\n".join(lines)


def line(node: Node) -> str:
    """`y: float32[4, u0] = torch.relu(x)  # model.py:12 in layers.0`."""
    kind = ", ".join(map(type_text, node.values)) or (f"Sym({node.scalar})" if node.scalar else "")
    place = " in ".join(part for part in (str(node.source or ""), node.module) if part)
    return f"{node.name}{': ' + kind if kind else ''} = {call_text(node)}" + (f"  # {place}" if place else "")


def call_text(node: Node) -> str:
    if node.op == "placeholder":
        return f"input {input_name(node)}"
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.op == "output":
        return f"return {', '.join(map(Printer().argument, node.args))}"
    return Printer().call(node)


def input_name(node: Node) -> str:
    """`lengths` for Dynamo's `L['lengths']`, `layers.0.weight` for a parameter, else the node's target."""
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", in_program(node.source_name))
    return name.removeprefix("self.") or node.target


def type_text(value: TensorValue) -> str:
    """`float32[16, u0]`, with the device if it is not the CPU."""
    device = "" if value.device == "cpu" else f" on {value.device}"
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]{device}"
