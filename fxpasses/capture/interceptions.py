"""The table of interceptions: handlers that run before Dynamo's own methods while a frame is traced.

Each feature of the capture has a module with handlers:

    @handlers.at(method("torch._dynamo.variables.builtin.BuiltinVariable", "call_bool"), order=1, without="...")
    def call_bool(trace, proceed, self, tx, argument):
        ...

A handler returns the result of the call, or NOT_HANDLED; `proceed(...)` calls the next handler with other arguments.
The handlers of one place run in ascending `order`, and Dynamo's own method is the last. A handler runs only if the
running trace has its feature (`capture/attempt.py`), and none runs unless this thread traces a frame for this package's
backend. All are installed while some frame is traced, and removed after.

If this torch lacks a private name, the handler that needs it is off, with one warning that says what does not work
(`without`); if the rest of the feature would be wrong without the handler (no `without`), the feature is off.
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

import torch

from fxpasses.capture.attempt import Feature
from fxpasses.capture.dynamo_names import CHECKED, MissingName, find
from fxpasses.once import warn_once

if TYPE_CHECKING:
    from fxpasses.capture.trace import Trace

NOT_HANDLED: Any = object()
TRANSLATOR = "torch._dynamo.symbolic_convert.InstructionTranslatorBase"

# The module of each feature's handlers, and the effect of its absence.
FEATURES = {
    Feature.HINTS: ("hints", "code that asks the batch for a number breaks the graph"),
    Feature.CHUNKS: ("chunk_ranges", "`range(0, n, 64)` is compiled anew for each n"),
    Feature.SLICES: ("slice_sizes", "slices whose bounds depend on the batch may break the graph"),
    Feature.OUTPUTS: ("recorded_outputs", "transformers' recorded outputs of layers break the graph"),
    Feature.STORES: ("stored_values", "what checkpointed layers store outside break the graph"),
    Feature.SHARED: ("shared_tensors", "tensors that checkpointed layers share through a dict break the graph"),
    Feature.GRADIENTS: ("required_gradients", "requiring the gradient of an intermediate breaks the graph"),
    Feature.OUT: ("out_arguments", "`torch.mm(..., out=...)` into memory that is not contiguous breaks the graph"),
    Feature.ROPE: ("rope_indices", "`get_rope_index` of vision-language models breaks the graph"),
    Feature.CTC: ("ctc_losses", "`F.ctc_loss` with lengths in tensors breaks the graph"),
    Feature.STRIDES: ("strides_in_backward", "`.stride()` in the backward of a function may break the graph"),
    Feature.RANDOM: ("random_numbers", "`if random.uniform(0, 1) < rate:` breaks the graph, also at rate 0"),
    Feature.WARNINGS: ("shown_once", "`warnings.warn(...)` breaks the graph"),
    Feature.BUFFERS: ("unmoved_buffers", "`self.buffer = self.buffer.to(x.device)` breaks the graph"),
    Feature.SCALARS: ("scalar_indices", "tuples of integer tensors in an index fail"),
    Feature.OPERANDS: ("repeated_operands", "one tensor for two operands of an autograd function breaks the graph"),
    Feature.PLANS: ("block_plans", "BigBird's random blocks, drawn from a constant seed, break the graph"),
    Feature.SPECULATION: ("speculation_handlers", "loops that skip experts without tokens break the graph"),
    Feature.NUMPY: ("numpy_counts", "loops over counts that went through NumPy break the graph"),
    Feature.LISTS: ("grown_lists", "lists that grow only for experts with tokens break the graph"),
    Feature.INDICES: ("index_lists", "an expert's tokens as a list of indices break the graph"),
    Feature.HOOKS: ("repeated_hooks", "a model whose checkpointing is switched off and on compiles again each time"),
}

# The trace of the frame that this thread traces for this package's backend; None while it traces none.
current: ContextVar[Trace | None] = ContextVar("fxpasses_trace", default=None)

Place = tuple[Any, Any]  # an object, a list or a dict, and a name, an index or a key
Proceed = Callable[..., Any]  # calls the next handler, or Dynamo's own method
resolve = functools.cache(find)


@dataclass(frozen=True)
class Site:
    """What a handler replaces. places: finds it; raises if this torch lacks it."""

    name: str
    places: Callable[[], Iterable[Place]]


def method(owner: str, *names: str) -> Site:
    """A method of a class, or a function of a module. names: its names in various versions of torch, newest first."""

    def places() -> Iterator[Place]:
        found = resolve(owner)
        yield found, next((name for name in names if hasattr(found, name)), names[0])

    return Site(f"{owner}.{names[0]}", places)


def opcodes(name: str, *parts: str) -> Site:
    """An instruction of Python's bytecode, or all whose names contain one of `parts`, in all dispatch tables."""
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
    """checked: the versions of torch that it was tried on. order: among the site's handlers.

    without: the effect of its absence; "" if its feature must be off then. elsewhere: whether it may run on other
    versions as well; not where a proof needs that Dynamo does something in no other way than through the sites.
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

    missing: the missing name and the effect of its absence, or "", also where the handler is not for this torch.
    """

    feature: Feature
    handler: Handler
    places: tuple[Place, ...] = ()
    missing: str = ""


def table() -> list[Row]:
    return [_row(feature, handler) for feature in FEATURES for handler in _handlers_of(feature)]


def off_in(rows: Iterable[Row]) -> frozenset[Feature]:
    """The features that must be off, because they lack a necessary handler."""
    lost = {row.feature for row in rows if not row.places and not row.handler.without}
    return frozenset(feature for feature in Feature if any(feature.needs(other) for other in lost))


def _handlers_of(feature: Feature) -> list[Handler]:
    module = f"fxpasses.capture.{FEATURES[feature][0]}"
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
            _get(*place)
        return Row(feature, handler, places)
    except Exception:  # an unknown torch may have anything there
        consequence = handler.without or FEATURES[feature][1]
        return Row(feature, handler, missing=f"{MissingName(handler.site.name)}: {consequence}")


class Installation:
    """The dispatchers installed in Dynamo, and the number of traces that need them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo: list[Callable[[], None]] = []
        self._off: frozenset[Feature] = frozenset()

    def enter(self) -> frozenset[Feature]:
        """Install the handlers if they are not; returns the features that must be off."""
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
    """Replace the value at a place; returns a function that restores it."""
    if isinstance(owner, (list, dict)):
        before, owner[name] = owner[name], value
        return functools.partial(owner.__setitem__, name, before)
    before = vars(owner).get(name)  # None if inherited
    setattr(owner, name, value)
    return (lambda: delattr(owner, name)) if before is None else (lambda: setattr(owner, name, before))
