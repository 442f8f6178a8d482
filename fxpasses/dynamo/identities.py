"""Where a traced program asks which object something is: `a is b`, `a == b`, `a in c`, `d[a]`, `hash(a)`, `id(a)`.

Dynamo guards the answer "yes", as one object under two sources, and not the answer "no". So a trace that has asked says
nothing of other objects of the same kind, although all its guards hold of them. The same goes for all attributes of an
object at a time, `vars(a)` and `a.__dict__`, which Dynamo reads without a guard.

Private names, checked on torch 2.11, 2.13 and 2.15: those of the sites, and Dynamo's variables.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.variables import LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from fxpasses.dynamo.interceptions import Place, Site, method, opcodes, resolve

COMPARISONS = tuple(map(opcodes, ("IS_OP", "COMPARE_OP", "CONTAINS_OP")))
BUILTINS = method("torch._dynamo.variables.builtin.BuiltinVariable", "call_function")
# Functions that compare their two arguments, that look for the second in the first, and that ask about one.
_COMPARE = (operator.is_, operator.is_not, operator.eq, operator.ne)
_FIND, _ASK = (operator.contains, operator.indexOf, operator.countOf), (id, hash, vars, dir)
_KEYS = "torch._dynamo.variables.hashable.HashableTracker", "torch._dynamo.variables.dicts.ConstDictVariable"

_COMPARES = ("torch._dynamo.variables.object_protocol", "vt_identity_compare"), ("torch._dynamo.utils", "iter_contains")
_IMPORTERS = ("torch._dynamo.variables.builtin", "torch._dynamo.variables.lists", "torch._dynamo.variables.iter")


def _keys() -> Iterator[Place]:
    """The class of Dynamo's keys of dicts and sets, in various versions of torch."""
    try:
        yield resolve(_KEYS[0]), "__init__"
    except Exception:
        yield resolve(_KEYS[1])._HashableTracker, "__init__"


def _items() -> Iterator[Place]:
    """The function by which Dynamo compares what is in a list, in various versions of torch."""
    for owner, name in _COMPARES:
        try:
            found = resolve(owner)
        except Exception:
            continue
        if hasattr(found, name):
            yield from method(owner, name, imported_by=_IMPORTERS).places()
            return


KEYS = Site(f"{_KEYS[0]}.__init__", _keys)
ITEMS = Site(f"{_COMPARES[0][0]}.{_COMPARES[0][1]}", _items)

_VALUES = (bool, int, float, complex, str, bytes, type(None), type, types.FunctionType, types.BuiltinFunctionType,
           torch.dtype, torch.device, torch.layout, torch.Size)  # fmt: skip


def is_asked_by(opname: str, stack: Sequence[Any]) -> bool:
    """Whether an instruction of `COMPARISONS` asks which object something is."""
    return all(map(is_object, stack[-2:-1] if opname.startswith("CONTAINS") else stack[-2:]))


def is_asked_in(function: Any, arguments: Sequence[Any]) -> bool:
    """Whether a call of a builtin does."""
    if function in _COMPARE:
        return all(map(is_object, arguments))
    if function is getattr and len(arguments) > 1:
        return arguments[1].is_python_constant() and arguments[1].as_python_constant() == "__dict__"
    return any(map(is_object, arguments[1:] if function in _FIND else arguments if function in _ASK else ()))


def is_asked_of(one: Any, other: Any) -> bool:
    """Whether a comparison of two variables does, or of a variable with the items of a list."""
    return is_object(other) and (not hasattr(one, "source") or is_object(one))


def is_object(variable: Any) -> bool:
    """Tensors that the program computes are told apart by the graph; constants, functions and classes by guards."""
    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized():
            return not isinstance(variable.original_value(), _VALUES)
        variable = variable.unwrap()
    if isinstance(variable, TensorVariable):
        return variable.source is not None
    if isinstance(variable, SymNodeVariable):
        return False
    if isinstance(variable, BaseListVariable) and variable.source is None:
        return any(map(is_object, variable.items)) or bool(variable.is_mutable())
    try:
        return not variable.is_python_constant()
    except Exception:  # what it raises for others depends on the version
        return True
