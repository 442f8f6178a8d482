"""Which traces depend on how objects are hashed, which each process does in its own way.

    for name in {"a", "b"}: ...      the order of texts in a set: as PYTHONHASHSEED says
    for layer in {f, g}: ...         that of objects: by their addresses
    if f in {g: 1}: ...              whether two objects are one, of which Dynamo guards the set's alone
    id(f), hash("a"), hash(f)        numbers of the process

A set that the program makes of a list has the list's order while Dynamo traces it, and that is the same everywhere:
`set(config.layer_types)`.

Private names, checked on torch 2.13 and 2.15: of `SetVariable`, `items`, `source`, and the methods that are patched
below; `ConstDictVariable.__contains__`; `BuiltinVariable.call_id` and `call_hash`; `vt` of what wraps elements.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fxpasses.base.patching import Patch
from fxpasses.restart.dynamo_state import set_variable
from fxpasses.restart.facts import is_constant, is_found_by_name
from fxpasses.restart.program import is_versioned, is_versioned_file


class Hashes:
    """What a trace has asked. of_texts: whether for the order, or the numbers, of texts; refusal: why no other process
    may have the trace, or ""."""

    def __init__(self) -> None:
        self.of_texts, self.refusal = False, ""
        self._of_lists: list[tuple[Any, list[Any]]] = []  # sets that were made of lists, with their elements

    def read(self, found: Any) -> None:
        """A set's order."""
        elements = [*found.items]
        if not any(each is found and elements == were for each, were in self._of_lists):
            self.of_texts = True
            if not all(map(_is_constant, elements)):
                self.refusal = "it reads the order of a set of objects, which each process has another"

    def made_of_list(self, made: Any) -> None:
        self._of_lists.append((made, [*made.items]))

    def looked_for(self, element: Any) -> None:
        """An element, in a set or among the keys of a dict."""
        if not _is_constant(element):
            self.refusal = "it looks for an object, which is hashed by its identity, in a set or a dict"

    def hashed(self, element: Any) -> None:
        self.of_texts = True
        if not _is_constant(element):
            self.refusal = "it reads the hash of an object"


def _is_constant(element: Any) -> bool:
    """element: Dynamo's variable of an element, or what wraps it."""
    variable = getattr(element, "vt", element)
    if type(variable).__name__ == _NUMBER_OF_OBJECT:
        return True
    if not variable.is_python_constant():
        return False
    value = variable.as_python_constant()
    return is_constant(value) or (
        isinstance(value, type) and (is_versioned(value.__module__) or is_found_by_name(value))
    )


@contextmanager
def noticing() -> Iterator[Hashes]:
    """Inside, what traces ask is noted."""
    found = Hashes()
    token = _current.set(found)
    try:
        with _of_sets(), _of_dicts(), _of_functions():
            yield found
    finally:
        _current.reset(token)


_current: ContextVar[Hashes | None] = ContextVar("hashes", default=None)
_ORDERED = ("OrderedSetVariable", "DictKeySetVariable")  # the same order in each process
_NUMBER_OF_OBJECT = "FakeIdVariable"  # that of an object that the trace has made, which can only be a key
_LISTS = ("ListVariable", "TupleVariable")


def _reading(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        current = _current.get()
        if current is not None and type(self).__name__ not in _ORDERED:
            current.read(self)
        return method(self, *args, **kwargs)

    return call


def _making(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        is_new = name == "update" and not self.items and self.source is None and len(args) == 1
        result = method(self, tx, name, args, kwargs)
        current = _current.get()
        if current is not None and is_new and type(args[0].realize()).__name__ in _LISTS:
            current.made_of_list(self)
        return result

    return call


def _asking(note: Callable[[Hashes, Any], None]) -> Callable[..., Any]:
    """note: is given the last argument."""

    def patched(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any) -> Any:
            current = _current.get()
            if current is not None and args:
                note(current, args[-1])
            return method(self, *args)

        return call

    return patched


def _identifying(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, tx: Any, *args: Any) -> Any:
        result, current = method(self, tx, *args), _current.get()
        is_key = type(result).__name__ == _NUMBER_OF_OBJECT or is_versioned_file(tx.f_code.co_filename)
        if current is not None and not is_key:  # PyTorch's own code computes nothing with it
            current.refusal = "it reads the identity of an object as a number"
        return result

    return call


_WHAT = "noticing which traces depend on hashes"
_of_sets = Patch(
    _WHAT,
    lambda: set_variable(),
    tp_iter_impl=_reading,
    unpack_var_sequence=_reading,
    call_method=_making,
    __contains__=_asking(Hashes.looked_for),
)
_of_dicts = Patch(
    _WHAT,
    lambda: importlib.import_module("torch._dynamo.variables.dicts").ConstDictVariable,
    __contains__=_asking(Hashes.looked_for),
)
_of_functions = Patch(
    _WHAT,
    lambda: importlib.import_module("torch._dynamo.variables.builtin").BuiltinVariable,
    call_id=_identifying,
    call_hash=_asking(Hashes.hashed),
)
