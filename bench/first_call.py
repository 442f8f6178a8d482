"""What a first call costs: CPU seconds by phase, elapsed seconds, and memory.

    cost = first_call(lambda: compiled(**batch).loss.backward())
    cost["cpu_s"], cost["Inductor_s"], ...

CPU seconds count, and not elapsed ones: other work on the machine makes a compilation wait, and the C++ compiler runs
beside Inductor. A phase has the CPU seconds of this process in which it is the innermost one, so phases add up.

Private names, checked on torch 2.13: the logger of `torch._dynamo.utils.dynamo_timed`, which is told when each event
begins and ends, and the names of these events.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

DYNAMO, PASSES, AOT, INDUCTOR, CXX, STEP = "Dynamo", "passes", "AOTAutograd", "Inductor", "C++ compiler", "first step"
PHASES = (DYNAMO, PASSES, AOT, INDUCTOR, CXX, STEP)
# By the events of Dynamo; one that is not listed belongs to the phase around it.
EVENTS = {
    "entire_frame_compile": DYNAMO,
    "backend_compile": AOT,
    "create_aot_dispatcher_function": AOT,
    "entire_backward_compile": AOT,
    "_recursive_pre_grad_passes": INDUCTOR,
    "_recursive_joint_graph_passes": INDUCTOR,
    "inductor_compile": INDUCTOR,
}


def first_call(call: Callable[[], Any]) -> dict[str, float]:
    """Keys: `cpu_s`, with all processes that it started; `PHASE_s` of each of PHASES; `wall_s`; `rest_bytes` and
    `peak_bytes`: the resident set of this process before the call, and the largest one until its end.
    """
    with _observed() as clock:
        before, started, rest = _cpu_seconds(), time.perf_counter(), _memory("VmRSS")
        call()
    own, others = (now - then for now, then in zip(_cpu_seconds(), before, strict=True))
    found = {"cpu_s": own + others, "wall_s": time.perf_counter() - started}
    found |= {"rest_bytes": rest, "peak_bytes": _memory("VmHWM")}
    return found | {f"{phase}_s": seconds for phase, seconds in (clock.seconds | {CXX: others}).items()}


class _Clock:
    """Charges this process's CPU time to the innermost phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.stack = [("", STEP)]
        self.last = time.process_time()

    def begin(self, event: str, phase: str | None = None) -> None:
        if threading.current_thread() is threading.main_thread():  # others wait for the C++ compiler
            self._charge()
            self.stack.append((event, phase or EVENTS.get(event, self.stack[-1][1])))

    def end(self, event: str) -> None:
        if threading.current_thread() is threading.main_thread() and event in (name for name, _ in self.stack):
            self._charge()
            while self.stack.pop()[0] != event:
                pass

    def _charge(self) -> None:
        now = time.process_time()
        self.seconds[self.stack[-1][1]] += now - self.last
        self.last = now


@contextlib.contextmanager
def _observed() -> Iterator[_Clock]:
    """A clock that follows the events of Dynamo, and our passes where they are in use."""
    from torch._dynamo.utils import get_chromium_event_logger

    clock, logger = _Clock(), get_chromium_event_logger()

    def beside(method: Callable[..., None], also: Callable[[str], None]) -> Callable[..., None]:
        def call(event_name: str, *args: Any, **kwargs: Any) -> None:
            also(event_name)
            method(event_name, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name, also in (("log_event_start", clock.begin), ("log_event_end", clock.end)):
            stack.enter_context(patch.object(logger, name, beside(getattr(logger, name), also)))
        if "fxpasses.compiler.backend" in sys.modules:
            backend = importlib.import_module("fxpasses.compiler.backend")
            for name, phase in (("run_further", PASSES), ("_recompiled", AOT)):
                stack.enter_context(patch.object(backend, name, _as_phase(clock, phase, getattr(backend, name))))
        clock.last = time.process_time()  # so far it was imports
        yield clock
        clock._charge()


def _as_phase(clock: _Clock, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        clock.begin(phase, phase)
        try:
            return function(*args, **kwargs)
        finally:
            clock.end(phase)

    return call


def _cpu_seconds() -> tuple[float, float]:
    """Of this process, and of all processes that it started, those that still run (on Linux) included."""
    used = os.times()
    others = used.children_user + used.children_system
    tick = os.sysconf("SC_CLK_TCK")
    for process in _descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            others += sum(map(int, fields[11:15])) / tick  # its own, and those of its children that ended
    return used.user + used.system, others


def _descendants(process: int) -> Iterator[int]:
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                yield child
                yield from _descendants(child)


def _memory(key: str) -> int:
    """Bytes: VmRSS, the resident set now, or VmHWM, the largest one so far; without /proc the largest for both."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
