"""Questions about the numbers that a loop's body computes for a part, and for which there is no smallest and largest.

    if np.prod(image.shape) % (rows * columns) != 0:        # where a function has made rows and columns of each image

The parts of the batch at hand are asked one by one. If they answer alike, the program gets the answer, and that all
parts give it is guarded. If a function that the body calls has asked, the function is called from then on, and not
traced (`called.py`), as the next batch's parts may differ. Other questions have the loop unrolled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from fxpasses.graph.symbols import expression, hint_of
from fxpasses.sequences.batched import Unbatched
from fxpasses.sequences.capture import called
from fxpasses.sequences.capture.bodies import PartBody
from fxpasses.sequences.capture.carried import Carried
from fxpasses.sequences.capture.parts import OnePart
from fxpasses.sequences.capture.rehearsal import Rehearsal


class Questions:
    """Those of one loop (`OpenPart`). body_so_far: returns what has been traced of it.

    conditions: those that all parts answer alike, with the answer. asking: a function that has asked what the parts may
    answer differently.
    """

    def __init__(self, part: OnePart, carried: Carried, body_so_far: Callable[[], PartBody]) -> None:
        self.part, self.trace, self._carried, self._body = part, part.trace, carried, body_so_far
        self.conditions: dict[Any, Any] = {}
        self.asking: Any = None
        self._rehearsal = Rehearsal(part.trace, part.lengths.tensor.as_proxy().node)

    def number(self, symbol: Any) -> Any:
        values = self._of_parts(symbol) if self.part.is_one_by_one else None
        return values[0] if values else None

    def is_about(self, question: Any) -> bool:
        if not self.part.is_one_by_one:
            return False
        asked = question.free_symbols - self.trace.sizes_of_parts.keys()
        return not asked.isdisjoint(self._body().symbols)

    def note(self, question: Any, answer: Any) -> None:
        tx = self.part.tx
        self.asking = called.function_that_asks(tx.output.current_tx, tx, self.trace.attempt.called)
        if self.asking is not None:
            return  # PyTorch is in the middle of an operation, so the next step has the frame traced again
        symbols = [*question.free_symbols]
        values = [self._of_parts(symbol) or self._of_batch(symbol) for symbol in symbols]
        if self.part.is_one_by_one and None not in values:
            answers = [question.xreplace(dict(zip(symbols, each, strict=True))) for each in zip(*values, strict=True)]
            if all(each == answer for each in answers):
                self.conditions[question] = answer
                return
        self.trace.unrolled.update(dict.fromkeys(self.part.places, "its parts may answer a question differently"))

    def _of_parts(self, symbol: Any) -> list[Any] | None:
        """The values of a number that the body computes from the batch's numbers, for each part; None for others."""
        body, graph = self._body(), self.trace.graph
        for node in body.own:
            value = node.meta.get("example_value")
            if isinstance(value, torch.SymInt) and expression(value) == symbol and graph is not None:
                found = body.nodes_of(node, self.part.numbers, self._carried.nodes(), graph.is_metadata)
                try:
                    parts = self._rehearsal.values([node for node in body.own if node in found]) if found else []
                except Unbatched:
                    return None
                return [sympy.Integer(part[node]) for part in parts] or None
        return None

    def _of_batch(self, symbol: Any) -> list[Any] | None:
        value = self.trace.number(symbol) if symbol not in self._body().symbols else None
        count = hint_of(self.part.lengths.tensor.as_proxy().node.meta["example_value"].shape[0])
        return None if value is None else [value] * count
