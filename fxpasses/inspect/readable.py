"""A stage as text that reads like the program: one node per line, with its type and source line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from fxpasses.inspect.model import Node, Stage, TensorValue


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
    arguments = [argument_text(a) for a in node.args]
    arguments += [f"{name}={argument_text(a)}" for name, a in node.kwargs.items()]
    if node.op == "output":
        return f"return {', '.join(arguments)}"
    if node.op == "call_method" and arguments:
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    return f"{node.target}({', '.join(arguments)})"


def argument_text(value: Any, label: Callable[[str], str] = str) -> str:
    """An argument in Python's syntax, except that slices are as between brackets. label: the text of a node's name."""
    if isinstance(value, list):
        return f"[{', '.join(argument_text(item, label) for item in value)}]"
    if not isinstance(value, dict):
        return repr(value)
    if "node" in value:
        return label(value["node"])
    if "body" in value:
        return str(value["body"]).rsplit("/", 1)[-1]
    if "constant" in value:
        return str(value["constant"])
    if "slice" in value:
        parts = ("" if part is None else argument_text(part, label) for part in value["slice"])
        return ":".join(parts).removesuffix(":")
    return f"{{{', '.join(f'{key}: {argument_text(item, label)}' for key, item in value.get('dict', []))}}}"


def input_name(node: Node) -> str:
    """`lengths` for Dynamo's `L['lengths']`, `layers.0.weight` for a parameter, else the node's target."""
    name = re.sub(r"^[LG]\['(\w+)'\]", r"\1", node.source_name)
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", name)
    return name.removeprefix("self.") or node.target


def type_text(value: TensorValue) -> str:
    """`float32[16, u0]`, with the device if it is not the CPU."""
    device = "" if value.device == "cpu" else f" on {value.device}"
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]{device}"
