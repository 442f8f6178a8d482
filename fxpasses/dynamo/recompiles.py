"""Warn the user if a model is recompiled repeatedly because batches differ in their number of sequences.

Private name, checked on torch 2.11, 2.13 and 2.15: `torch._guards.CompileContext`, whose id identifies the frame that
Dynamo compiles. Without it there is no warning.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.fx import GraphModule

from fxpasses.base.once import forget, warn_once
from fxpasses.graph.provenance import source
from fxpasses.graph.symbols import constant

_MOST = 3
# By frame and input, the sizes compiled so far: Dynamo keeps no such history.
_sizes: defaultdict[tuple[int, str], set[int]] = defaultdict(set)


def note_sizes(gm: GraphModule) -> None:
    """Warn once for an input vector of integers of fixed size that was compiled for more than 3 sizes."""
    compilation = current_compilation()
    if compilation is None:
        return
    for node in gm.graph.find_nodes(op="placeholder"):
        size = _fixed_size(node.meta.get("example_value"))
        if size is None or not source(node):
            continue
        key = (compilation.frame_id, source(node))
        if compilation.frame_compile_id == 0:  # the first time for this frame; `torch._dynamo.reset` restarts the count
            _sizes[key].clear()
            forget(key)
        _sizes[key].add(size)
        if len(_sizes[key]) > _MOST:
            warn_once(
                key,
                f"a model is compiled for the {len(_sizes[key])}th size of {source(node)} "
                f"({', '.join(map(str, sorted(_sizes[key])))}): `.tolist()` is unrolled, so each number of sequences "
                "is a graph of its own, and Dynamo stops at its limit. Pad the lengths with "
                "fxpasses.data.bucket_lengths.",
            )


def current_compilation() -> Any | None:
    """The identity of the current compilation, with `frame_id` and `frame_compile_id`; None if it is not known."""
    context: Any = getattr(torch._guards, "CompileContext", None)
    compilation = context.current_compile_id() if context is not None else None
    return None if compilation is None or compilation.frame_id is None else compilation


def _fixed_size(example: Any) -> int | None:
    """The size of an integer vector, if Dynamo has specialised the graph for it."""
    if not isinstance(example, torch.Tensor) or example.ndim != 1:
        return None
    if example.dtype.is_floating_point or example.dtype.is_complex:
        return None
    size = constant(example.shape[0])
    return size if isinstance(size, int) else None
