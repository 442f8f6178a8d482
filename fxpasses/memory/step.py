"""The memory of a training step whose graph is compiled in pieces, some of which run several times.

    forward    rest_0   layer_0  layer_0  layer_0   rest_1
    backward   rest_0   layer_0  layer_0  layer_0   rest_1      (from right to left)

What a call of forward saves lives until its backward, and the gradients of its parameters from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fxpasses.base.units import size
from fxpasses.memory.footprint import Footprint


@dataclass
class Step:
    """A step and what is known of its pieces.

    budget: the bytes that the process may use on the device. before: those that it uses before the step.
    has_gradients: whether gradients are among these, and backward adds to them. headroom: how many times larger the
    batch may become for which the step is planned. pieces: the names of the pieces in forward's order, each with the
    number of its calls. footprints: of the pieces that are partitioned. may_shrink: whether a piece could save less.
    """

    budget: int
    before: int
    has_gradients: bool = False
    headroom: float = 1.0
    pieces: Sequence[tuple[str, int]] = (("", 1),)
    footprints: dict[str, Footprint] = field(default_factory=dict)
    may_shrink: bool = False

    def peak(self, **also: Footprint) -> int:
        """The process's predicted peak. also: footprints of pieces that are not noted.

        Other layers without a footprint are taken to be like the largest that has one; other pieces need nothing.
        """
        return self.before + peak(self._calls({**self.footprints, **also}), self.has_gradients)

    def peak_for(self, larger: float, **also: Footprint) -> int:
        """`peak` for a batch that is so many times as large."""
        gradients = sum(call.gradients for call in self._calls({**self.footprints, **also}))
        fixed = self.before + (0 if self.has_gradients else gradients)
        return round(fixed + larger * max(0, self.peak(**also) - fixed))

    def _calls(self, known: dict[str, Footprint]) -> list[Footprint]:
        layers = [known[name] for name, count in self.pieces if count > 1 and name in known]
        like = max(layers, key=lambda found: found.saved, default=Footprint())
        return [
            known.get(name, like if count > 1 else Footprint()) for name, count in self.pieces for _ in range(count)
        ]

    def needs(self) -> str:
        """What the peak is made of, in words."""
        calls = self._calls(self.footprints)
        saved, gradients = sum(call.saved for call in calls), sum(call.gradients for call in calls)
        return f"{size(saved)} are saved for backward, {size(gradients)} are gradients"


def peak(calls: Sequence[Footprint], has_gradients: bool = False) -> int:
    """The most bytes that a step adds, whose forward makes these calls, and whose backward makes them in reverse.

    has_gradients: whether gradients are added to ones that are there already.
    """
    live = most = 0
    for call in calls:
        most = max(most, live + call.forward)
        live += call.saved
    for call in reversed(calls):
        live -= call.saved
        most = max(most, live + call.backward)
        live += 0 if has_gradients else call.gradients
    return most
