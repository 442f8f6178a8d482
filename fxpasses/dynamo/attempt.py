"""What one attempt at tracing a frame may do, as a value. A later attempt may do less.

Dynamo traces a frame again after an attempt ends in `RestartAnalysis`; `dynamo/retracing.py` determines the next
attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import CodeType

from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.flags import Values
from fxpasses.dynamo.unproved import Function

_OFF = Values(False, False)

Place = tuple[str, int, bool]  # where the program asks a question: file, line, and whether an operator asks it
Question = tuple[Place, str]  # a place, and what an operator asks there, as text: whether a size is 1


@dataclass(frozen=True)
class Left:
    """A checkpoint that is left to eager mode: the node that writes, the reason, and the checkpoint's `file.py:12`."""

    write: str
    text: str
    where: str


@dataclass(frozen=True)
class Attempt:
    """flags: Dynamo's capture flags; None to leave them unchanged, under `fullgraph=True`, which sets both.

    refused: the places whose questions about the batch get no answer (`dynamo/variants.py`). given_up: the functions
    whose branches are not speculated on (`dynamo/unproved.py`). left: the checkpoints at which an earlier attempt broke
    the graph. strict: errors of this package are raised. answered: the questions about sizes that the batch answers
    in place of PyTorch's defaults (`dynamo/size_defaults.py`). unrolled: the places of lists of the batch's numbers
    over whose parts no loop is traced once (`sequences/capture/loops.py`), each with the reason. one_by_one: of those
    over whose parts a loop is traced once, and runs part by part. carried: with those, the names of numbers to which
    each part adds. called: the code of functions that these loops call for each part, and that are not traced.
    """

    flags: Values | None = None
    features: frozenset[Feature] = frozenset()
    refused: frozenset[Place] = frozenset()
    given_up: frozenset[Function] = frozenset()
    left: frozenset[Left] = frozenset()
    strict: bool = False
    answered: frozenset[Question] = frozenset()
    unrolled: frozenset[tuple[Place, str]] = frozenset()
    one_by_one: frozenset[tuple[Place, str]] = frozenset()
    carried: frozenset[tuple[Place, str]] = frozenset()
    called: frozenset[CodeType] = frozenset()

    def without(self, *features: Feature) -> Attempt:
        """The same attempt without some features and the features that need them."""
        kept = frozenset(own for own in self.features if not any(own.needs(other) for other in features))
        return replace(self, features=kept)

    def after_failure(self, feature: Feature) -> Attempt | None:
        """The same attempt without a feature that failed, or without all if it lacks that one; None if it has none."""
        if feature is Feature.HINTS and (following := self.without_flags()) is not None:
            return following  # with only the flags on, Dynamo answers some questions wrongly: `4 in lengths.tolist()`
        if not self.features:
            return None
        following = self.without(feature)
        return following if following != self else replace(self, features=frozenset())

    def refusing(self, places: Iterable[Place]) -> Attempt:
        """The same attempt, refusing answers at more places; unchanged if it has no features."""
        return replace(self, refused=self.refused.union(places)) if self.features else self

    def leaving(self, left: Iterable[Left]) -> Attempt:
        return replace(self, left=self.left.union(left))

    def unrolling(self, places: Mapping[Place, str]) -> Attempt:
        """The same attempt, in which the loops over more lists are unrolled."""
        return replace(self, unrolled=self.unrolled.union(places.items()))

    def running_one_by_one(
        self, places: Mapping[Place, str], carried: Iterable[tuple[Place, str]], called: Iterable[CodeType]
    ) -> Attempt:
        """The same attempt, in which the loops over more lists run part by part, carry more numbers, and call more
        functions."""
        return replace(
            self,
            one_by_one=self.one_by_one.union(places.items()),
            carried=self.carried.union(carried),
            called=self.called.union(called),
        )

    def answering(self, questions: Iterable[Question]) -> Attempt:
        """The same attempt, in which the batch answers more questions about sizes."""
        return replace(self, answered=self.answered.union(questions))

    def with_fewer_flags(self) -> Attempt | None:
        """The same attempt without the second flag, or else without both; None if both are off.

        After speculation was taken back, both go at once: the loop over experts broke the graph, and would break it
        without the second flag as well, only later.
        """
        if self.flags in (None, _OFF):
            return None
        taken_back = Feature.HINTS in self.features and Feature.SPECULATION not in self.features
        if self.flags == Values(True, True) and not taken_back:
            return replace(self, flags=Values(True, False))
        return self.without_flags()

    def without_flags(self) -> Attempt | None:
        """An attempt with stock PyTorch's flags; None if this is one, or under `fullgraph=True`."""
        if self.flags in (None, _OFF):
            return None
        return Attempt(_OFF, self.without(Feature.HINTS).features, strict=self.strict)
