"""What tracing has done that neither its graph nor its guards hold, for what takes the place of a trace to have none.

Private names, checked on torch 2.11, 2.13 and 2.15: of `OutputGraph`, `random_calls`, `side_effects.tensor_hooks` and
`save_for_backward`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace


def noted_beside_graph(trace: Trace, output: Any) -> Any:
    """To be compared with what it was before: it only grows."""
    effects = output.side_effects
    found: list[Any] = [trace.definitions, trace.crowded, trace.warnings, trace.companions, trace.left, trace.loops]
    found += [trace.unrolled, trace.one_by_one, trace.carried, trace.called, trace.sizes_of_parts, trace.suspects]
    found += [output.random_calls, effects.tensor_hooks, effects.save_for_backward]
    return [*map(len, found), trace.has_communicated]
