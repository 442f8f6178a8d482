"""Numbers formatted for a person."""

from __future__ import annotations


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


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def many(count: int, what: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{count} {what}{'s' * (count != 1)}"
