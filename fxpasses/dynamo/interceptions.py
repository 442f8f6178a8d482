"""The table of interceptions: handlers that run before Dynamo's own methods while a frame is traced.

Each feature of the capture (`dynamo/features.py`) has a module with handlers:

    @handlers.at(method("torch._dynamo.variables.builtin.BuiltinVariable", "call_bool"), order=1, without="...")
    def call_bool(trace, proceed, self, tx, argument):
        ...

A handler returns the result of the call, or NOT_HANDLED; `proceed(...)` calls the next handler with other arguments.
The handlers of one place run in ascending `order`, and Dynamo's own method is the last. A handler runs only if the
running trace has its feature, and none runs unless this thread traces a frame for this package's
backend. All are installed while some frame is traced, and removed after.

If this torch lacks a private name, the handler that needs it is off, and one warning says what does not work
(`without`); if the rest of the feature would be wrong without the handler (no `without`), the feature is off. A method
with other parameters counts as missing: after `trace` and `proceed`, the handler's parameters have to match the
method's by position and by name. The first may have another name, and so may those before a `/`; a handler's `*args`
and `**kwargs` stand for any further parameters; both are needed for one that may be given by position or by name.

Private name, checked on torch 2.13, besides those of the sites: `BuiltinVariable.call_function_handler_cache`, in which
Dynamo keeps bound methods from one trace to the next. While handlers are installed, a separate dict replaces it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import Parameter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from fxpasses.base.once import warn_once
from fxpasses.dynamo.dynamo_names import CHECKED, MissingName, find
from fxpasses.dynamo.failures import mark_as_passed
from fxpasses.dynamo.features import Feature

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

NOT_HANDLED: Any = object()
TRANSLATOR = "torch._dynamo.symbolic_convert.InstructionTranslatorBase"

# The trace of the frame that this thread traces for this package's backend; None while it traces none.
current: ContextVar[Trace | None] = ContextVar("fxpasses_trace", default=None)

Place = tuple[Any, Any]  # an object, a list or a dict, and a name, an index or a key
Proceed = Callable[..., Any]  # calls the next handler, or Dynamo's own method
resolve = functools.cache(find)


@dataclass(frozen=True)
class Site:
    """A method or function that handlers replace. places: finds it; raises if this torch lacks it."""

    name: str
    places: Callable[[], Iterable[Place]]


def method(owner: str, *names: str, imported_by: tuple[str, ...] = ()) -> Site:
    """A method of a class, or a function of a module. names: its names in various versions of torch, newest first.

    imported_by: modules that have the function under its own name, once they are loaded.
    """

    def places() -> Iterator[Place]:
        found = resolve(owner)
        yield found, next((name for name in names if hasattr(found, name)), names[0])
        for module in map(sys.modules.get, imported_by):
            if module is not None and hasattr(module, names[0]):
                yield module, names[0]

    return Site(f"{owner}.{names[0]}", places)


def opcodes(name: str, *parts: str) -> Site:
    """An instruction of Python's bytecode, or all whose names contain one of `parts`, in all dispatch tables.

    From Python 3.12 on, most have a twin for code that a debugger watches; Dynamo traces none of these twins.
    """
    names = [(at, found) for at, found in enumerate(dis.opname) if not found.startswith("INSTRUMENTED_")]
    wanted = [at for at, found in names if found == name or any(part in found for part in parts)]

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
    """checked: the versions of torch that it was tried on. order: among the site's handlers.

    without: the effect of its absence; "" if its feature must be off then. elsewhere: whether it may run on other
    versions too; False if a proof relies on Dynamo doing something only through the sites.
    """

    site: Site
    function: Callable[..., Any]
    checked: tuple[str, ...]
    order: int = 1
    without: str = ""
    elsewhere: bool = True


class Handlers(list[Handler]):
    """The handlers of one feature."""

    def __init__(self, checked: tuple[str, ...] = CHECKED, elsewhere: bool = True) -> None:
        super().__init__()
        self._checked, self._elsewhere = checked, elsewhere

    def at(self, *sites: Site, **about: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a function. about: `order` and `without`."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.extend(Handler(site, function, self._checked, elsewhere=self._elsewhere, **about) for site in sites)
            return function

        return register


@dataclass(frozen=True)
class Row:
    """A handler in the table. places: where this torch has its site; none if it lacks it.

    missing: the missing name and the effect of its absence; "" if none is, or if the handler is not for this torch.
    """

    feature: Feature
    handler: Handler
    places: tuple[Place, ...] = ()
    missing: str = ""


def table() -> list[Row]:
    return [_row(feature, handler) for feature in Feature for handler in _handlers_of(feature)]


def off_in(rows: Iterable[Row]) -> frozenset[Feature]:
    """The features that must be off, because they lack a necessary handler."""
    lost = {row.feature for row in rows if not row.places and not row.handler.without}
    return frozenset(feature for feature in Feature if any(feature.needs(other) for other in lost))


def _handlers_of(feature: Feature) -> list[Handler]:
    module = feature.module
    if not module:
        return []
    try:
        return importlib.import_module(module).handlers
    except (AttributeError, ImportError) as error:
        missing = f"name that {module} imports ({error})"
        return [Handler(Site(missing, lambda: [find(f"{module}.handlers")]), tuple, CHECKED)]


def _row(feature: Feature, handler: Handler) -> Row:
    here = ".".join(torch.__version__.split(".")[:2])
    if not handler.elsewhere and not any(version.startswith(f"{here}.") for version in handler.checked):
        return Row(feature, handler)
    try:
        places = tuple(handler.site.places())
        for place in places:
            _check_parameters(handler, _get(*place))
        return Row(feature, handler, places)
    except Exception:  # an unknown torch may have anything there
        consequence = handler.without or feature.effect
        return Row(feature, handler, missing=f"{MissingName(handler.site.name)}: {consequence}")


# Which of `*args` and `**kwargs` a handler needs for further parameters of each kind.
_TAKEN_BY = {
    Parameter.POSITIONAL_ONLY: (Parameter.VAR_POSITIONAL,),
    Parameter.VAR_POSITIONAL: (Parameter.VAR_POSITIONAL,),
    Parameter.POSITIONAL_OR_KEYWORD: (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD),
    Parameter.KEYWORD_ONLY: (Parameter.VAR_KEYWORD,),
    Parameter.VAR_KEYWORD: (Parameter.VAR_KEYWORD,),
}


@functools.cache  # a table is made for each frame
def _check_parameters(handler: Handler, replaced: Callable[..., Any]) -> None:
    """Raise `TypeError` if a method takes other arguments than the handler that would run before it."""
    own = list(inspect.signature(handler.function).parameters.values())[2:]
    given = list(inspect.signature(replaced).parameters.values())
    if {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= {each.kind for each in given}:
        return  # a wrapper, whose parameters say nothing
    kinds = {each.kind for each in own}
    expected = [each for each in own if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    needed = {kind for each in given[len(expected) :] for kind in _TAKEN_BY[each.kind]}
    same = len(given) >= len(expected) and all(
        there.name == here.name or here.kind is Parameter.POSITIONAL_ONLY
        for there, here in list(zip(given, expected, strict=False))[1:]
    )
    if not same or not needed <= kinds:
        raise TypeError(f"{handler.site.name} takes {inspect.signature(replaced)}")


class Installation:
    """The dispatchers installed in Dynamo, and the number of traces that need them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo: list[Callable[[], None]] = []
        self._functions: list[tuple[str, Any, Any]] = []  # of modules: name, dispatcher and original
        self._loaded: frozenset[str] = frozenset()  # modules
        self._off: frozenset[Feature] = frozenset()

    def enter(self) -> frozenset[Feature]:
        """Install the handlers if they are not; returns the features that must be off."""
        with self._lock:
            if self._users == 0:
                try:
                    self._install(table())
                except Exception:
                    self._remove()
                    raise
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
        self._loaded = frozenset(sys.modules)
        for owner, name in _kept_methods():  # those kept so far are Dynamo's own, without the handlers
            self._undo.append(_put(owner, name, {}))
        for owner, name, found in asked.values():
            handlers = [(row.feature, row.handler.function) for row in found]
            original = _get(owner, name)
            dispatcher = _dispatcher(original, handlers)
            self._undo.append(_put(owner, name, dispatcher))
            if isinstance(owner, ModuleType):
                self._functions.append((name, dispatcher, original))

    def _remove(self) -> None:
        while self._undo:
            self._undo.pop()()
        for loaded in sys.modules.keys() - self._loaded:  # loaded meanwhile: they may have imported a dispatcher
            for name, dispatcher, original in self._functions:
                if getattr(sys.modules[loaded], "__dict__", {}).get(name) is dispatcher:
                    setattr(sys.modules[loaded], name, original)
        self._functions.clear()


def _dispatcher(original: Callable[..., Any], handlers: list[tuple[Feature, Callable[..., Any]]]) -> Callable[..., Any]:
    def proceed(trace: Trace, place: int, /, *args: Any, **kwargs: Any) -> Any:
        while place < len(handlers):
            feature, function = handlers[place]
            place += 1
            if feature in trace.attempt.features:
                try:
                    answer = function(trace, functools.partial(proceed, trace, place), *args, **kwargs)
                except Exception as error:
                    trace.note_error(feature, error)
                    raise
                if answer is not NOT_HANDLED:
                    return answer
        try:
            return original(*args, **kwargs)
        except Exception as error:
            mark_as_passed(error)
            raise

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        trace = current.get()
        return original(*args, **kwargs) if trace is None else proceed(trace, 0, *args, **kwargs)

    return dispatch


def _kept_methods() -> Iterator[Place]:
    """Where Dynamo keeps bound methods, in a dict."""
    with contextlib.suppress(MissingName):
        builtin = find("torch._dynamo.variables.builtin.BuiltinVariable")
        if hasattr(builtin, "call_function_handler_cache"):
            yield builtin, "call_function_handler_cache"


def _get(owner: Any, name: Any) -> Any:
    return owner[name] if isinstance(owner, (list, dict)) else getattr(owner, name)


def _put(owner: Any, name: Any, value: Any) -> Callable[[], None]:
    """Replace the value at a place; returns a function that restores it."""
    if isinstance(owner, (list, dict)):
        before, owner[name] = owner[name], value
        return functools.partial(owner.__setitem__, name, before)
    has_slots = not hasattr(owner, "__dict__")
    before = getattr(owner, name) if has_slots else vars(owner).get(name)  # None if inherited
    setattr(owner, name, value)
    return (lambda: delattr(owner, name)) if before is None else (lambda: setattr(owner, name, before))
