"""What Dynamo compiled in this process, and why: read at the end of a run.

Private names, checked on torch 2.11, 2.13 and 2.15: `torch._dynamo.utils.get_compilation_metrics`, a list of the last
compilations with `compile_id`, `co_name`, `co_filename`, `co_firstlineno`, `recompile_reason` (`0/1: ` and the guard
that failed) and `fail_reason`; `set_compilation_metrics_limit`, how many it keeps (64); and `graph_break_reasons`, a
list of `reason` and `user_stack`. Without a name, the history lacks what it tells.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch._dynamo.config
import torch._dynamo.utils as dynamo

_MOST = 4096
_TORCH, _PYTHON = (os.path.join(os.path.dirname(str(module.__file__)), "") for module in (torch, os))


@dataclass(frozen=True)
class Compilation:
    """One compilation of a frame. place: `function (file:line)`; guard: that failed, "" the first time; error: if any.

    frame: Dynamo's number of the frame, -1 if unknown; seconds: of Dynamo and the backend.
    """

    frame: int
    place: str
    guard: str
    error: str
    seconds: float


@dataclass(frozen=True)
class Break:
    """A place where the graph breaks, and why, in one line."""

    where: str
    reason: str


def keep_more() -> None:
    """Have Dynamo remember enough compilations for a whole run."""
    limit = getattr(dynamo, "set_compilation_metrics_limit", None)
    if limit is not None:
        limit(_MOST)


def compilations() -> Iterator[Compilation]:
    for entry in getattr(dynamo, "get_compilation_metrics", list)():
        frame = str(getattr(entry, "compile_id", None) or "").split("/")[0]
        name, file = getattr(entry, "co_name", None), getattr(entry, "co_filename", None)
        if name is None or file is None:  # of a backward pass, which has no frame
            continue
        reason = (getattr(entry, "recompile_reason", None) or "").partition(": ")[2]
        yield Compilation(
            frame=int(frame) if frame.isdecimal() else -1,
            place=f"{name} ({os.path.basename(file)}:{getattr(entry, 'co_firstlineno', 0)})",
            guard=reason.split("\nUser stack trace")[0].strip(),
            error=(getattr(entry, "fail_reason", None) or "").strip().split("\n")[0],
            seconds=getattr(entry, "entire_frame_compile_time_s", None) or 0.0,
        )


def breaks() -> Iterator[Break]:
    """Those in frames of the program: PyTorch's own frames, such as DDP's around the model, break by design."""
    for entry in getattr(dynamo, "graph_break_reasons", ()):
        if entry.user_stack and _is_pytorchs(entry.user_stack[0].filename):
            continue
        frame = entry.user_stack[-1] if entry.user_stack else None
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}" if frame is not None else ""
        explanation = entry.reason.partition("Explanation: ")[2] or entry.reason
        if "data-dependent" in entry.reason:
            explanation = "the program branches on a value that only the running program knows"
        yield Break(where, explanation.strip().split("\n")[0])


def _is_pytorchs(file: str) -> bool:
    """Whether a file is PyTorch's, or Python's, whose `contextlib` is the frame around a decorated function."""
    return file.startswith(_TORCH) or (file.startswith(_PYTHON) and "site-packages" not in file)


def recompile_limit() -> int:
    """After how many graphs Dynamo runs a frame's further variants uncompiled."""
    return int(getattr(torch._dynamo.config, "recompile_limit", 8))
