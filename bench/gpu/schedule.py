"""Pieces of work, the most valuable first, by a deadline.

600 s left, shares 6 2 2    the first piece has 360 s, and takes 100
500 s left, shares   2 2    the next has 250 s: what one does not need, the others share
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.worker import first_line

DONE, FAILED, NOT_RUN, INTERRUPTED = "done", "failed", "not run", "interrupted"


@dataclass(frozen=True)
class Piece:
    """name: of a case, or "tests". share: of the time that is left, beside the shares of the pieces after it.
    least_s: with less than this it does not start. enough_s: what it may take in any case."""

    name: str
    share: float
    least_s: float = 0.0
    enough_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a piece, and why."""

    outcome: str
    why: str = ""
    seconds: float = 0.0


def run_by(
    deadline: float,
    pieces: Sequence[Piece],
    work: Callable[[Piece, float], None],
    ended: Callable[[Piece, Outcome], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Call `work(piece, until)` for each piece that there is time for, and `ended` for each piece.

    deadline and until are times of `clock`; `work` keeps to `until` itself. One that raises does not stop the others.
    KeyboardInterrupt does, once every piece has its outcome, and is raised again.
    """
    for at, piece in enumerate(pieces):
        began = clock()
        left = deadline - began
        if left < piece.least_s:
            ended(piece, Outcome(NOT_RUN, "no time left"))
            continue
        share = left * piece.share / sum(each.share for each in pieces[at:])
        try:
            work(piece, began + min(left, max(share, piece.enough_s)))
        except KeyboardInterrupt:
            ended(piece, Outcome(INTERRUPTED, "", clock() - began))
            for rest in pieces[at + 1 :]:
                ended(rest, Outcome(NOT_RUN, "the run was interrupted"))
            raise
        except Exception as error:
            ended(piece, Outcome(FAILED, first_line(error), clock() - began))
        else:
            ended(piece, Outcome(DONE, "", clock() - began))
