"""Whether a graph is the whole program given to `torch.compile`: no frame around it, and no graph break in it.

Private name, checked on torch 2.11, 2.13 and 2.15: `compile_subgraph_reason`, of an `OutputGraph` and of its graph.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

import fxpasses

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_DYNAMO = os.path.dirname(torch._dynamo.__file__)
_CALLER, _CALLED = os.path.join(_DYNAMO, "eval_frame.py"), os.path.join(_DYNAMO, "external_utils.py")
# The files of the stack frames between the caller and the traced frame: Dynamo, this package, and a module's call.
_BETWEEN = (
    _DYNAMO,
    os.path.dirname(fxpasses.__file__),
    str(torch.nn.modules.module.__file__),
    str(torch._utils_internal.__file__),
    str(contextlib.__file__),
)


def traces_what_was_given() -> bool:
    """Whether the traced frame itself was passed to `torch.compile`, and is not one that such a frame calls."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != _CALLER:
        name = frame.f_code.co_filename
        if name == _CALLED or not name.startswith(_BETWEEN):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def is_whole(trace: Trace, gm: GraphModule) -> bool:
    """Whether a complete graph is known to be the whole program given to `torch.compile`."""
    return trace.given and not is_part_of_frame(gm)


def is_part_of_frame(output: Any) -> bool:
    """Whether the complete graph of Dynamo's `OutputGraph` ends at a graph break."""
    reason = getattr(output, "compile_subgraph_reason", None)
    return reason is None or reason.graph_break
