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
from fxpasses.options import Options
from fxpasses.report import OnReport

_MOST = 3  # graphs of a frame that start so: Dynamo has eight for a frame, and may count those that it has forgotten

Compile = Callable[[Options, OnReport], tuple[Callable[..., Any], str]]


def compiled(
    compile: Compile, settings: Options, code: CodeType | None, graph: str, on_report: OnReport
) -> tuple[Callable[..., Any], str]:
    """What `compile` returns: under `settings`, or for now under others that need no compiler.

    graph: identifies the graph among those of its frame. on_report: for the reports of this process.
    """
    if settings.start != "eager" or settings.lowering != "inductor" or code is None:
        return compile(settings, on_report)
    frame = _frames.setdefault(code, Frame(code))
    child = None
    if frame.starts_eagerly(graph):
        with contained("compiling in another process", "The first step waits for the compiler.", settings.strict):
            child = Child(lambda: compile(settings, lambda report: None))
    if child is None:
        return compile(settings, on_report)
    lowering = "aot_eager" if settings.offloads else "eager"  # activations move between AOTAutograd's graphs
    try:
        run, outcome = compile(replace(settings, lowering=lowering, inductor={}, mode=None), on_report)
    except BaseException:
        child.end()
        raise
    frame.add(graph, child, cache_entries.running())
    return frame.until_compiled(run), outcome


def identity(gm: GraphModule) -> str:
    """A graph among those of its frame: a digest of its code and of the types and sizes of its inputs."""
    inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    described = [
        f"{value.dtype} {value.device} {[*map(str, value.shape)]} {value.requires_grad}"
        if isinstance(value, torch.Tensor)
        else str(value)
        for value in inputs
    ]
    return hashlib.sha256("\n".join([gm.code, *described]).encode()).hexdigest()


class Frame:
    """A frame that runs uncompiled while children compile its graphs."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.compiled: set[str] = set()  # graphs whose code is in PyTorch's caches, unless their child failed
        self.children: dict[str, Child] = {}  # by graph
        self.entries: set[str] = set()  # of the graphs that run uncompiled, in Dynamo's cache
        self.calls = 0
        self._since = 0.0
        self._lock = threading.Lock()

    def starts_eagerly(self, graph: str) -> bool:
        if graph in self.compiled or len(self.compiled) + len(self.children) >= _MOST:
            return False
        why = refusal()
        if why:
            text = f'fastpack.start is "eager", but the first step waits for the compiler, because {why}.'
            warn_once(("eager start", why), text, stacklevel=6)
        return not why

    def add(self, graph: str, child: Child, entry: str) -> None:
        with self._lock:
            if not self.children:
                self._since, self.calls = child.started, 0
            self.children[graph] = child
            self.entries.add(entry)

    def until_compiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`; once all children are over, the next call of the frame compiles it, mostly from the caches."""

        @functools.wraps(run)
        def running(*inputs: Any) -> Any:
            if self.children:
                self._take_over_if_ready()
            self.calls += 1
            return run(*inputs)

        return running

    def _take_over_if_ready(self) -> None:
        with self._lock:
            children = list(self.children.values())
            if not children or not all([child.is_over() for child in children]):
                return
            self.compiled |= self.children.keys()
            entries, self.children, self.entries = self.entries, {}, set()
        with contained("changing to compiled code", "It goes on uncompiled."):
            cache_entries.forget(self.code, entries)
        name = getattr(self.code, "co_qualname", self.code.co_name)
        if all(child.succeeded for child in children):
            seconds = time.monotonic() - self._since
            progress.say(f"{name} is compiled from its next call on, after {self.calls} without ({seconds:.0f} s)")
        else:
            why = next((f" ({child.error})" for child in children if child.error), "")
            text = f"compiling {name} in another process failed{why}. It is compiled in this one, at its next call."
            warn_once(("eager start", self.code), text, stacklevel=5)


_frames: dict[CodeType, Frame] = {}
