"""Whether a list of the batch's numbers has had another number of elements before, in the same function."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fxpasses.dynamo.attempt import Place
from fxpasses.dynamo.recompiles import current_compilation
from fxpasses.graph.symbols import hint_of

# By frame and place, the numbers of parts compiled so far, each with the compilation in which it was first seen.
_counts: defaultdict[tuple[int, Place], dict[int, int]] = defaultdict(dict)


def varies(place: Place, count: Any) -> bool:
    """Note that a list has `count` elements, and return whether it had another number in an earlier compilation."""
    compilation = current_compilation()
    if compilation is None:
        return False
    known, number = _counts[compilation.frame_id, place], compilation.frame_compile_id
    if number == 0 and any(known.values()):  # `torch._dynamo.reset` restarts the count
        known.clear()
    known.setdefault(hint_of(count), number)
    return any(seen < number and other != hint_of(count) for other, seen in known.items())
