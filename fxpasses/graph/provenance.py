"""Where in the user's program a node comes from."""

from __future__ import annotations

import os
import re

from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def where(node: Node) -> str:
    """`file.py:12` of the innermost user frame that made the node, or "" where it is not known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line = frames[-1]
    return f"{os.path.basename(file)}:{line}"
