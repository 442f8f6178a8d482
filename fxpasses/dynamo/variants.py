"""How many variants of a frame batches may make, and which questions are given up because their answers keep changing.

Dynamo keeps 8 graphs of a frame (`recompile_limit`); after that the frame runs uncompiled, and each graph took as long
to compile as the first. A question that is given up gets no answer from then on, at any of the places that asked it, in
this frame and in those that Dynamo makes of the rest after a graph break. It breaks the graph there, as under stock
PyTorch.

Before a frame is compiled once more, the guards of its variants look at the batch at hand. An answer that no variant
has is new. Some questions have more answers than there can be graphs: those that fix a number (`for i in range(n)`, the
number of an image's windows), and branches that one place takes for three numbers or more. They are given up

- at the 2nd answer, if more than 4 numbers changed: no two batches agree in so many;
- at the 3rd answer, if they are about 2 numbers or more;
- like all others, from the frame's 6th variant on, if they had the most answers.

If one place asks many questions of a single batch, its trace notices at once (`Trace.crowded`), and they are given up
in the same way.

Only a batch's answers count: the size of another input, or a hook that was added, says nothing about them. If such
guards make 6 variants, one warning names the last guard.

The state belongs to the process, like Dynamo's caches, and `torch._dynamo.reset` ends it. Dynamo does not free a guard
that is a Python function, neither after a reset nor with the code of its frame (seen on torch 2.13), so the guards of
frames that are gone release what they hold.

Private names, checked on torch 2.11, 2.13 and 2.15: `torch._dynamo.utils.guard_failures`, to which Dynamo adds, before
it compiles a frame once more, the guard that failed in each of the frame's graphs, the newest graph first; without it,
no question is given up but at its 2nd or 3rd answer. `torch._dynamo.convert_frame.input_codes`, the frames that Dynamo
has met since the last reset.
"""

from __future__ import annotations

import importlib
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from fxpasses.base.once import warn_once
from fxpasses.dynamo.attempt import Place

if TYPE_CHECKING:
    from fxpasses.dynamo.assumptions import Assumption
    from fxpasses.dynamo.guarding import BatchGuard

_MOST = 6  # variants
_MANY = 4  # numbers that a batch changes: if more, the next batch is expected to change them as well
_NAMED = 3  # guards that a warning names
_BRANCHES = 3  # at one place, whose answers have eight combinations


@dataclass
class _Frame:
    """What is known of a frame's variants.

    seen: how many of Dynamo's guard failures were looked at. variants: how many there are, with the one being compiled.
    differed: how many of them a batch's new answers made. answers: how many further answers each question had.
    """

    seen: int = 0
    variants: int = 1
    differed: int = 0
    guards: list[weakref.ref[BatchGuard]] = field(default_factory=list)
    answers: Counter[Place] = field(default_factory=Counter)
    broken: dict[Place, Assumption] = field(default_factory=dict)  # the assumption that failed last at each place
    given_up: set[Place] = field(default_factory=set)


def begin(code: CodeType, described: str, names: Mapping[str, Any]) -> frozenset[Place]:
    """Find which answers of the batch at hand are new; returns the places whose questions get no answer.

    names: those that Dynamo's sources use, `L` and `G` for the frame's locals and globals.
    """
    failures = _failures()
    end_since_reset(code)
    so_far = failures.get(code, ())
    frame = _frames.setdefault(code, _Frame(seen=len(so_far)))  # failures of other backends' guards do not count
    reasons = so_far[frame.seen :]
    frame.seen = len(so_far)
    frame.variants = len(reasons) + 1
    guards = [guard for known in frame.guards if (guard := known()) is not None]  # the others' graphs are gone
    found = [_Variant(g.assumptions, broken) for g in guards if (broken := g.broken_in(names)) is not None]
    new = _new_answers(found)
    frame.differed += bool(new)
    frame.answers.update(new.keys())
    frame.broken |= new
    if places := _too_many(frame, found, _without_bound(found).intersection(new)):
        _give_up(frame, places, described)
    elif new and frame.variants >= _MOST:
        most = max((frame.answers[place] for place in frame.answers if place not in frame.given_up), default=0)
        _give_up(frame, {place for place, count in frame.answers.items() if count == most}, described)
    elif frame.variants == _MOST:
        _warn_of_guard(described, reasons[0])
    return frozenset().union(*(frame.given_up for frame in _frames.values()))


def end_since_reset(code: CodeType) -> None:
    """Called before a frame is compiled: forget the frames of which `torch._dynamo.reset` has ended the graphs."""
    for known in list(_frames):
        if known not in _met() or (known is code and _is_first_variant()):
            _release(_frames.pop(known).guards)


def add(code: CodeType, guard: BatchGuard) -> None:
    """Called when a frame has been traced."""
    frame = _frames.setdefault(code, _Frame())
    if not frame.guards:
        weakref.finalize(code, _release, frame.guards)
    frame.guards.append(weakref.ref(guard))


def give_up(code: CodeType, crowded: Mapping[Place, str]) -> None:
    """Give up the places that asked too many questions in one trace of a frame. crowded: a text that says how many."""
    _frames.setdefault(code, _Frame()).given_up.update(crowded)
    for place, text in crowded.items():
        warn_once(place, f"{text}: each batch would be a program of its own. The graph breaks there.")


@dataclass(frozen=True)
class _Variant:
    """A variant's assumptions, and those of them that the batch at hand breaks."""

    assumed: list[Assumption]
    broken: list[Assumption]

    def numbers(self, places: Set[Place], broken: bool = False) -> int:
        """How many numbers the assumptions of some places are about."""
        found = [a for a in (self.broken if broken else self.assumed) if places & a.places]
        return len({number for assumption in found for number in assumption.condition.free_symbols})


def _new_answers(variants: list[_Variant]) -> dict[Place, Assumption]:
    """The places whose answers no variant has, each with the last of the assumptions that the batch breaks."""
    broken = {place: assumption for one in variants for assumption in one.broken for place in assumption.places}
    for one in variants:
        here = {place for assumption in one.broken for place in assumption.places}
        for place in {place for assumption in one.assumed for place in assumption.places} - here:
            broken.pop(place, None)
    return broken


def _without_bound(variants: list[_Variant]) -> set[Place]:
    """The places whose questions have more answers than there can be graphs."""
    found: set[Place] = set()
    for one in variants:
        asked = Counter(place for assumption in one.assumed for place in assumption.places)
        found |= {place for place, count in asked.items() if count >= _BRANCHES}
        found |= {place for assumption in one.assumed if assumption.fixes_number for place in assumption.places}
    return found


def _too_many(frame: _Frame, variants: list[_Variant], changed: Set[Place]) -> set[Place]:
    """The places `changed`, of unbounded questions with new answers, that have had too many answers."""
    nearest = min((count for one in variants if (count := one.numbers(changed, broken=True))), default=0)
    if nearest > _MANY:
        return set(changed)
    guarded = max((one.numbers(changed) for one in variants), default=0)
    return {place for place in changed if guarded > 1 and frame.answers[place] > 1}


def _give_up(frame: _Frame, places: set[Place], described: str) -> None:
    places -= frame.given_up
    frame.given_up |= places
    if places:
        named = list(dict.fromkeys(str(frame.broken[place]) for place in sorted(places)))
        rest = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        times = f"{frame.variants} times" + f", {frame.differed} of them" * (frame.differed < frame.variants - 1)
        text = f"{described} was compiled {times} because batches differ in their answers to the program's questions;"
        text += (
            f" the guard that failed is {'; '.join(named[:_NAMED])}{rest}. From now on that question breaks the graph,"
        )
        warnings.warn(f"fxpasses: {text} as without fxpasses.", stacklevel=2)


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
