"""One reading of an operator call, however the program spells it.

    x == 3            torch.eq(x, 3)             x.__eq__(3)          eq, of input and other
    x.sum(-1)         torch.sum(x, dim=-1)       x.sum(axis=-1)       sum, of input and dim
    x += y            operator.iadd(x, y)        x.add_(y)            add_, of input and other

Names are ATen's, without the overload; parameters have the names of PyTorch's documentation. A function that belongs
neither to PyTorch nor to Python has a qualified name, `einops.rearrange`, so that no rule for PyTorch's operators
applies to it; so does an operator of another library, `fxpasses::gather_rows`.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

_CALLS = ("call_function", "call_method")
# Modules whose functions are known to act only through ATen operators, or only on Python numbers.
_ROOTS = ("torch", "_operator", "operator", "math", "builtins")
_SYNONYMS = {
    "absolute": "abs", "and": "bitwise_and", "and_": "bitwise_and", "clip": "clamp", "concat": "cat",
    "concatenate": "cat", "divide": "div", "floordiv": "floor_divide", "greater": "gt", "greater_equal": "ge",
    "inv": "bitwise_not", "invert": "bitwise_not", "less": "lt", "less_equal": "le", "lshift": "bitwise_left_shift",
    "mod": "remainder", "multiply": "mul", "negative": "neg", "nelement": "numel", "not_equal": "ne",
    "or": "bitwise_or", "or_": "bitwise_or", "rshift": "bitwise_right_shift", "split_with_sizes": "split",
    "subtract": "sub", "swapaxes": "transpose", "swapdims": "transpose", "true_divide": "div", "truediv": "div",
    "xor": "bitwise_xor",
}  # fmt: skip
# `x += y`, where `operator.iadd` returns x itself.
_AUGMENTED = frozenset(
    {"add", "and", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor"}
)
_PARAMETERS = {
    "a": "input", "axis": "dim", "axis0": "dim0", "axis1": "dim1", "b": "other", "keepdims": "keepdim",
    "mat2": "other", "self": "input", "split_size_or_sections": "split_size", "split_sizes": "split_size",
    "tensor": "input", "x": "input", "x2": "other",
}  # fmt: skip


def operator_of(node: Node) -> str:
    """The canonical name of a node's operator; "" for inputs, modules and the output."""
    return _name(node.target) if node.op in _CALLS else ""


def swaps_last_dimensions(node: Node) -> bool:
    """Whether a node is `x.mT`: an attribute, or an operator from torch 2.15 on."""
    return operator_of(node) == "mT" or (operator_of(node) == "getattr" and node.args[1:] == ("mT",))


@dataclass(frozen=True)
class OperatorCall:
    """An operator and its arguments: nodes, or their representatives elsewhere, such as `Ref` or `Template`."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, node: Node) -> OperatorCall:
        return cls(node.target, node.args, node.kwargs)

    @property
    def name(self) -> str:
        return _name(self.target)

    def argument(self, parameter: str, default: Any = None) -> Any:
        """The argument of a parameter, given by position or by name.

        Overloads are not resolved by the types of arguments: the 1 of `x.max(1)` is both `dim` and `other`.
        """
        for name, value in self.kwargs.items():
            if _PARAMETERS.get(name, name) == parameter:
                return value
        place = self._place(parameter)
        return default if place is None else self.args[place]

    def sequence(self, parameter: str) -> tuple[Any, ...]:
        """The numbers of a parameter such as `size`, passed as one sequence or one by one: `x.view(2, 3)`."""
        found = self.argument(parameter, ())
        if isinstance(found, (tuple, list)):
            return tuple(found)
        place = self._place(parameter)
        return (found,) if place is None else tuple(self.args[place:])

    def has_only(self, *parameters: str) -> bool:
        """Whether no other arguments are passed."""
        given = {_PARAMETERS.get(name, name) for name in self.kwargs}
        fitting = (s for s in _signatures(self.target) if s.takes(len(self.args), self.kwargs))
        return any(given.union(signature.places[: len(self.args)]) <= set(parameters) for signature in fitting)

    def _place(self, parameter: str) -> int | None:
        """The position of a parameter, if its argument is positional."""
        signatures = _signatures(self.target)
        if not any(parameter in signature.places for signature in signatures):
            return None
        fitting = [signature for signature in signatures if signature.takes(len(self.args), self.kwargs)]
        places = (s.places.index(parameter) for s in fitting or signatures if parameter in s.places)
        return next((place for place in places if place < len(self.args)), None)


def argument(node: Node, parameter: str, default: Any = None) -> Any:
    """See `OperatorCall.argument`."""
    return OperatorCall.of(node).argument(parameter, default)


def is_in_place(name: str) -> bool:
    """Whether a function or method of this name, such as `add_`, `iadd` or `setitem`, writes to its first operand."""
    name = _canonical(name)
    return name == "setitem" or (name.endswith("_") and not name.endswith("__"))


@functools.lru_cache(maxsize=4096)
def _name(target: Any) -> str:
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = target._overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        namespace, _, name = packet._qualified_op_name.partition("::")
        return _canonical(name) if namespace in ("aten", "prims") else packet._qualified_op_name
    if isinstance(target, str):
        return _canonical(target)
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", None) or ""
    if module.partition(".")[0] in _ROOTS or getattr(torch, name, None) is target:
        return _canonical(name)
    return f"{module}.{getattr(target, '__qualname__', name)}"


def _canonical(name: str) -> str:
    plain = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    if plain != name and not (hasattr(operator, plain) or hasattr(operator, plain + "_")):
        return name  # `__rand__` is not `rand`
    if plain[:1] == "i" and plain[1:] in _AUGMENTED:
        return _SYNONYMS.get(plain[1:], plain[1:]) + "_"
    if plain.endswith("_") and plain[:-1] in _SYNONYMS and plain not in _SYNONYMS:
        return _SYNONYMS[plain[:-1]] + "_"
    return _SYNONYMS.get(plain, plain)


@dataclass(frozen=True)
class _Signature:
    """The parameters of one overload: the positional ones in order, and all."""

    places: tuple[str, ...]
    names: frozenset[str]

    @classmethod
    def of(cls, places: Iterable[str], others: Iterable[str] = ()) -> _Signature:
        found = tuple(_PARAMETERS.get(name, name) for name in places)
        return cls(found, frozenset(found).union(others))

    def takes(self, count: int, kwargs: Iterable[str]) -> bool:
        return count <= len(self.places) and all(_PARAMETERS.get(name, name) in self.names for name in kwargs)


@functools.lru_cache(maxsize=4096)
def _signatures(target: Any) -> tuple[_Signature, ...]:
    """One signature for each overload; () if none is known."""
    function = getattr(torch.Tensor, target, None) if isinstance(target, str) else target
    if inspect.isfunction(function):
        parameters = inspect.signature(function).parameters.values()
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            places = (p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
            return (_Signature.of(places, (p.name for p in parameters)),)
    packet = getattr(target, "_overloadpacket", target)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        packet = getattr(torch.ops.aten, _name(target), None)
    if packet is not None:
        overloads = [getattr(packet, name)._schema.arguments for name in packet.overloads()]
        return tuple(
            _Signature.of((a.name for a in all_ if not a.kwarg_only), (a.name for a in all_)) for all_ in overloads
        )
    try:
        return (_Signature.of(inspect.signature(function).parameters),) if callable(function) else ()
    except (TypeError, ValueError):  # written in C
        return ()
