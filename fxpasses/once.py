"""Warnings that are given once per process: a training step must not repeat them."""

from __future__ import annotations

import warnings
from collections.abc import Hashable

_given: set[Hashable] = set()


def warn_once(key: Hashable, text: str, stacklevel: int = 2) -> None:
    """Warn, unless it was warned of `key` before. stacklevel: as `warnings.warn` takes it, of the caller."""
    if key not in _given:
        _given.add(key)
        warnings.warn(f"fxpasses: {text}", stacklevel=stacklevel + 1)


def forget(key: Hashable) -> None:
    """Warn of `key` again."""
    _given.discard(key)
