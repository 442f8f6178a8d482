"""What Dynamo's guards call: a check whose own failure neither stops the program nor has it traced again and again.

Dynamo takes an error in a guard for False and traces the frame once more, with the same guard. It also evaluates a new
guard once, on the batch that was traced, and raises if that one does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from fxpasses.base.containment import say
from fxpasses.dynamo.failures import FailedFeatures
from fxpasses.dynamo.features import Feature

_MOST_ERRORS = 1


class Check:
    """Calls `holds`. If that fails, nothing is known of the batch, except in the first call, on the traced batch.

    feature: without which the frame is traced again once `holds` has failed twice, since the check then holds for no
    batch; None if the graph is right for any batch, and the check holds where it fails: `what` says what it is of, in a
    warning. code: of the frame.
    """

    def __init__(
        self, holds: Callable[..., bool], feature: Feature | None, code: CodeType | None, what: str = ""
    ) -> None:
        self.holds, self.feature, self._code = holds, feature, code
        self._what = what if feature is None else feature.title
        self._is_first = True
        self._errors = 0

    def __call__(self, *values: Any) -> bool:
        if self._errors > _MOST_ERRORS:
            return self.feature is None
        is_first, self._is_first = self._is_first, False
        try:
            return self.holds(*values)
        except Exception as error:
            self._errors += 1
            say(f"a guard of {self._what}", error, _INSTEAD[self.feature is None])
            if self.feature is not None and self._code is not None and self._errors > _MOST_ERRORS:
                _failed.note(self._code, self.feature)
            return is_first or self.feature is None


def failed_in(code: CodeType) -> frozenset[Feature]:
    """The features whose checks fail for a frame."""
    return _failed.of(code)


_INSTEAD = {True: "Batches are not checked.", False: "The program is traced again without the feature."}
_failed = FailedFeatures()
