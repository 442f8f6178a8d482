"""The place in the user's program that a node comes from.

Private names, checked on torch 2.11, 2.13 and 2.15: the attribute `_dynamo_source` of Dynamo's placeholders, whose
`name` is an attribute there, and was a method before 2.10; and `torch.fx.traceback.current_meta`.
"""

from __future__ import annotations

import os
import re

from torch.fx import GraphModule, Node
from torch.fx import traceback as fx_traceback

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def where(node: Node) -> str:
    """`file.py:12` of the innermost user frame that made the node, or "" if unknown."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line = next((frame for frame in reversed(frames) if not is_of_package(frame[0])), frames[-1])
    return f"{os.path.basename(file)}:{line}"


def is_of_package(file: str) -> bool:
    """Whether a file is this package's: some of its functions are traced in place of the program's calls."""
    return file.startswith(_PACKAGE)


def module_of(node: Node) -> tuple[str, str]:
    """The innermost module's path (`model.layers.0.self_attn`) and the name of its class; "" if there is none."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", ""
    path, cls = list(stack.values())[-1][:2]
    path = re.sub(r"^L\['(\w+)'\]\.?", lambda m: "" if m[1] == "self" else f"{m[1]}.", str(path)).rstrip(".")
    path = re.sub(r"(?:\._modules)?\['([^']*)'\]|\[(\d+)\]", lambda m: f".{m[1] or m[2]}", path)
    return path.lstrip("."), cls if isinstance(cls, str) else getattr(cls, "__name__", "")


def source(placeholder: Node) -> str:
    """Dynamo's source expression for an input, such as `L['batch']['lengths']`; "" if there is none."""
    found = getattr(getattr(placeholder, "_dynamo_source", None), "name", "")
    return found() if callable(found) else found


def in_program(expression: str) -> str:
    """A source expression as the user writes it: `batch['lengths']` for `L['batch']['lengths']`."""
    return re.sub(r"^[LG]\['(\w+)'\]", r"\1", expression)


def input_sources(gm: GraphModule) -> list[str]:
    """`source` of every placeholder, in order."""
    return [source(node) for node in gm.graph.find_nodes(op="placeholder")]


def forget_leftovers() -> None:
    """Drop the stale provenance that threads may have left in torch.fx; to be called before a trace.

    `tag_activation_checkpoint`, run without a compiler, stores the node that it runs in a global of torch.fx, and
    restores the previous one. Two threads may restore each other's node, and then every later trace in the process
    attributes its nodes to that node's source line and module. The same global holds the user's annotations (`custom`),
    which are kept.
    """
    left = getattr(fx_traceback, "current_meta", None)
    if left and "stack_trace" in left:
        fx_traceback.current_meta = {key: value for key, value in left.items() if key == "custom"}
