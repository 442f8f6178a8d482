"""Functions on whose branches no more is speculated, because no pass could prove them.

A loop that is not proved breaks the graph, in its own frame and in all that call it: Dynamo then traces the model's
`forward`, the layer's, the mixture's, each from its start. If each speculated anew, each would be traced twice, passes
included, with the same end. So a function's branches are given up after two frames; two, because an inner frame may be
proved where an outer one is not: less is written there.

This is known of a compiled program, that is of what `torch.compile` made of a backend and its options. Another program
may run the same function on other experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import CodeType
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

_MOST = 2

Function = tuple[str, int]  # file and first line; Dynamo's continuations of a function have the same


def function_of(code: CodeType) -> Function:
    return code.co_filename, code.co_firstlineno


class Unproved:
    """By compiled program: how many frames could not prove a function's branches."""

    def __init__(self) -> None:
        self._counts: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def note(self, program: Any, functions: Iterable[Function]) -> None:
        self._counts.setdefault(program, Counter()).update(set(functions))

    def given_up(self, program: Any) -> frozenset[Function]:
        counts = self._counts.get(program, {})
        return frozenset(function for function, frames in counts.items() if frames >= _MOST)
