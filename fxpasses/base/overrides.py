"""Limits on passes from the environment, to find the pass that breaks a program without changing the program.

FXPASSES_PASSES=a,b: run only these of the program's passes; none if it is empty.
FXPASSES_GRAPHS=n: run passes on the first n graphs that the process compiles, and leave the others as captured.
FXPASSES_CHANGES=pass:n: let a pass make only the first n of its changes in the process.
`fxpasses bisect` sets them.
"""

from __future__ import annotations

import os

PASSES = "FXPASSES_PASSES"
GRAPHS = "FXPASSES_GRAPHS"
CHANGES = "FXPASSES_CHANGES"

_compiled = 0  # graphs so far: Dynamo calls the backend once for each, and offers no other count
_changes: dict[str, int] = {}  # by pass: the number of changes that it has requested so far


def passes(requested: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """The passes for the next graph; raises `ValueError` for an unknown name or a wrong number in the environment."""
    global _compiled
    _compiled += 1
    chosen = requested
    given = os.environ.get(PASSES)
    if given is not None:
        names = [name.strip() for name in given.split(",") if name.strip()]
        for name in names:
            if name not in known:
                raise ValueError(f"{PASSES} holds {name!r}; choices: {', '.join(known)}")
        chosen = tuple(name for name in chosen if name in names)
    limit = os.environ.get(GRAPHS)
    if limit is not None:
        if not limit.isdecimal():
            raise ValueError(f"{GRAPHS} is {limit!r}; it takes a whole number")
        if _compiled > int(limit):
            return ()
    return chosen


def allows_change(name: str) -> bool:
    """Count a change that the pass `name` is about to make, and say whether it may; `ValueError` as in `passes`."""
    _changes[name] = _changes.get(name, 0) + 1
    given = os.environ.get(CHANGES)
    if given is None:
        return True
    limited, _, limit = given.rpartition(":")
    if not limited or not limit.isdecimal():
        raise ValueError(f"{CHANGES} is {given!r}; it takes a pass and a whole number, as in hoist_metadata:3")
    return name != limited or _changes[name] <= int(limit)


def count_anew() -> None:
    """Count graphs and changes from 0 again, as a new process does."""
    global _compiled
    _compiled = 0
    _changes.clear()
