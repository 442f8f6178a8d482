"""Replaces attributes of other modules for a while, also if several threads do so at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fxpasses.base.containment import contained


class Patch:
    """Replaces attributes of an object from when the first thread enters until the last one leaves.

    what: the piece of the package that needs this, for the warning if an attribute is not there; then the object stays
    as it is. owner: returns the object, which need not be imported before. replacements: for each attribute, what makes
    the new value from the original one. (`unittest.mock.patch` restores what it found, which may be another thread's.)
    """

    def __init__(self, what: str, owner: Callable[[], Any], **replacements: Callable[[Any], Any]) -> None:
        self._what, self._owner, self._replacements = what, owner, replacements
        self._originals: dict[str, Any] = {}
        self._inside = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                with contained(self._what, "Graphs are compiled without it."):
                    found = {name: getattr(self._owner(), name) for name in self._replacements}
                    made = {name: make(found[name]) for name, make in self._replacements.items()}
                    self._originals = found
                    self._set(made)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._set(self._originals)
                    self._originals = {}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._owner(), name, value)
