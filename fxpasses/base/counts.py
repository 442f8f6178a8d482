"""Counts of a process, which a user reads and restarts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

Counts = TypeVar("Counts")


def taken(now: Counts, reset: bool) -> Counts:
    """A copy of a dataclass of numbers; with `reset` they restart from 0."""
    counts: Any = now
    copy: Counts = replace(counts)
    for field in fields(counts) if reset else ():
        setattr(now, field.name, 0)
    return copy
