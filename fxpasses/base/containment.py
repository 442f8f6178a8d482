"""Containment of pieces that a step can do without: an error in one gives one warning, and never reaches the program.

Code that right results depend on is not such a piece: an error there falls back by one level (docs/containment.md).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from fxpasses.base.once import is_new, warn_once

log = logging.getLogger(__name__)


@contextmanager
def contained(piece: str, instead: str = "Training goes on without it.", strict: bool = False) -> Iterator[None]:
    """Run a piece of the package; an error ends the block, with one warning for the piece. strict: raise the error."""
    try:
        yield
    except Exception as error:
        if strict:
            raise
        say(piece, error, instead)


def say(piece: str, error: BaseException, instead: str) -> None:
    """Warn once that a piece of the package failed. instead: what happens now, as a sentence."""
    log.debug("%s failed", piece, exc_info=error)
    if not is_unsaid(error):
        return
    text = f"{piece} failed ({error_text(error)}). {instead} Please report this, with the error that"
    warn_once(("contained", piece), f'{text} options={{"fastpack.strict": True}} raises.', stacklevel=4)


def is_unsaid(error: BaseException, function: Hashable = None) -> bool:
    """Whether an error, of a function if one is given, was not reported yet by any piece; from now on it counts so."""
    return is_new(("error", type(error), str(error), function))


def error_text(error: BaseException) -> str:
    """`KeyError: 'a'`, in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
