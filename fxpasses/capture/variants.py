"""Which guards made a frame's variants, and which questions are given up because batches keep differing in the answer.

Dynamo keeps 8 graphs of a frame (`recompile_limit`); then the frame runs uncompiled. A loop such as
`for i in range(lengths.max().item())` alone would use them up. So from a frame's 6th variant on, the question whose
guard failed most often is given up: from then on it gets no answer, at any of the places that asked it, in this frame
and in those that Dynamo makes of the rest after a graph break. It breaks the graph there, as under stock PyTorch.

Where one place asks many questions of a single batch, their trace says so at once (`Trace.crowded`), and they are given
up in the same way.

A variant counts against a question only if that question's guard failed: the size of another input, or a hook that was
added, says nothing about the batch's answers. Where such guards make 6 variants, one warning names the last of them.

The state is that of the process, as Dynamo's caches are, and `torch._dynamo.reset` ends it. Dynamo does not free a
guard that is a Python function, neither after a reset nor with the code of its frame (seen on torch 2.13), so the
guards of frames that are gone give up what they hold.

Private names, checked on torch 2.11, 2.13 and 2.15: `torch._dynamo.utils.guard_failures`, to which Dynamo adds, before
it compiles a frame once more, the guard that failed in each of the frame's graphs, the newest graph first; without it,
no question is given up, and Dynamo's own limit applies. `torch._dynamo.convert_frame.input_codes`, the frames that
Dynamo has met since the last reset.
"""

from __future__ import annotations

import importlib
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from fxpasses.capture.attempt import Place
from fxpasses.once import warn_once

if TYPE_CHECKING:
    from fxpasses.capture.assumptions import Assumption
    from fxpasses.capture.guarding import BatchGuard

_MOST = 6


@dataclass
class _Frame:
    """What is known of a frame's variants.

    seen: how many of Dynamo's guard failures were looked at. variants: with the one that is being compiled. differed:
    how many of them batches made. counts: how many of them each question made.
    """

    seen: int = 0
    variants: int = 1
    differed: int = 0
    guards: list[weakref.ref[BatchGuard]] = field(default_factory=list)
    counts: Counter[Place] = field(default_factory=Counter)
    broken: dict[Place, Assumption] = field(default_factory=dict)  # as they failed last
    given_up: set[Place] = field(default_factory=set)


def begin(code: CodeType, described: str) -> frozenset[Place]:
    """See which guards failed, so that a frame is traced; returns the places whose questions get no answer."""
    failures = _failures()
    for known in list(_frames):
        if known not in _met() or (known is code and _is_first_variant()):  # since `torch._dynamo.reset`
            _release(_frames.pop(known).guards)
    so_far = failures.get(code, ())
    frame = _frames.setdefault(code, _Frame(seen=len(so_far)))  # those of other backends do not count
    reasons = so_far[frame.seen :]
    frame.seen = len(so_far)
    frame.variants = len(reasons) + 1
    guards = [guard for found in frame.guards if (guard := found()) is not None]  # the others' graphs are gone
    broken = [a for guard in guards if any(guard.text in reason for reason in reasons) for a in guard.failed]
    frame.differed += bool(broken)
    frame.broken |= {place: assumption for assumption in broken for place in assumption.places}
    frame.counts.update({place for assumption in broken for place in assumption.places})
    if broken and frame.variants >= _MOST:
        _give_up_worst(frame, described)
    elif frame.variants == _MOST:
        _warn_of_guard(described, reasons[0])
    return frozenset().union(*(frame.given_up for frame in _frames.values()))


def add(code: CodeType, guard: BatchGuard) -> None:
    """Called when a frame is traced."""
    frame = _frames.setdefault(code, _Frame())
    if not frame.guards:
        weakref.finalize(code, _release, frame.guards)
    frame.guards.append(weakref.ref(guard))


def give_up(code: CodeType, crowded: Mapping[Place, str]) -> None:
    """Give up the places that asked too many questions in one trace of a frame. crowded: how many, in a text."""
    _frames.setdefault(code, _Frame()).given_up.update(crowded)
    for place, text in crowded.items():
        warn_once(place, f"{text}: each batch would be a program of its own. The graph breaks there.")


def _give_up_worst(frame: _Frame, described: str) -> None:
    """Give up the question that made the most variants."""
    counts = {place: count for place, count in frame.counts.items() if place not in frame.given_up}
    most = max(counts.values(), default=0)
    worst = {place for place, count in counts.items() if count == most}
    frame.given_up |= worst
    if worst:
        named = "; ".join(dict.fromkeys(str(frame.broken[place]) for place in sorted(worst)))
        times = f"{frame.variants} times" + f", {frame.differed} of them" * (frame.differed < frame.variants - 1)
        text = f"{described} was compiled {times} because batches differ in their answers to the program's questions;"
        text += f" the guard that failed is {named}. From now on that question breaks the graph, as without fxpasses."
        warnings.warn(f"fxpasses: {text}", stacklevel=2)


def _warn_of_guard(described: str, reason: str) -> None:
    guard = re.sub(r"^\[?\d+/\d+\]?: ", "", reason).partition("\nUser stack trace")[0].strip()
    limit = importlib.import_module("torch._dynamo.config").recompile_limit
    text = f"{described} was compiled {_MOST} times; the guard that failed is {guard}. After {limit} graphs,"
    warn_once(("recompiled", described), f"{text} Dynamo runs it uncompiled.")


def _is_first_variant() -> bool:
    """Whether Dynamo compiles a frame for the first time, or for the first time after `torch._dynamo.reset`."""
    compilation = torch._guards.CompileContext.current_compile_id()
    return compilation is not None and compilation.frame_compile_id == 0


def forget() -> None:
    """Forget all frames."""
    for code in list(_frames):
        _release(_frames.pop(code).guards)


def _release(guards: Iterable[weakref.ref[BatchGuard]]) -> None:
    for reference in guards:
        if (guard := reference()) is not None:
            guard.release()


def _met() -> Container[CodeType]:
    convert_frame = importlib.import_module("torch._dynamo.convert_frame")
    return getattr(convert_frame, "input_codes", _frames)


def _failures() -> Mapping[CodeType, Sequence[str]]:
    utils: Any = importlib.import_module("torch._dynamo.utils")
    return getattr(utils, "guard_failures", {})


_frames: weakref.WeakKeyDictionary[CodeType, _Frame] = weakref.WeakKeyDictionary()
