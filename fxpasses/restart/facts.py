"""What guards say of a frame, in terms that another process can compare: names, numbers and digests of code.

Dynamo's guards compare objects by identity (`id(self.config) == 140...`) and constants with what they were. A saved
guard is made anew, from the frame at hand. It then says the same as the saved one if the *fact* that it states is the
same: for a constant the constant, for a function its name and its code, for a tensor all but its sizes, which a guard
takes from the trace.

A kind of guard that is not in the table below is not known: such a trace is not saved.
"""

from __future__ import annotations

import contextlib
import copyreg
import enum
import functools
import hashlib
import inspect
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from fxpasses.dynamo.equal_guards import Reader
from fxpasses.restart.pickling import CannotPickle


def fact_of(guard: Any, names: Names) -> Any:
    """What a guard states in the frame that `names` is of, as plain data.

    Raises `CannotPickle` for a guard that no other process can state, and what Python raises where the frame has no
    such value.
    """
    kind = guard.create_fn_name()
    if kind in _ABOUT_PROCESS:
        return None
    if kind not in _FACTS:
        raise CannotPickle(f"a guard of the kind {kind} is not known")
    create = guard.create_fn
    named = create.keywords if isinstance(create, functools.partial) else {}
    if getattr(create, "args", None) or not named.keys() <= _OPERANDS:
        raise CannotPickle(f"a guard of the kind {kind} has other operands: {create}")
    return _FACTS[kind](names.read(guard.originating_source), named, names)


_OPERANDS = frozenset(("attr", "invert", "key", "recompile_hint", "source_b", "value"))


def installing(guard: Any) -> Any:
    """The function that installs a guard; that of a tensor's reads the tensor in the frame that it is made for."""
    create = guard.create_fn
    if isinstance(create, functools.partial) and "value" in create.keywords:
        return functools.partial(create.func, **{key: each for key, each in create.keywords.items() if key != "value"})
    return create


# Guards that take what they state from what is saved, or are checked when they are made (`restoring.py`).
_ABOUT_PROCESS = frozenset(
    ("AUTOGRAD_SAVED_TENSORS_HOOKS", "DEFAULT_DEVICE", "DETERMINISTIC_ALGORITHMS", "FSDP_TRAINING_STATE",
     "FUNCTORCH_STACK_MATCH", "GLOBAL_STATE", "GRAD_MODE", "SHAPE_ENV", "TORCH_FUNCTION_STATE")
)  # fmt: skip


class Names:
    """Names what guards compare by identity in the frame that `read` reads: modules by numbers, so that facts tell
    which guards are about one module, and types by what they are, since several may have one name."""

    def __init__(self, read: Reader) -> None:
        self.read = read
        self.digest: Callable[[type], str] = functools.cache(class_digest)
        self._numbers: dict[int, int] = {}
        self._named = 0

    def kind(self, value: Any) -> Any:
        return *self._type(type(value)), self.digest(type(value))

    def _type(self, kind: type) -> tuple[str, int]:
        """Several types may have one name: the number tells which guards are about one."""
        return type_name(kind), self._number(kind) if kind.__flags__ & OF_PYTHON else 0

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(id(value), len(self._numbers))

    def __call__(self, value: Any, depth: int = 0) -> Any:
        """Raises `CannotPickle` for an object that has no name, or holds very many others."""
        self._named += 1
        if self._named > _MOST_NAMED:
            raise CannotPickle(f"its guards compare more than {_MOST_NAMED} objects by identity")
        if isinstance(value, (*_CONSTANTS, *_NAMED_BY_TEXT)):
            return constant(value)
        if value is Ellipsis or value is NotImplemented:  # an object of the program may have an `__eq__` of its own
            return "constant", repr(value)
        if isinstance(value, torch.nn.Module):
            return "module", type_name(type(value)), self._number(value)
        if isinstance(value, type):
            return "type", *self._type(value)
        if isinstance(value, types.ModuleType):
            return "file", value.__name__
        if isinstance(value, types.CodeType):
            return "code", digest_of(value)
        if depth > _DEEPEST:
            raise CannotPickle(f"a guard compares {value!r} by identity")
        if is_found_by_name(value):
            return "function", value.__module__, value.__qualname__, function_digest(value)
        if isinstance(value, types.FunctionType):
            held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *_cells(value)]
            inside = [self(each, depth + 1) for each in held]
            return "function", value.__module__, value.__qualname__, digest_of(value.__code__), inside
        if isinstance(value, types.MethodType):
            return "method", self(value.__func__, depth + 1), self(value.__self__, depth + 1)
        if isinstance(value, functools._lru_cache_wrapper):
            return "cached", self(value.__wrapped__, depth + 1)
        if isinstance(value, functools.partial):
            held = [value.func, *value.args, *value.keywords.values()]
            return "partial", [*value.keywords], [self(each, depth + 1) for each in held]
        if type(value) is inspect.Signature:
            found = value.parameters.values()
            inside = [
                (each.name, each.kind.name, self(each.default, depth + 1), str(each.annotation)) for each in found
            ]
            return "signature", inside, str(value.return_annotation)
        if isinstance(value, (torch._ops.OperatorBase, torch._ops.OpOverloadPacket)):
            return "operator", str(value)
        if isinstance(value, _OF_C):
            of = getattr(value, "__self__", None)
            owner = self(of, depth + 1) if isinstance(of, (type, types.ModuleType)) else type_name(type(of))
            return "builtin", value.__qualname__, str(getattr(value, "__module__", None)), owner
        if type(value) in (set, frozenset):
            return _set(value, lambda each: self(each, depth + 1))
        if type(value) in (range, slice):
            return constant(value)
        if isinstance(value, types.UnionType):
            return "union", [self(each, depth + 1) for each in value.__args__]
        if type(value) in (tuple, list):
            return type(value).__name__, [self(each, depth + 1) for each in value]
        if type(value) is dict:
            return "dict", [(self(key, depth + 1), self(each, depth + 1)) for key, each in value.items()]
        if isinstance(value, types.MappingProxyType):
            return "proxy", self(dict(value), depth + 1)
        if (attributes := attributes_of(value)) is not None:
            return "object", self.kind(value), [(name, self(each, depth + 1)) for name, each in attributes.items()]
        raise CannotPickle(f"a guard compares an object of {type_name(type(value))} by identity")


def attributes_of(value: Any) -> dict[str, Any] | None:
    """All that an object of Python holds; None for one that may hold more, in C."""
    kinds = type(value).__mro__[:-1]
    slots: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    largest = object.__basicsize__ + struct.calcsize("P") * (len(slots) + 2)  # `__dict__`, `__weakref__`
    if not all(kind.__flags__ & OF_PYTHON for kind in kinds) or type(value).__basicsize__ > largest:
        return None
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **held}


OF_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: what C defines does not change


def shared_objects(about: Iterable[tuple[str, Any]]) -> list[list[str]]:
    """The names of the sources of one object, for each object that has several: a trace may have compared them by
    identity, which Dynamo guards only of what is one. about: what is guarded, with its sources.

    Modules and tensors are compared elsewhere, and constants may be one by accident.
    """
    found: dict[int, dict[str, None]] = {}
    for name, value in about:
        if type(value) is not tuple and not isinstance(
            value, (*_CONSTANTS, *_NAMED_BY_TEXT, torch.Tensor, torch.nn.Module)
        ):
            found.setdefault(id(value), {})[name] = None
    return [[*names] for names in found.values() if len(names) > 1]


def is_found_by_name(value: Any) -> bool:
    """Whether a function or a type is what its module calls by its name, so that the module's code says what it is."""
    if not isinstance(value, (types.FunctionType, type)):
        return False
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


_CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_NAMED_BY_TEXT = (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
_OF_C = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    types.MethodWrapperType, types.GetSetDescriptorType,
)  # fmt: skip
_MOST_NAMED = 50_000  # objects in the guards of a frame
_DEEPEST = 4


def is_constant(value: Any) -> bool:
    """Whether a value is hashed and compared by what it is, in each process."""
    if type(value) in (tuple, frozenset):
        return all(map(is_constant, value))
    return isinstance(value, _NAMED_BY_TEXT) or type(value) in _CONSTANTS


def constant(value: Any) -> Any:
    """A constant with its type: 1, True and 1.0 differ. Raises `CannotPickle` for what is none."""
    if isinstance(value, enum.Enum):
        return type_name(type(value)), value.name, repr(value.value)
    if type(value) in _CONSTANTS or isinstance(value, _NAMED_BY_TEXT):
        return type(value).__name__, repr(value)
    if isinstance(value, type):
        return "type", type_name(value)
    if type(value) in (tuple, list, torch.Size):
        return type(value).__name__, [constant(each) for each in value]
    if type(value) in (set, frozenset):
        return _set(value, constant)
    if type(value) in (slice, range):
        return type(value).__name__, [constant(each) for each in (value.start, value.stop, value.step)]
    raise CannotPickle(f"a guard compares a value of {type_name(type(value))}")


def _set(value: Any, named: Callable[[Any], Any]) -> Any:
    """A set in its order, which a trace may have read; without it, if it has elements that are hashed by identity: a
    trace that reads their order is not saved."""
    found = [named(each) for each in value]
    by_value = all(type(each) in (bool, bytes, float, int, str) for each in value)
    return type(value).__name__, found if by_value else sorted(found, key=repr)


def type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.lru_cache(maxsize=4096)
def digest_of(code: types.CodeType) -> str:
    """A digest of what code does; its file and lines do not count."""
    parts = [
        code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags,
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount,
        getattr(code, "co_exceptiontable", b""),
        [digest_of(each) if isinstance(each, types.CodeType) else _text(each) for each in code.co_consts],
    ]  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def function_digest(function: Any, depth: int = 0) -> str:
    """A digest of what a function of Python does: its code, and what its defaults and its closure hold."""
    if not isinstance(function, types.FunctionType):
        return type_name(type(function))
    if getattr(function, "_dynamo_marked_constant", False):
        raise CannotPickle(f"{function.__qualname__} is marked as constant")
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items(), *_cells(function)]
    parts = [digest_of(function.__code__), *(_held(each, depth) for each in held)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _cells(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _held(value: Any, depth: int) -> str:
    if isinstance(value, types.FunctionType) and depth < _DEEPEST:
        return function_digest(value, depth + 1)
    if isinstance(value, functools.partial) and depth < _DEEPEST:
        return repr([_held(each, depth + 1) for each in (value.func, *value.args, *value.keywords.items())])
    if isinstance(value, tuple) and depth < _DEEPEST:
        return repr([_held(each, depth + 1) for each in value])
    if isinstance(value, (set, frozenset)):  # whether a trace has read their order is noticed
        return repr(sorted(_held(each, depth + 1) for each in value))
    try:
        return repr(constant(value))
    except CannotPickle:
        return type_name(type(value))


def class_digest(kind: type) -> str:
    """A digest of the functions and constants of a class as it is now: what traces have read of it may be replaced."""
    parts = [base.__name__ for base in kind.__mro__]
    for name, value in sorted(vars(kind).items()):
        functions = [getattr(value, part, None) for part in ("__func__", "fget", "fset", "func", "__wrapped__")]
        found = [function_digest(each) for each in (value, *functions) if isinstance(each, types.FunctionType)]
        if found or name not in _OF_CLASS:
            parts.append(f"{name} {found or _held(value, 0)}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


_OF_CLASS = frozenset(("__dict__", "__doc__", "__firstlineno__", "__module__", "__static_attributes__", "__weakref__"))


def _text(value: Any) -> str:
    """A set's text depends on the process, which may order its elements differently."""
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _type(value: Any, named: Mapping[str, Any], names: Names) -> Any:
    return names.kind(value)


def _constant(value: Any, named: Mapping[str, Any], names: Names) -> Any:
    return names(value) if isinstance(value, (types.CodeType, set, frozenset, type)) else constant(value)


def _identity(value: Any, named: Mapping[str, Any], names: Names) -> Any:
    return names(value)


def _length(value: Any, named: Mapping[str, Any], names: Names) -> Any:
    return type_name(type(value)), len(value)


def _keys(value: Any, named: Mapping[str, Any], names: Names) -> Any:
    keys = list(dict.keys(value)) if isinstance(value, dict) else list(value.keys())
    return type_name(type(value)), [names(key) for key in keys]


def _contains(value: Any, named: Mapping[str, Any], names: Names) -> Any:
    keys = [key for name, key in named.items() if name == "key"]
    return [(names(key), key in value) for key in keys]


def _has_attribute(value: Any, named: Mapping[str, Any], names: Names) -> Any:
    return named["attr"], hasattr(value, named["attr"])


def _in_dict(value: Any, named: Mapping[str, Any], names: Names) -> Any:
    return named["attr"], named["attr"] in vars(value)


def _no_hooks(value: Any, named: Mapping[str, Any], names: Names) -> Any:
    return len(value)


def _duplicate(value: Any, named: Mapping[str, Any], names: Names) -> Any:
    other = named["source_b"]
    return other.name, value is names.read(other)


def tensor_fact(tensor: Any) -> Any:
    """What a trace may ask of a tensor, besides its values and sizes."""
    marks = sorted((name, repr(value)) for name, value in vars(tensor).items() if name not in _NOTES)
    flags = (
        tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(),
        tensor._is_view(), isinstance(tensor, torch.nn.Parameter),
    )  # fmt: skip
    kind = type_name(type(tensor)), str(tensor.dtype), str(tensor.device), str(tensor.layout), tensor.dim()
    return kind, flags, str(torch._C._dispatch_keys(tensor)), marks


_NOTES = frozenset({"_dynamo_static_input_type"})  # which Dynamo leaves on what it has traced


def _tensor(value: Any, named: Mapping[str, Any], names: Names) -> Any:
    return tensor_fact(value)


_FACTS: Mapping[str, Callable[[Any, Mapping[str, Any], Names], Any]] = {
    "TYPE_MATCH": _type,
    "TENSOR_MATCH": _tensor,
    "DUPLICATE_INPUT": _duplicate,
    "EMPTY_NN_MODULE_HOOKS_DICT": _no_hooks,
    "NOT_PRESENT_IN_GENERIC_DICT": _in_dict,
    "HASATTR": _has_attribute,
    "SEQUENCE_LENGTH": _length,
    **dict.fromkeys(("DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"), _contains),
    **dict.fromkeys(("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"), _keys),
    **dict.fromkeys(("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH"), _constant),
    **dict.fromkeys(
        ("ID_MATCH", "CLASS_MATCH", "FUNCTION_MATCH", "MODULE_MATCH", "CLOSURE_MATCH", "BUILTIN_MATCH"), _identity
    ),
}
