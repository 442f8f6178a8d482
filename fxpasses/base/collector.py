"""Compiling beside Python's garbage collector.

A compiler makes hundreds of thousands of objects, so the collector runs, and each full collection visits everything
that the process has: the modules of PyTorch and transformers alone are 0.15 s each time, a third of a restart. While
a graph is compiled, what was there before is set apart (`gc.freeze`), and the collector visits what is new. A part of
compiling that begins with a large graph, or makes one larger, sets it apart as well.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_users = 0
_is_ours = False  # whether this module has frozen what is frozen
_is_left_alone = False  # whether the program has frozen objects: to ask again would count them


@contextlib.contextmanager
def visiting_what_is_new() -> Iterator[None]:
    """Inside, full collections leave out the objects that exist now; a program's own `gc.freeze` is left alone.

    Of uses inside each other, only the end of the outermost lets full collections visit everything again.
    """
    global _users, _is_ours, _is_left_alone
    with _lock:
        _users += 1
        if _users == 1 and gc.isenabled() and not _is_left_alone:
            _is_left_alone = gc.get_freeze_count() > 0
            _is_ours = not _is_left_alone
        if _is_ours:
            gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _is_ours:
                gc.unfreeze()
                _is_ours = False
