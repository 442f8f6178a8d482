"""A fork of this process that compiles a graph into PyTorch's caches, and ends.

A fork, because what is compiled (fake tensors, symbols, a trace that is under way) cannot be sent to another process.
It has none of its parent's threads, writes nothing to its parent's files, and does not outlive its parent.

Private names, checked on torch 2.11, 2.13 and 2.15: `AsyncCompile.pool`, Inductor's threads, and
`AOTConfig.force_non_lazy_backward_lowering`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fxpasses.base.containment import error_text

LIMIT_S = 1800.0  # a child that takes longer is ended: it hangs, or the machine is too busy for it
_NICENESS = 5  # steps go first
_LONGEST = 1000  # bytes of an error: a pipe takes as many at once
_DONE = b"\0"  # what a child says that has compiled its graph


def refusal(traces_backward: bool = True) -> str:
    """Why no fork of this process should compile, as words after "because"; "" if nothing speaks against it.

    traces_backward: whether it would trace what has gradients.
    """
    from torch._inductor import config

    if not hasattr(os, "fork") or sys.platform == "darwin":
        return "this system has no safe fork"
    if torch.accelerator.is_available() and getattr(torch.get_device_module(), "is_initialized", lambda: True)():
        return "a fork cannot use the accelerator"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "ranks would change to compiled code at different steps"
    if len(_running) >= max(1, os.cpu_count() or 1):
        return "as many processes compile already as there are cores"
    if traces_backward and _autograd_has_threads():
        return "autograd has started threads of its own, without which no fork can trace backward"
    if not config.fx_graph_cache or config.force_disable_caches:
        return "PyTorch's caches, from which the compiled code would come, are switched off"
    return ""


def _autograd_has_threads() -> bool:
    """Whether autograd has started a thread for each device: with accelerators, and on torch 2.15 in any case."""
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # a thread may end meanwhile
            if name.read_text().startswith("pt_autograd"):
                return True
    return False


class Child:
    """A fork of this process that calls `compile` and ends."""

    def __init__(self, compile: Callable[[], Any]) -> None:
        self.started = time.monotonic()
        self.error = ""  # what it has raised, if it has ended so
        self.succeeded = False
        self._is_over = False
        self._parent = os.getpid()
        self._lock = threading.Lock()
        threads = torch.get_num_threads()
        self._said, says = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of a fork of a process with threads
            try:
                self.pid = os.fork()
            except OSError:
                os.close(self._said)
                os.close(says)
                raise
        if self.pid == 0:
            _compile_and_exit(compile, threads, says, self._parent)
        os.close(says)
        os.set_blocking(self._said, False)  # a process that the child has started may keep the other end
        _running.add(self)

    def is_over(self) -> bool:
        """Whether the child has ended, by itself or because it took too long."""
        with self._lock:
            if not self._is_over and self._is_own():
                if time.monotonic() - self.started > LIMIT_S:
                    self._kill()
                self._wait(os.WNOHANG)
            return self._is_over

    def end(self) -> None:
        """Kill the child if it still runs, with the compilers that it started."""
        with self._lock:
            if not self._is_over and self._is_own():
                self._kill()
                self._wait(0)

    def _is_own(self) -> bool:
        """False in a fork of the process that has started the child."""
        return os.getpid() == self._parent

    def _wait(self, how: int) -> None:
        try:
            ended, _ = os.waitpid(self.pid, how)
        except ChildProcessError:  # somebody else waited for it
            ended = self.pid
        if not ended:
            return
        self._is_over = True
        _running.discard(self)
        try:
            said = os.read(self._said, 1 + _LONGEST)
        except BlockingIOError:
            said = b""
        finally:
            os.close(self._said)
        self.succeeded = said == _DONE
        self.error = "" if self.succeeded else said.decode(errors="replace")

    def _kill(self) -> None:
        for kill in (os.killpg, os.kill):  # it may have no group of its own yet
            with contextlib.suppress(OSError):
                kill(self.pid, signal.SIGKILL)


_running: set[Child] = set()


def wait(timeout_s: float = LIMIT_S) -> bool:
    """Wait until no graph is being compiled in a child; returns whether that is so after `timeout_s` seconds."""
    until = time.monotonic() + timeout_s
    while not all([child.is_over() for child in list(_running)]):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


@atexit.register
def _end_all() -> None:
    for child in list(_running):
        child.end()


if hasattr(os, "register_at_fork"):  # a fork, of a data loader for instance, has no part in its parent's children
    os.register_at_fork(after_in_child=_running.clear)


# In the child


def _compile_and_exit(compile: Callable[[], Any], threads: int, says: int, parent: int) -> None:
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.nice(_NICENESS)
        _let_go_of_files(says)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        _without_threads(threads)
        _backward_at_once()
        compile()
        os.write(says, _DONE)
    except BaseException as error:
        os.write(says, error_text(error).encode()[:_LONGEST])
    finally:
        os._exit(0)


def _let_go_of_files(says: int) -> None:
    """Who waits for the end of a parent's pipe must not wait for this process, nor may it write to a parent's file.

    The descriptors stay, and lead nowhere: files that Python knows would write to whatever had their numbers next.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    for name in os.listdir(folder):
        if int(name) not in (nowhere, says):
            with contextlib.suppress(OSError):  # that of the listing itself
                os.fstat(int(name))
                os.dup2(nowhere, int(name))


def _end_with(parent: int) -> None:
    """End this process, and those that it started, with its parent, which may have ended before this one ran at all."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def _without_threads(threads: int) -> None:
    """A fork has none of its parent's threads: neither OpenMP's, nor those of Inductor's pool. Code is for as many."""
    from torch._inductor.async_compile import AsyncCompile

    torch.set_num_threads(1)
    torch.get_num_threads = lambda: threads
    AsyncCompile.pool.cache_clear()


def _backward_at_once() -> None:
    """AOTAutograd would compile backward when it first runs. The setting of this name is a part of the caches' keys."""
    from torch._functorch._aot_autograd.schemas import AOTConfig

    original = AOTConfig.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        object.__setattr__(self, "force_non_lazy_backward_lowering", True)  # it is frozen

    AOTConfig.__init__ = init  # type: ignore[method-assign]
