"""Where in the user's program a node comes from.

Private name, checked on torch 2.11, 2.13 and 2.15: the attribute `_dynamo_source` of Dynamo's placeholders. Its `name`
is an attribute there, and was a method before 2.10.
"""

from __future__ import annotations

import os
import re

from torch.fx import GraphModule, Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def where(node: Node) -> str:
    """`file.py:12` of the innermost user frame that made the node, or "" where it is not known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line = frames[-1]
    return f"{os.path.basename(file)}:{line}"


def source(placeholder: Node) -> str:
    """The expression by which Dynamo found an input, such as `L['batch']['lengths']`; "" where there is none."""
    found = getattr(getattr(placeholder, "_dynamo_source", None), "name", "")
    return found() if callable(found) else found


def input_sources(gm: GraphModule) -> list[str]:
    """`source` of every placeholder, in order."""
    return [source(node) for node in gm.graph.find_nodes(op="placeholder")]
