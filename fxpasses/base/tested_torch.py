"""Which versions of torch the tests run on, and one warning on any other."""

from __future__ import annotations

import torch

from fxpasses.base.once import warn_once

OLDEST, NEWEST = (2, 11), (2, 15)  # as CHANGELOG.md says


def warn_if_untested(version: str | None = None) -> None:
    """Warn once in a process whose torch is older or newer than those that are tested."""
    text = version or torch.__version__
    here = release(text)
    if here is not None and not OLDEST <= here <= NEWEST:
        tested = " to ".join(".".join(map(str, each)) for each in (OLDEST, NEWEST))
        age = "older" if here < OLDEST else "newer"
        warn_once(
            "untested torch",
            f"torch {text} is {age} than those that this version was tested with ({tested}): parts that do not fit it "
            "are left out. `fxpasses doctor` lists what works.",
            stacklevel=3,
        )


def release(version: str) -> tuple[int, int] | None:
    """(2, 13) for "2.13.0a0+git1234"; None for what does not begin with two numbers."""
    parts = version.split(".")[:2]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(str.isdecimal, parts)) else None
