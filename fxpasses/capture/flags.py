"""The two flags of Dynamo that put `.item()` and `nonzero` into the graph, and who holds them on for how long.

Where `torch._dynamo.config` keeps its values differs: torch 2.11 has one value per process; 2.13 and 2.15 have one per
context (`contextvars`), so a new thread starts with the defaults. `THREAD_LOCAL` says which it is, found out by trying.
With one value per process, activations are counted under a lock: a thread that leaves does not switch the flags off
for another that is still tracing. With one per context, each thread restores what it found.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch._dynamo.config as config

from fxpasses.capture.dynamo_names import config_switch

log = logging.getLogger(__name__)

FLAGS = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
KEEP_CONFIG = "FXPASSES_KEEP_DYNAMO_CONFIG"


class Values(NamedTuple):
    """`.item()` is captured, and operators whose output shape depends on data are (`nonzero`, `unique`, `x[mask]`)."""

    scalar_outputs: bool
    dynamic_output_shapes: bool


ON = Values(True, True)


def enable_for_process() -> None:
    """Switch both flags on until the process ends, unless `FXPASSES_KEEP_DYNAMO_CONFIG=1` is in the environment.

    Where the configuration is per context, this sets the caller's, and `wanted` tells the other threads.
    """
    if os.environ.get(KEEP_CONFIG) == "1":
        log.debug("%s=1: the capture flags of Dynamo stay %s", KEEP_CONFIG, _read())
        return
    _process.enabled = True
    _switched_here.set(True)
    if THREAD_LOCAL:
        _switch_to[ON]()
    else:
        _shared.switch_on()
    log.debug("switched on in torch._dynamo.config: %s", ", ".join(FLAGS))


def wanted() -> Values:
    """The values that a trace for this package's backend starts with: those set in this context, or for the process.

    What the user sets in the context that `enable_for_process` ran in wins, and stays.
    """
    if THREAD_LOCAL and _process.enabled and not _switched_here.get():
        return ON
    return _read()


def scoped() -> AbstractContextManager[None]:
    """Both flags on inside, restored after. Nests, and several threads may be inside at once.

    Entered on every call of a compiled model: costs 3 to 4 µs in all, measured with torch 2.11, 2.13 and 2.15.
    """
    return _Local(ON) if THREAD_LOCAL else _SharedActivation(None)


def held_at(values: Values) -> AbstractContextManager[None]:
    """The flags at `values` inside, whoever has switched them on; for one trace, under Dynamo's compile lock."""
    return _Local(values) if THREAD_LOCAL else _SharedActivation(values)


def _read() -> Values:
    return Values(config.capture_scalar_outputs, config.capture_dynamic_output_shape_ops)


def _config_is_thread_local() -> bool:
    probe = not config.verbose  # only says how much is logged
    contextvars.copy_context().run(setattr, config, "verbose", probe)
    if config.verbose != probe:
        return True
    config.verbose = not probe
    return False


class _Local:
    """One activation where each context has its own values."""

    __slots__ = ("_restore", "_switch")

    def __init__(self, values: Values) -> None:
        self._switch = _switch_to[values]

    def __enter__(self) -> None:
        self._restore = self._switch()

    def __exit__(self, *exception: object) -> None:
        self._restore()


class _Shared:
    """All activations where the process has one value: the last held value counts, else scopes, else what was there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes = 0
        self._held: list[Values] = []  # they nest: each is held under Dynamo's compile lock
        self._restore: Callable[[], None] | None = None

    def enter(self, held: Values | None) -> None:
        """One more scope, or hold."""
        with self._lock:
            before = self._in_force()
            if held is None:
                self._scopes += 1
            else:
                self._held.append(held)
            self._apply(before)

    def leave(self, held: Values | None) -> None:
        with self._lock:
            before = self._in_force()
            if held is None:
                self._scopes -= 1
            else:
                self._held.pop()
            self._apply(before)

    def switch_on(self) -> None:
        """What was there is on from now."""
        with self._lock:
            if self._restore is not None:
                self._restore()
            _switch_to[ON]()
            in_force = self._in_force()
            self._restore = _switch_to[in_force]() if in_force else None

    def _in_force(self) -> Values | None:
        return self._held[-1] if self._held else ON if self._scopes else None

    def _apply(self, before: Values | None) -> None:
        now = self._in_force()
        if now == before:
            return
        if self._restore is not None:
            self._restore()
        self._restore = _switch_to[now]() if now is not None else None


class _SharedActivation:
    __slots__ = ("_held",)

    def __init__(self, held: Values | None) -> None:
        self._held = held

    def __enter__(self) -> None:
        _shared.enter(self._held)

    def __exit__(self, *exception: object) -> None:
        _shared.leave(self._held)


class _Process:
    """Module state, because a flag for the process is just that."""

    enabled = False


_switch_to = {
    values: config_switch(dict(zip(FLAGS, values, strict=True)))
    for values in (Values(*pair) for pair in itertools.product((False, True), repeat=2))
}
THREAD_LOCAL = _config_is_thread_local()
_process = _Process()
_shared = _Shared()
_switched_here: contextvars.ContextVar[bool] = contextvars.ContextVar("fxpasses_flags_switched_here", default=False)
