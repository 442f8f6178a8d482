"""Which traces have read the order of a set.

It depends on the process: that of texts on `PYTHONHASHSEED`, that of objects on their addresses. A set that the program
makes of a list has the list's order while Dynamo traces it, and that is the same everywhere: `set(config.layer_types)`.

Private names, checked on torch 2.13 and 2.15: of `SetVariable`, `items`, `source`, and the methods that are patched
below; `vt` of what wraps its elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fxpasses.base.patching import Patch
from fxpasses.restart.dynamo_state import set_variable


class SetOrders:
    """are_read: whether a trace has read the order of a set. of_objects: whether that set has elements that are hashed
    by their identity."""

    def __init__(self) -> None:
        self.are_read = self.of_objects = False
        self._of_lists: list[tuple[Any, list[Any]]] = []  # sets that were made of lists, with their elements

    def read(self, found: Any) -> None:
        elements = [*found.items]
        if not any(each is found and elements == were for each, were in self._of_lists):
            self.are_read = True
            self.of_objects |= not all(map(_is_hashed_by_value, elements))

    def made_of_list(self, made: Any) -> None:
        self._of_lists.append((made, [*made.items]))


@contextmanager
def noticing() -> Iterator[SetOrders]:
    """Inside, what traces read of sets is noted."""
    found = SetOrders()
    token = _current.set(found)
    try:
        with _noticing():
            yield found
    finally:
        _current.reset(token)


_current: ContextVar[SetOrders | None] = ContextVar("set_orders", default=None)
_ORDERED = ("OrderedSetVariable", "DictKeySetVariable")  # the same order in each process
_LISTS = ("ListVariable", "TupleVariable")


def _is_hashed_by_value(element: Any) -> bool:
    """element: Dynamo's variable of a set's element, or what wraps it."""
    variable = getattr(element, "vt", element)
    return variable.is_python_constant() and type(variable.as_python_constant()) in (bool, bytes, float, int, str)


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


_noticing = Patch(
    "noticing which traces read the order of sets",
    lambda: set_variable(),
    tp_iter_impl=_reading,
    unpack_var_sequence=_reading,
    call_method=_making,
)
