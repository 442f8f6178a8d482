"""Whether a list of the batch's numbers has had another number of elements before, in the same function.

Private name, checked on torch 2.11, 2.13 and 2.15: `torch._guards.CompileContext`, whose id identifies the frame that
Dynamo compiles. Without it, no number varies.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from fxpasses.dynamo.attempt import Place
from fxpasses.graph.symbols import hint_of

# By frame and place, the numbers of parts compiled so far, each with the compilation in which it was first seen.
_counts: defaultdict[tuple[int, Place], dict[int, int]] = defaultdict(dict)


def varies(place: Place, count: Any) -> bool:
    """Note that a list has `count` elements, and return whether it had another number in an earlier compilation."""
    context: Any = getattr(torch._guards, "CompileContext", None)
    compilation = context.current_compile_id() if context is not None else None
    if compilation is None or compilation.frame_id is None:
        return False
    known, number = _counts[compilation.frame_id, place], compilation.frame_compile_id
    if number == 0 and any(known.values()):  # `torch._dynamo.reset` restarts the count
        known.clear()
    known.setdefault(hint_of(count), number)
    return any(seen < number and other != hint_of(count) for other, seen in known.items())
