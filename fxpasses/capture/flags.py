"""The two flags of Dynamo that put `.item()` and `nonzero` into the graph, and who holds them on for how long.

Where `torch._dynamo.config` keeps its values differs: torch 2.11 has one value per process; 2.13 and 2.15 have one per
context (`contextvars`), so a new thread starts with the defaults. `THREAD_LOCAL` says which it is, found out by trying.
With one value per process, activations are counted under a lock: a thread that leaves does not switch the flags off
for another that is still tracing. With one per context, each thread restores what it found.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch._dynamo.config as config

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
        _write(ON)
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

    Costs 2 µs with one value per context, 3 µs with one per process (see `tests/capture/test_flags.py`).
    """
    return _Local(ON) if THREAD_LOCAL else _shared.scope()


def held_at(values: Values) -> AbstractContextManager[None]:
    """The flags at `values` inside, whoever has switched them on; for one trace, under Dynamo's compile lock."""
    return _Local(values) if THREAD_LOCAL else _shared.hold(values)


def _read() -> Values:
    return Values(config.capture_scalar_outputs, config.capture_dynamic_output_shape_ops)


def _write(values: Values) -> None:
    # Only what differs: writing costs several times what reading does, and makes Dynamo hash its configuration again.
    if config.capture_scalar_outputs is not values.scalar_outputs:
        config.capture_scalar_outputs = values.scalar_outputs
    if config.capture_dynamic_output_shape_ops is not values.dynamic_output_shapes:
        config.capture_dynamic_output_shape_ops = values.dynamic_output_shapes


def _config_is_thread_local() -> bool:
    probe = not config.verbose  # only says how much is logged
    contextvars.copy_context().run(setattr, config, "verbose", probe)
    if config.verbose != probe:
        return True
    config.verbose = not probe
    return False


class _Local:
    """One activation where each context has its own values."""

    __slots__ = ("prior", "values")

    def __init__(self, values: Values) -> None:
        self.values = values

    def __enter__(self) -> None:
        self.prior = _read()
        if self.prior != self.values:
            _write(self.values)

    def __exit__(self, *exception: object) -> None:
        if self.prior != self.values:
            _write(self.prior)


class _Shared:
    """All activations where the process has one value: a held value goes before scopes, scopes before what was there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes = 0
        self._held: list[Values] = []
        self._found = Values(False, False)  # what was there before the first activation

    @contextmanager
    def scope(self) -> Iterator[None]:
        with self._changing():
            self._scopes += 1
        try:
            yield
        finally:
            with self._changing():
                self._scopes -= 1

    @contextmanager
    def hold(self, values: Values) -> Iterator[None]:
        with self._changing():
            self._held.append(values)
        try:
            yield
        finally:
            with self._changing():
                self._held.pop()  # holds nest: all are under Dynamo's compile lock

    def switch_on(self) -> None:
        with self._changing():
            self._found = ON

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            if not self._scopes and not self._held:
                self._found = _read()
            yield
            _write(self._held[-1] if self._held else ON if self._scopes else self._found)


class _Process:
    """Module state, because a flag for the process is just that."""

    enabled = False


THREAD_LOCAL = _config_is_thread_local()
_process = _Process()
_shared = _Shared()
_switched_here: contextvars.ContextVar[bool] = contextvars.ContextVar("fxpasses_flags_switched_here", default=False)
