"""Says on standard error that a graph is being compiled, where that takes long: silence looks like a hang.

    fxpasses: compiling Qwen3ForCausalLM.forward (7 s, 2 of 5 pieces)

A terminal shows the line until the graph is compiled, with the seconds; a log gets it once for each function. Of
several processes, the first speaks. `FXPASSES_QUIET=1` switches it off.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from types import CodeType

from fxpasses.base.once import is_new

VARIABLE = "FXPASSES_QUIET"
AFTER, EVERY = 5.0, 1.0  # seconds
_CLEAR = "\r\x1b[K"

_running: ContextVar[_Compilation | None] = ContextVar("fxpasses_compilation", default=None)


@contextlib.contextmanager
def compiling(code: CodeType | None) -> Iterator[None]:
    """While a frame's graph is compiled. code: the frame's."""
    if _running.get() is not None or _is_quiet():
        yield
        return
    compilation = _Compilation("a graph" if code is None else getattr(code, "co_qualname", code.co_name))
    token = _running.set(compilation)
    watcher = threading.Thread(target=compilation.watch, name="fxpasses-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        _running.reset(token)
        compilation.over.set()
        watcher.join()


def expect(pieces: int) -> None:
    """Called once it is known in how many pieces the graph is compiled."""
    compilation = _running.get()
    if compilation is not None:
        compilation.pieces, compilation.done = pieces, 0


def piece_is_done() -> None:
    compilation = _running.get()
    if compilation is not None:
        compilation.done += 1


def say(text: str) -> None:
    """A line about compiling, unless it is switched off."""
    if not _is_quiet():
        with contextlib.suppress(Exception):
            print(f"fxpasses: {text}", file=sys.stderr, flush=True)


def _is_quiet() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0") or os.environ.get("RANK", "0") != "0"


class _Compilation:
    def __init__(self, what: str) -> None:
        self.what, self.started = what, time.perf_counter()
        self.pieces = self.done = 0
        self.over = threading.Event()

    def __str__(self) -> str:
        pieces = f", {self.done} of {self.pieces} pieces" if self.pieces > 1 else ""
        return f"fxpasses: compiling {self.what} ({time.perf_counter() - self.started:.0f} s{pieces})"

    def watch(self) -> None:
        if self.over.wait(AFTER):
            return
        with contextlib.suppress(Exception):  # a program may have closed or replaced its standard error
            if not sys.stderr.isatty():
                if is_new((VARIABLE, self.what)):
                    print(f"{self} ... {VARIABLE}=1 hides this.", file=sys.stderr, flush=True)
                return
            while True:
                print(f"{_CLEAR}{self}", end="", file=sys.stderr, flush=True)
                if self.over.wait(EVERY):
                    break
            print(_CLEAR, end="", file=sys.stderr, flush=True)
