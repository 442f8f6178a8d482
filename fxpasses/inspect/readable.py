"""A stage as text that reads like the program: one node per line, with its type and source line."""

from __future__ import annotations

from typing import Any

from fxpasses.inspect.changes import input_name, type_text
from fxpasses.inspect.model import Node, Stage


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


def argument_text(value: Any) -> str:
    """An argument in Python's syntax."""
    if isinstance(value, list):
        return f"[{', '.join(map(argument_text, value))}]"
    if not isinstance(value, dict):
        return repr(value)
    if "node" in value:
        return str(value["node"])
    if "body" in value:
        return str(value["body"]).rsplit("/", 1)[-1]
    if "constant" in value:
        return str(value["constant"])
    if "slice" in value:
        return f"slice({', '.join(map(argument_text, value['slice']))})"
    return f"{{{', '.join(f'{key}: {argument_text(item)}' for key, item in value.get('dict', []))}}}"
