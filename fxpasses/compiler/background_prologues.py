"""Compiles a prologue's device graph while batches run it operator by operator, and only if that pays.

    batches 1 to 3   operator by operator; how long it takes is measured
    batch 3          a fork of the process compiles it into PyTorch's caches, if a thousand batches gain more than that
                     takes
    batch n          the fork is done: this process loads the code, in a tenth of the time

So the first step does not wait for it. Where no fork should compile (`forked_compiler.refusal`), this process does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from fxpasses.base.containment import contained
from fxpasses.base.once import warn_once
from fxpasses.compiler.eager_start import is_repeated
from fxpasses.compiler.forked_compiler import Child, refusal
from fxpasses.compiler.lowering import Compiled

log = logging.getLogger(__name__)

_MEASURED = 3  # batches
_BATCHES = 1000  # of which compiling has to pay
_GAIN = 0.5  # the part of a batch's time that it saves: of masks of 2,048 and 4,096 tokens, half
_TAKES_S = 2.0  # CPU seconds to compile one


class CompiledInBackground:
    """The compiled device graph of a prologue, once it is there.

    compile: compiles it in this process. strict: raise its errors.
    """

    def __init__(self, compile: Callable[[], Compiled], strict: bool) -> None:
        self._compile, self._strict = compile, strict
        self._seconds: list[float] = []
        self._child: Child | None = None
        self._is_decided = False
        self._lock = threading.Lock()

    def took(self, seconds: float) -> None:
        """Note how long a batch has taken uncompiled."""
        if not self._is_decided:
            self._seconds.append(seconds)

    def found(self) -> Compiled | None:
        """The compiled graph, from some batch on. To be called before each."""
        if (self._is_decided and self._child is None) or len(self._seconds) < _MEASURED or is_repeated():
            return None
        if not self._lock.acquire(blocking=False):  # another thread is here
            return None
        try:
            with contained("compiling a prologue", _INSTEAD, self._strict):
                return self._step()
        finally:
            self._lock.release()
        return None

    def _step(self) -> Compiled | None:
        if not self._is_decided:
            self._is_decided = True
            gain = min(self._seconds) * _GAIN * _BATCHES
            log.info("compiling a prologue takes %.1f s and saves %.1f s in %d batches", _TAKES_S, gain, _BATCHES)
            if gain < _TAKES_S:
                return None
            if refusal(traces_backward=False):
                return self._compile()
            self._child = Child(self._compile)
        child = self._child
        if child is None or not child.is_over():
            return None
        self._child = None
        if child.succeeded:
            return self._compile()
        warn_once(
            ("prologue", "in the background"),
            f"compiling a prologue in another process failed ({child.error}). {_INSTEAD}",
        )
        return None


_INSTEAD = "It runs operator by operator."
