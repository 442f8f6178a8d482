"""Numbers formatted for a person, and read from what a person writes."""

from __future__ import annotations

import re

_POWERS = ("", "K", "M", "G", "T")


def amount(number: float) -> str:
    """`1234`, `12.3 k`, `4.56 G`."""
    if number < 10_000:
        return str(number)
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number / 1e3:.3g} k"


def size(number: int) -> str:
    """Bytes, in powers of 1024."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 1 << power:
            return f"{number / (1 << power):.1f} {unit}"
    return f"{number} B"


def bytes_in(text: str) -> int | None:
    """Bytes from `"40GiB"`, powers of 1024, or `"1.5 GB"`, powers of 1000; None for another text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B", text)
    if found is None or (found[3] and not found[2]):
        return None
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS.index(found[2]))


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def many(count: int, what: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{count} {what}{'s' * (count != 1)}"
