"""`fastpack.start = "eager"`: a program runs uncompiled from its first step, while another process compiles its graph.

    step 1       Dynamo, passes; a child compiles the graph with Inductor, into PyTorch's caches
    steps 2..    the same graph, operator by operator
    step n       the child is done: Dynamo forgets the uncompiled graph
    step n + 1   Dynamo, passes, AOTAutograd; the code comes from the caches

The frame is traced a second time, rather than the code of a piece exchanged, because compiling guards sizes: Dynamo
takes these guards where it traces, and a graph whose guards nobody checks is wrong for other sizes.

A graph is compiled at once, as without the option, where a child would not help or could hang
(`forked_compiler.refusal`). If the child fails, this process compiles the frame, and says why if it fails as well.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch.fx import GraphModule

from fxpasses.base.containment import contained
from fxpasses.base.once import warn_once
from fxpasses.compiler import progress
from fxpasses.compiler.forked_compiler import Child, refusal
from fxpasses.dynamo import cache_entries
from fxpasses.inspect.recording import Observer
from fxpasses.metadata.runtime.prologue import autocast_state
from fxpasses.options import Options
from fxpasses.report import OnReport

_MOST = 3  # graphs of a frame that start so: Dynamo has eight for a frame, and may count those that it has forgotten

Compile = Callable[[Options, OnReport], tuple[Callable[..., Any], str]]


def compiled(
    compile: Compile, settings: Options, code: CodeType | None, gm: GraphModule, observer: Observer
) -> tuple[Callable[..., Any], str]:
    """What `compile` returns: under `settings`, or for now under others that need no compiler.

    code: the frame's. gm: the graph that Dynamo captured. observer: of the compilation.
    """
    on_report = observer.after_partition
    if settings.start != "eager" or settings.lowering != "inductor" or code is None:
        return compile(settings, on_report)
    frame = _frames.setdefault(id(code), Frame(code))  # equal functions have graphs of their own
    child = None
    with contained("compiling in another process", "The first step waits for the compiler.", settings.strict):
        graph, entry = _identity(gm), cache_entries.running()
        child = frame.children.get(graph)
        if child is None and frame.starts_eagerly(graph):
            child = Child(lambda: compile(settings, lambda report: None))
    if child is None:
        return compile(settings, on_report)
    # Activations move between AOTAutograd's graphs, and are computed again there.
    lowering = "aot_eager" if settings.offloads or settings.memory.budget != "off" else "eager"
    try:
        run, outcome = compile(replace(settings, lowering=lowering, inductor={}, mode=None), on_report)
    except BaseException:
        if graph not in frame.children:
            child.end()
        raise
    frame.add(graph, child, entry, observer)
    return frame.until_compiled(run), outcome


def _identity(gm: GraphModule) -> str:
    """A graph among those of its frame: a digest of its code, of the types and sizes of its inputs, and of modes."""
    inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    described = [
        f"{value.dtype} {value.device} {[*map(str, value.shape)]} {value.requires_grad}"
        if isinstance(value, torch.Tensor)
        else str(value)
        for value in inputs
    ]
    modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state()]
    return hashlib.sha256("\n".join([gm.code, *described, *map(str, modes)]).encode()).hexdigest()


class Frame:
    """A frame that runs uncompiled while children compile its graphs."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.compiled: set[str] = set()  # graphs whose code is in PyTorch's caches, unless their child failed
        self.children: dict[str, Child] = {}  # by graph
        self.entries: set[str] = set()  # of the graphs that run uncompiled, in Dynamo's cache
        self.observers: list[Observer] = []  # of their compilations
        self.calls = 0
        self._thread = threading.get_ident()  # that calls it
        self._is_shared = False  # whether several threads do
        self._since = 0.0
        self._lock = threading.Lock()

    def starts_eagerly(self, graph: str) -> bool:
        if graph in self.compiled or len(self.compiled) + len(self.children) >= _MOST:
            return False
        why = refusal()
        if is_repeated():
            why = "a checkpoint runs it twice, which has to be the same code"
        elif cache_entries.has_others(self.code):
            why = "another backend has graphs of it, and graphs that Dynamo forgets beside those count for its limit"
        if why:
            text = f'fastpack.start is "eager", but the first step waits for the compiler, because {why}.'
            warn_once(("eager start", why), text, stacklevel=6)
        return not why

    def add(self, graph: str, child: Child, entry: str, observer: Observer) -> None:
        with self._lock:
            if not self.children:
                self._since, self.calls = child.started, 0
            self.children[graph] = child
            self.entries.add(entry)
            self.observers.append(observer)

    def until_compiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`; once all children are over, the next call of the frame compiles it, mostly from the caches."""

        @functools.wraps(run)
        def running(*inputs: Any) -> Any:
            if self.children:
                with contained("changing to compiled code", "It goes on uncompiled."):
                    self._take_over_if_ready()
            self.calls += 1
            return run(*inputs)

        return running

    def _take_over_if_ready(self) -> None:
        self._is_shared |= threading.get_ident() != self._thread
        if self._is_shared:  # Dynamo cannot forget a graph that another thread is looking for
            text = f"{self.code.co_name} is called by several threads, so it stays uncompiled"
            warn_once(("eager start", "threads", id(self.code)), f'{text} with fastpack.start = "eager".', stacklevel=6)
            return
        with self._lock:
            children = list(self.children.values())
            if not children or not all([child.is_over() for child in children]):
                return
            if is_repeated() or cache_entries.may_not_recompile():
                return
            self.compiled |= self.children.keys()
            entries, self.children, self.entries = self.entries, {}, set()
            observers, self.observers = self.observers, []
        for observer in observers:
            observer.retraced()
        cache_entries.forget(self.code, entries)
        name = getattr(self.code, "co_qualname", self.code.co_name)
        if all(child.succeeded for child in children):
            seconds = time.monotonic() - self._since
            progress.say(f"{name} is compiled from its next call on, after {self.calls} without ({seconds:.0f} s)")
        else:
            why = next((f" ({child.error})" for child in children if child.error), "")
            text = f"compiling {name} in another process failed{why}. It is compiled in this one, at its next call."
            warn_once(("eager start", id(self.code)), text, stacklevel=6)


_frames: dict[int, Frame] = {}  # by the identity of their code, which they keep


def is_repeated() -> bool:
    """Whether the running call is that of a checkpoint, or backward's, which repeats it."""
    if torch._C._current_graph_task_id() != -1:
        return True
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_CHECKPOINTS):
            return True
        frame = frame.f_back
    return False


_CHECKPOINTS = tuple(
    os.path.join(*place)
    for place in (
        ("torch", "utils", "checkpoint.py"),
        ("activation_checkpointing", "checkpointing.py"),  # DeepSpeed's
        ("checkpoint", "checkpoint_activations.py"),  # FairScale's
    )
)


def _forget_children() -> None:
    """In a fork, of a data loader for instance: the children are its parent's, and it runs uncompiled."""
    for frame in _frames.values():
        frame.children, frame.entries, frame.observers, frame._lock = {}, set(), [], threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_children)
