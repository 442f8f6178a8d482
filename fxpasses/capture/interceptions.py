"""The table of what is asked in place of Dynamo's own methods while a frame is traced, and in which order.

Each feature of the capture has a module with handlers:

    @handlers.at(method("torch._dynamo.variables.builtin.BuiltinVariable", "call_bool"), order=1, without="...")
    def call_bool(trace, proceed, self, tx, argument):
        ...

A handler answers the call, or returns NOT_HANDLED; `proceed(...)` asks whoever comes after it, with these arguments.
The handlers of one place are asked in ascending `order`, and Dynamo's own method is the last. Only those are asked
whose feature the running trace has on (`capture/attempt.py`), and none where this thread traces no frame for this
package's backend. All are installed while some frame is traced, and removed after.

A private name that this torch lacks switches off the handler that needs it, with one warning that says what does not
work (`without`); a name without which the rest of a feature would be wrong (no `without`) switches off the feature.
"""

from __future__ import annotations

import dis
import functools
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxpasses.capture.attempt import Feature
from fxpasses.capture.dynamo_names import CHECKED, MissingName, find
from fxpasses.once import warn_once

if TYPE_CHECKING:
    from fxpasses.capture.trace import Trace

NOT_HANDLED: Any = object()
TRANSLATOR = "torch._dynamo.symbolic_convert.InstructionTranslatorBase"

# The module of each feature's handlers, and what happens without it.
FEATURES = {
    Feature.HINTS: ("hints", "code that asks the batch for a number breaks the graph"),
    Feature.SLICES: ("slice_sizes", "slices whose bounds the batch holds may break the graph"),
    Feature.OUTPUTS: ("recorded_outputs", "what transformers records of layers breaks the graph"),
    Feature.STORES: ("stored_numbers", "numbers that checkpointed layers store outside break the graph"),
    Feature.SPECULATION: ("speculation_handlers", "loops that pass over experts without tokens break the graph"),
    Feature.NUMPY: ("numpy_counts", "loops over counts that went through NumPy break the graph"),
    Feature.LISTS: ("grown_lists", "lists that grow where experts have tokens break the graph"),
}

# The trace of the frame that this thread traces for this package's backend; None while it traces none.
current: ContextVar[Trace | None] = ContextVar("fxpasses_trace", default=None)

Place = tuple[Any, Any]  # an object, a list or a dict, and a name, an index or a key
Proceed = Callable[..., Any]  # asks the next handler, or Dynamo's own method


resolve = functools.cache(find)


@dataclass(frozen=True)
class Site:
    """What is replaced. places: finds it, or raises; none where this torch is known to have it elsewhere."""

    name: str
    places: Callable[[], Iterable[Place]]


def method(owner: str, *names: str) -> Site:
    """A method of a class, or a function of a module. names: what versions of torch call it, the newest first."""

    def places() -> Iterator[Place]:
        found = resolve(owner)
        yield found, next((name for name in names if hasattr(found, name)), names[0])

    return Site(f"{owner}.{names[0]}", places)


def opcodes(name: str, *parts: str) -> Site:
    """An instruction of Python's bytecode, or all with certain parts, in the tables of all of Dynamo's translators."""

    wanted = [at for at, found in enumerate(dis.opname) if found == name or any(part in found for part in parts)]

    def places() -> Iterator[Place]:
        for translator in with_subclasses(resolve(TRANSLATOR)):
            handlers = vars(translator).get("dispatch_table", ())
            yield from ((handlers, opcode) for opcode in wanted if opcode < len(handlers) and handlers[opcode])

    return Site(name, places)


def with_subclasses(kind: type) -> set[Any]:
    return {kind}.union(*map(with_subclasses, kind.__subclasses__()))


CONDITIONAL_JUMP = opcodes("conditional jump", "IF_TRUE", "IF_FALSE")


@dataclass(frozen=True)
class Handler:
    """What is asked at a site. checked: the versions of torch that it was tried on. order: among the site's handlers.

    without: what happens without it; "" if its feature must be off then.
    """

    site: Site
    function: Callable[..., Any]
    checked: tuple[str, ...]
    order: int = 1
    without: str = ""


class Handlers(list[Handler]):
    """Those of one feature."""

    def __init__(self, checked: tuple[str, ...] = CHECKED) -> None:
        super().__init__()
        self._checked = checked

    def at(self, *sites: Site, **about: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a function. about: `order` and `without`."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.extend(Handler(site, function, self._checked, **about) for site in sites)
            return function

        return register


@dataclass(frozen=True)
class Row:
    """A handler in the table. places: where this torch has its site; none where it is known to have it elsewhere.

    missing: what it lacks, and what happens without it; or "".
    """

    feature: Feature
    handler: Handler
    places: tuple[Place, ...] = ()
    missing: str = ""


def table() -> list[Row]:
    """The handlers of all features."""
    return [_row(feature, handler) for feature in FEATURES for handler in _handlers_of(feature)]


def off_in(rows: Iterable[Row]) -> frozenset[Feature]:
    """The features that must be off, because a handler that they cannot do without has no place."""
    lost = {row.feature for row in rows if not row.places and not row.handler.without}
    return frozenset(feature for feature in Feature if any(feature.needs(other) for other in lost))


def _handlers_of(feature: Feature) -> list[Handler]:
    module = f"fxpasses.capture.{FEATURES[feature][0]}"
    try:
        return importlib.import_module(module).handlers
    except (AttributeError, ImportError) as error:
        missing = f"name that {module} takes from it ({error})"
        return [Handler(Site(missing, lambda: [find(f"{module}.handlers")]), tuple, CHECKED)]


def _row(feature: Feature, handler: Handler) -> Row:
    try:
        places = tuple(handler.site.places())
        for place in places:
            _get(*place)
        return Row(feature, handler, places)
    except Exception:  # an unknown torch: whatever its names have become
        consequence = handler.without or FEATURES[feature][1]
        return Row(feature, handler, missing=f"{MissingName(handler.site.name)}: {consequence}")


class Installation:
    """What is put into Dynamo, and how many traces need it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo: list[Callable[[], None]] = []
        self._off: frozenset[Feature] = frozenset()

    def enter(self) -> frozenset[Feature]:
        """The features that must be off."""
        with self._lock:
            if self._users == 0:
                self._install(table())
            self._users += 1
            return self._off

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._remove()

    def _install(self, rows: list[Row]) -> None:
        self._off = off_in(rows)
        for row in rows:
            if row.missing:
                warn_once(row.missing, f"{row.missing}. Everything else works; `fxpasses doctor` lists it.", 6)
        asked: dict[tuple[int, Any], tuple[Any, Any, list[Row]]] = {}
        for row in sorted(rows, key=lambda row: row.handler.order):
            for owner, name in row.places if row.feature not in self._off else ():
                asked.setdefault((id(owner), name), (owner, name, []))[2].append(row)
        for owner, name, found in asked.values():
            handlers = [(row.feature, row.handler.function) for row in found]
            self._undo.append(_put(owner, name, _dispatcher(_get(owner, name), handlers)))

    def _remove(self) -> None:
        while self._undo:
            self._undo.pop()()


def _dispatcher(original: Callable[..., Any], handlers: list[tuple[Feature, Callable[..., Any]]]) -> Callable[..., Any]:
    def proceed(trace: Trace, place: int, /, *args: Any, **kwargs: Any) -> Any:
        while place < len(handlers):
            feature, function = handlers[place]
            place += 1
            if feature in trace.attempt.features:
                answer = function(trace, functools.partial(proceed, trace, place), *args, **kwargs)
                if answer is not NOT_HANDLED:
                    return answer
        return original(*args, **kwargs)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        trace = current.get()
        return original(*args, **kwargs) if trace is None else proceed(trace, 0, *args, **kwargs)

    return dispatch


def _get(owner: Any, name: Any) -> Any:
    return owner[name] if isinstance(owner, (list, dict)) else getattr(owner, name)


def _put(owner: Any, name: Any, value: Any) -> Callable[[], None]:
    """Replace what is there; returns what undoes it."""
    if isinstance(owner, (list, dict)):
        before, owner[name] = owner[name], value
        return functools.partial(owner.__setitem__, name, before)
    before = vars(owner).get(name)  # None where it has it from its base
    setattr(owner, name, value)
    return (lambda: delattr(owner, name)) if before is None else (lambda: setattr(owner, name, before))
