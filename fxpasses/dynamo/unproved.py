"""Functions whose branches are no longer speculated on, because no pass could prove them.

An unproved loop breaks the graph, in its own frame and in all frames that call it: Dynamo then traces the model's
`forward`, the layer's, the mixture's, each from its start. If each speculated anew, each would be traced twice, passes
included, with the same end. So a function's branches are given up after two frames; two, because an inner frame, which
writes less, may be proved where an outer one is not.

The counts are kept for each compiled program, that is, for what `torch.compile` made of a backend and its options.
Another program may run the same function on other experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import CodeType
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

_MOST = 2

Function = tuple[str, int]  # file and first line, which Dynamo's continuations of the function share


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
