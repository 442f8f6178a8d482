"""Warnings that a process gives once: a training step must not repeat them."""

from __future__ import annotations

import warnings
from collections.abc import Hashable

_given: set[Hashable] = set()


def warn_once(key: Hashable, text: str, stacklevel: int = 2) -> None:
    """Warn, unless `key` was used before. stacklevel: as in `warnings.warn`, counted from the caller."""
    if key not in _given:
        _given.add(key)
        warnings.warn(f"fxpasses: {text}", stacklevel=stacklevel + 1)


def is_new(key: Hashable) -> bool:
    """Whether `key` was never used before; from now on it counts as used."""
    seen = key in _given
    _given.add(key)
    return not seen


def forget(key: Hashable) -> None:
    """Allow one more warning for `key`."""
    _given.discard(key)
