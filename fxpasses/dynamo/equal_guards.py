"""What a trace has asked of a module, by the guards on it, and whether another module would have answered alike.

While Dynamo traces `layers[0]`, it guards whatever it reads: the types of its modules, constants, which attributes are
missing, that it has no hooks. Each guard names its *source*, an expression:

    TYPE_MATCH      L['self'].layers[0].norm                      EQUALS_MATCH   L['self'].layers[0].attn.heads

With `layers[1]` in place of `layers[0]`, the same guards say what its trace would read. If every one of them holds the
same of both, their traces are the same, up to the tensors that they own; and those guards are to be added for it.

A kind of guard that is not in the table below is not known: such a module is traced.

Private names, checked on torch 2.11, 2.13 and 2.15: of `Guard`, `originating_source`, `create_fn` and
`create_fn_name()`; of `Source`, `get_value` and, of chained ones, the field `base`; the names of guards, and the
keywords in the `functools.partial` of some.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.source import TypeSource
from torch._guards import Source

from fxpasses.dynamo.dynamo_names import guard_names


class Relocation:
    """Takes sources under one module to the same place under another; other sources stay."""

    def __init__(self, old: Any, new: Any) -> None:
        self._found: dict[Any, Any] = {old: new}
        inner = getattr(old, "base", None)
        if inner is not None and inner.name == old.name:  # a source that says only that this is a module
            self._found[inner] = getattr(new, "base", new)

    def __call__(self, source: Any) -> Any:
        if not isinstance(source, Source):
            return source
        if source not in self._found:
            base, moved = getattr(source, "base", None), source
            if self(base) != base:
                moved = dataclasses.replace(source, **{"base": self(base)})
            self._found[source] = moved
        return self._found[source]

    def moves(self, source: Any) -> bool:
        return bool(self(source) != source)

    def is_mentioned(self, source: Any) -> bool:
        """Whether the module is elsewhere in a source than where it begins, as in `TABLE[self]`."""
        others: list[Any] = []
        for each in _chain(source):
            kind: Any = type(each)
            others += [getattr(each, name) for name in _others(kind)]
        return any(self.moves(other) or self.is_mentioned(other) for other in others if isinstance(other, Source))


def _chain(source: Any) -> Iterator[Any]:
    """A source, and those that it is chained to."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)


@functools.cache
def _others(kind: Any) -> tuple[str, ...]:
    """The fields of a kind of source that may hold further sources."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return tuple(field.name for field in fields if field.init and field.name not in ("base", "member"))


class Reader:
    """Evaluates sources in a frame, each once."""

    def __init__(self, f_locals: Mapping[str, Any], f_globals: Mapping[str, Any]) -> None:
        self._globals = {**guard_names(), "G": f_globals, "L": f_locals}
        self._cache: dict[Any, Any] = {}

    def __call__(self, source: Any) -> Any:
        """Raises what Python raises where there is no such value."""
        return source.get_value(self._globals, {}, self._cache)


def reader_of(output: Any) -> Reader:
    """A reader of the frame that Dynamo's `OutputGraph` is of."""
    return Reader(output.root_tx.f_locals, output.root_tx.f_globals)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A guard on a module that was traced: its kind, its source, and Dynamo's object."""

    kind: str
    source: Any
    guard: Any

    @property
    def named(self) -> Mapping[str, Any]:
        """The keywords of the function that installs it, such as the name of an attribute."""
        create = self.guard.create_fn
        return create.keywords if isinstance(create, functools.partial) else {}

    def moved(self, move: Relocation) -> Any:
        """The same guard on the other module."""
        create = self.guard.create_fn
        if any(isinstance(value, Source) for value in self.named.values()):
            create = functools.partial(create.func, **{name: move(value) for name, value in self.named.items()})
        found = move(self.source).make_guard(create)
        found.stack, found.user_stack = self.guard.stack, self.guard.user_stack
        return found


def content_of(guard: Any) -> Any:
    """What a guard says, and of what. Dynamo may add a guard again each time that it asks, with an equal content."""
    create: Any = guard.create_fn
    if isinstance(create, functools.partial):
        create = create.func, create.args, tuple(sorted(create.keywords.items()))
    return create, guard.originating_source


def asked_of(guards: Iterable[Any], move: Relocation) -> list[Asked] | None:
    """The guards on what a module owns, those on its tensors included; None if a kind is not known."""
    found = []
    for guard in guards:
        source = guard.originating_source
        if move.is_mentioned(source):
            return None
        if move.moves(source) and not is_of_class(source):
            asked = Asked(guard.create_fn_name(), source, guard)
            if asked.kind not in _SAME or getattr(guard.create_fn, "args", None):
                return None
            found.append(asked)
    return found


def is_of_class(source: Any) -> bool:
    """Whether a source leads through the type of an object, which objects of one type have in common."""
    return any(isinstance(each, TypeSource) for each in _chain(source))


def are_equal(
    asked: Iterable[Asked], shared: Iterable[Any], changed: Collection[int], move: Relocation, read: Reader
) -> bool:
    """Whether each guard holds of the one module as of the other, and they have the objects of `shared` in common.

    changed: identities of objects that the trace has changed, which are not as they are read.
    """
    others: dict[int, int] = {}  # identities of the other module's objects, by those of the one's
    try:
        for guard in asked:
            old, new = read(guard.source), read(move(guard.source))
            if id(old) in changed or id(new) in changed or not _SAME[guard.kind](guard, old, new, move, read):
                return False
            if not _have_one_shape(old, new):
                return False
            if not isinstance(old, _VALUES) and others.setdefault(id(old), id(new)) != id(new):
                return False
        if len(set(others.values())) < len(others):
            return False
        return all(read(source) is read(move(source)) for source in shared)
    except (AttributeError, IndexError, KeyError, TypeError):
        return False


_VALUES = (bool, int, float, complex, str, bytes, tuple, type(None), type, torch.dtype, torch.device)


def _have_one_shape(old: Any, new: Any) -> bool:
    """Whether two objects cannot be told apart by their attributes' names, or containers by their length, keys and
    constants: some reads leave no guard."""
    if getattr(old, "__dict__", {}).keys() != getattr(new, "__dict__", {}).keys() and not isinstance(old, torch.Tensor):
        return False
    if isinstance(old, dict):
        return isinstance(new, dict) and is_same_constant([*map(_key, old)], [*map(_key, new)])
    if type(old) in (list, tuple, set, frozenset, deque):
        return (
            type(new) is type(old)
            and len(old) == len(new)
            and (type(old) in (set, frozenset) or all(map(_have_one_kind, old, new)))
        )
    return True


def _key(key: Any) -> Any:
    return key if isinstance(key, _VALUES) else id(key)


def _have_one_kind(old: Any, new: Any) -> bool:
    return is_same_constant(old, new) if isinstance(old, _CONSTANTS) else type(old) is type(new)


_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))


def _identical(guard: Asked, old: Any, new: Any, move: Relocation, read: Reader) -> bool:
    return old is new


def _of_one_type(guard: Asked, old: Any, new: Any, move: Relocation, read: Reader) -> bool:
    return type(old) is type(new)


def _constants(guard: Asked, old: Any, new: Any, move: Relocation, read: Reader) -> bool:
    return is_same_constant(old, new)


def is_same_constant(old: Any, new: Any) -> bool:
    """Whether two constants cannot be told apart: 1, True and 1.0 can."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if type(old) in (tuple, list, torch.Size):
        return len(old) == len(new) and all(map(is_same_constant, old, new))
    if type(old) in (int, float, complex, bool, str, bytes):
        return repr(old) == repr(new)
    return False


def _lengths(guard: Asked, old: Any, new: Any, move: Relocation, read: Reader) -> bool:
    return type(old) is type(new) and len(old) == len(new)


def _keys(guard: Asked, old: Any, new: Any, move: Relocation, read: Reader) -> bool:
    return type(old) is type(new) and is_same_constant(list(old), list(new))


def _has_key(guard: Asked, old: Any, new: Any, move: Relocation, read: Reader) -> bool:
    keys = [value for value in guard.named.values() if not isinstance(value, bool)]
    return all((key in old) is (key in new) for key in keys) and set(guard.named) <= {"key", "invert"}


def _has_attribute(guard: Asked, old: Any, new: Any, move: Relocation, read: Reader) -> bool:
    return set(guard.named) == {"attr"} and hasattr(old, guard.named["attr"]) is hasattr(new, guard.named["attr"])


def _in_dict(guard: Asked, old: Any, new: Any, move: Relocation, read: Reader) -> bool:
    name = guard.named["attr"]
    return set(guard.named) == {"attr"} and (name in vars(old)) is (name in vars(new))


def _no_hooks(guard: Asked, old: Any, new: Any, move: Relocation, read: Reader) -> bool:
    return not old and not new


def _duplicates(guard: Asked, old: Any, new: Any, move: Relocation, read: Reader) -> bool:
    """The other module's object has to be that object as well which the first one's is."""
    return set(guard.named) == {"source_b"} and new is read(move(guard.named["source_b"]))


def _tensors(guard: Asked, old: Any, new: Any, move: Relocation, read: Reader) -> bool:
    return type(old) is type(new) and _state(old) == _state(new)


def storage_size(tensor: Any) -> Any:
    """In bytes; of some tensors that have no storage, None."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return None


def _state(tensor: Any) -> Any:
    """What a trace may ask of a tensor, besides its values."""
    marks = {name: repr(value) for name, value in vars(tensor).items() if name not in _NOTES}
    kinds = getattr(tensor, "_is_param", None), getattr(tensor, "_is_buffer", None)
    strides = (tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()
    flags = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
    state = tensor.shape, strides, tensor.dtype, tensor.device, tensor.layout, flags, tensor._is_view()
    return state, tensor.grad is None, str(torch._C._dispatch_keys(tensor)), marks, kinds, storage_size(tensor)


_NOTES = frozenset({"_dynamo_static_input_type"})  # which Dynamo leaves on what it has traced
TENSORS = frozenset({"TENSOR_MATCH"})
_SAME: Mapping[str, Callable[..., bool]] = {
    "TYPE_MATCH": _of_one_type,
    "TENSOR_MATCH": _tensors,
    "DUPLICATE_INPUT": _duplicates,
    "EMPTY_NN_MODULE_HOOKS_DICT": _no_hooks,
    "NOT_PRESENT_IN_GENERIC_DICT": _in_dict,
    "HASATTR": _has_attribute,
    **dict.fromkeys(("DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"), _has_key),
    **dict.fromkeys(("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"), _keys),
    **dict.fromkeys(("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH"), _constants),
    **dict.fromkeys(("SEQUENCE_LENGTH",), _lengths),
    **dict.fromkeys(
        ("ID_MATCH", "CLASS_MATCH", "FUNCTION_MATCH", "MODULE_MATCH", "CLOSURE_MATCH", "BUILTIN_MATCH"), _identical
    ),
}
