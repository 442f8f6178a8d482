"""The checks that Dynamo's guards call: if a check itself fails, the program neither stops nor is retraced forever.

Dynamo treats an error in a guard as False and traces the frame once more, with the same guard. It also evaluates a new
guard once, on the batch that was traced, and raises if the guard does not hold.
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
    """Calls `holds`. If that raises, the check is False, except in the first call, which is for the traced batch.

    feature: once `holds` has raised twice, the check is False for every batch, and the frame is traced again without
    this feature. None if the graph is right for any batch: then the check is True where `holds` raises, and `what`
    names the guard in the warning. code: the frame's. restart: what becomes of the check where the trace is
    taken from a file (`fxpasses/restart`): "again", the backend adds it again; "kept", the file has `holds`; or "lost",
    then the trace is not saved.
    """

    def __init__(
        self,
        holds: Callable[..., bool],
        feature: Feature | None,
        code: CodeType | None,
        what: str = "",
        restart: str = "again",
    ) -> None:
        self.holds, self.feature, self._code = holds, feature, code
        self.restart = restart
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
