"""Where in the user's program a node comes from.

Private names, checked on torch 2.11, 2.13 and 2.15: the attribute `_dynamo_source` of Dynamo's placeholders, whose
`name` is an attribute there, and was a method before 2.10; and `torch.fx.traceback.current_meta`.
"""

from __future__ import annotations

import os
import re

from torch.fx import GraphModule, Node
from torch.fx import traceback as fx_traceback

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def where(node: Node) -> str:
    """`file.py:12` of the innermost user frame that made the node, or "" where it is not known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line = frames[-1]
    return f"{os.path.basename(file)}:{line}"


def module_of(node: Node) -> tuple[str, str]:
    """The innermost module's path (`model.layers.0.self_attn`) and the name of its class; "" where there is none."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", ""
    path, cls = list(stack.values())[-1][:2]
    path = re.sub(r"^L\['(\w+)'\]\.?", lambda m: "" if m[1] == "self" else f"{m[1]}.", str(path)).rstrip(".")
    path = re.sub(r"(?:\._modules)?\['([^']*)'\]|\[(\d+)\]", lambda m: f".{m[1] or m[2]}", path)
    return path.lstrip("."), cls if isinstance(cls, str) else getattr(cls, "__name__", "")


def source(placeholder: Node) -> str:
    """The expression by which Dynamo found an input, such as `L['batch']['lengths']`; "" where there is none."""
    found = getattr(getattr(placeholder, "_dynamo_source", None), "name", "")
    return found() if callable(found) else found


def input_sources(gm: GraphModule) -> list[str]:
    """`source` of every placeholder, in order."""
    return [source(node) for node in gm.graph.find_nodes(op="placeholder")]


def forget_leftovers() -> None:
    """Call before a trace: what every new node would be said to come from, if a thread left a node behind.

    `tag_activation_checkpoint`, run without a compiler, keeps the node that it runs in a global of torch.fx, and puts
    back what was there before. Two threads at it put back each other's, and every later trace in the process takes
    source lines and modules from that node. Annotations of the user (`custom`) are kept in the same place, and stay.
    """
    left = getattr(fx_traceback, "current_meta", None)
    if left and "stack_trace" in left:
        fx_traceback.current_meta = {key: value for key, value in left.items() if key == "custom"}
