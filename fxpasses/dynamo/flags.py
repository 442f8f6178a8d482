"""The two flags of Dynamo that capture `.item()` and `nonzero` in the graph, and the scopes in which they are on.

Without the flags, both break the graph before any backend sees it. The flags are on while a frame is traced for this
package's backend, and at no other time: another backend's frame, even inside one of ours, finds the process's values.

`torch._dynamo.config` has one value per process in torch 2.11, and one per context (`contextvars`) in 2.13 and 2.15, so
that a new thread starts with the defaults. `THREAD_LOCAL` says which, and is determined by a probe. With one value per
process, activations are counted under a lock: a thread that leaves its scope does not switch the flags off for another
thread that is still tracing. With one per context, each thread restores the previous values.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch._dynamo.config as config

from fxpasses.dynamo.dynamo_names import config_switch

log = logging.getLogger(__name__)

FLAGS = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
KEEP_CONFIG = "FXPASSES_KEEP_DYNAMO_CONFIG"


class Values(NamedTuple):
    """Whether Dynamo captures `.item()`, and operators with data-dependent output shapes: `nonzero`, `x[mask]`."""

    scalar_outputs: bool
    dynamic_output_shapes: bool


ON = Values(True, True)


def wanted() -> Values:
    """The values with which a trace for this package's backend starts: both on.

    With `FXPASSES_KEEP_DYNAMO_CONFIG=1` in the environment, the values that the process has set.
    """
    return _read() if keeps_config() else ON


def keeps_config() -> bool:
    return os.environ.get(KEEP_CONFIG) == "1"


def enable_for_process() -> None:
    """Switch both flags on until the process ends: for a torch in which no trace can be intercepted.

    With values per context, this sets those of the caller's context. `FXPASSES_KEEP_DYNAMO_CONFIG=1` prevents it.
    """
    if keeps_config():
        log.debug("%s=1: the capture flags of Dynamo stay %s", KEEP_CONFIG, _read())
        return
    if THREAD_LOCAL:
        _switch_to[ON]()
    else:
        _shared.switch_on()
    log.debug("switched on in torch._dynamo.config: %s", ", ".join(FLAGS))


def scoped() -> AbstractContextManager[None]:
    """Both flags are on inside, and restored after. Reentrant; several threads may be inside at once.

    Takes 3 to 4 µs in all, measured with torch 2.11, 2.13 and 2.15.
    """
    return _Activation(_switch_to[ON] if THREAD_LOCAL else _shared.enter)


@contextmanager
def held_at(values: Values) -> Iterator[None]:
    """The flags are `values` inside, whatever scopes are active; for one trace, under Dynamo's compile lock."""
    token = _outside.set(_outside.get() or _read())
    try:
        with _holding(values):
            yield
    finally:
        _outside.reset(token)


def as_outside() -> AbstractContextManager[None]:
    """The flags have their values from outside this package's traces: for another backend's trace inside one."""
    values = _outside.get()
    return nullcontext() if values is None else _holding(values)


def _holding(values: Values) -> AbstractContextManager[None]:
    return _Activation(_switch_to[values] if THREAD_LOCAL else functools.partial(_shared.enter, values))


def _read() -> Values:
    return Values(config.capture_scalar_outputs, config.capture_dynamic_output_shape_ops)


def _config_is_thread_local() -> bool:
    probe = not config.verbose  # affects only logging
    contextvars.copy_context().run(setattr, config, "verbose", probe)
    if config.verbose != probe:
        return True
    config.verbose = not probe
    return False


class _Activation:
    """activate: sets the flags, and returns the function that ends the activation."""

    __slots__ = ("_activate", "_restore")

    def __init__(self, activate: Callable[[], Callable[[], None]]) -> None:
        self._activate = activate

    def __enter__(self) -> None:
        self._restore = self._activate()

    def __exit__(self, *exception: object) -> None:
        self._restore()


def _nothing() -> None:
    pass


class _Shared:
    """All activations, with one value per process: a held value applies first (the last), then scopes, then the
    previous value."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes = 0
        self._held: list[Values] = []  # nested: each is held under Dynamo's compile lock
        self._applied: Values | None = None
        self._restore: Callable[[], None] = _nothing

    def enter(self, held: Values | None = None) -> Callable[[], None]:
        """Begin a scope, or hold values; returns the function that ends it."""
        with self._lock:
            if held is None:
                self._scopes += 1
            else:
                self._held.append(held)
            self._apply()
        return functools.partial(self._leave, held)

    def _leave(self, held: Values | None) -> None:
        with self._lock:
            if held is None:
                self._scopes -= 1
            else:
                self._held.pop()
            self._apply()

    def switch_on(self) -> None:
        """Set the previous value, which the end of all activations restores, to on."""
        with self._lock:
            self._restore()
            _switch_to[ON]()
            self._applied, self._restore = None, _nothing
            self._apply()

    def _apply(self) -> None:
        wanted = self._held[-1] if self._held else ON if self._scopes else None
        if wanted != self._applied:
            self._restore()
            self._applied, self._restore = wanted, _switch_to[wanted]() if wanted is not None else _nothing


_switch_to = {
    values: config_switch(dict(zip(FLAGS, values, strict=True)))
    for values in (Values(*pair) for pair in itertools.product((False, True), repeat=2))
}
THREAD_LOCAL = _config_is_thread_local()
_shared = _Shared()
# Inside `held_at`: the values that the process has set.
_outside: contextvars.ContextVar[Values | None] = contextvars.ContextVar("fxpasses_flags_outside", default=None)
