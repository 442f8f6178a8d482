"""What one attempt at tracing a frame may do: a value. The next attempt, if one is needed, does less.

Dynamo traces a frame again when an attempt ends in `RestartAnalysis`; `capture/retracing.py` says after which attempt
comes which.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from fxpasses.capture.flags import Values


class Feature(enum.Enum):
    """A part of the capture that works by handlers in Dynamo (`capture/interceptions.py`). The value names it."""

    HINTS = "value hints"
    SLICES = "sizes of slices"
    OUTPUTS = "recorded outputs"
    STORES = "stored numbers"
    SPECULATION = "speculation"
    NUMPY = "NumPy's numbers"
    LISTS = "grown lists"

    def needs(self, other: Feature) -> bool:
        """Whether this one is off where `other` is."""
        return other in (self, Feature.HINTS) or (other is Feature.SPECULATION and self in _SPECULATIVE)


_SPECULATIVE = (Feature.NUMPY, Feature.LISTS)
_OFF = Values(False, False)


@dataclass(frozen=True)
class Attempt:
    """flags: Dynamo's capture flags; None where they stay as they are, under `fullgraph=True`, which captures both.

    variant: how many graphs of the frame there are that assume something else of their batch.
    """

    flags: Values | None = None
    features: frozenset[Feature] = frozenset()
    variant: int = 0

    def without(self, *features: Feature) -> Attempt:
        """The same without some features, and without those that need them."""
        kept = frozenset(own for own in self.features if not any(own.needs(other) for other in features))
        return replace(self, features=kept)

    def with_fewer_flags(self) -> Attempt | None:
        """Of the two flags the second goes first, and then both; None where there is no flag left."""
        if self.flags in (None, _OFF):
            return None
        if self.flags == Values(True, True):
            return replace(self, flags=Values(True, False))
        return Attempt(_OFF)
