"""The kinds of values that a function of numbers computes (`pure_functions.py`).

A kind is "int", "float", "bool", "str", "none", a `Tensor`, a `View`, `Several` or `Each`. A variable may have
one of several kinds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

Kind = Any
Kinds = frozenset[Kind]
NONE: Kinds = frozenset()
NUMBERS = frozenset({"int", "float", "bool"})
_DEPTH = 4  # of tuples and lists in each other
_CLASSES = {"int": int, "float": float, "bool": bool, "str": str, "none": type(None)}


class NotPure(Exception):
    """A function may do more than compute numbers and slices."""


@dataclass(frozen=True)
class Tensor:
    """An argument. at: its position among the tensors; ndim: how many dimensions it has; holds_integers: as said."""

    at: int
    ndim: int
    holds_integers: bool


@dataclass(frozen=True)
class View:
    """A slice of an argument, of as many dimensions. dims: those of which it may have a part."""

    of: Tensor
    dims: frozenset[int]


@dataclass(frozen=True)
class Several:
    """A tuple, with the kinds of each element. of: its class, which may be `torch.Size`."""

    items: tuple[Kinds, ...]
    of: type = tuple


@dataclass(frozen=True)
class Each:
    """A list, or another iterable, of elements of some kinds. of: its class."""

    items: Kinds
    of: type = list


def kinds_of(value: Any) -> Kinds:
    """The kinds of a constant: a number, a string, None, or tuples and lists of them."""
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return frozenset({Several(tuple(map(kinds_of, value)), type(value))})
    if type(value) is list:
        return frozenset({Each(frozenset().union(*map(kinds_of, value)))})
    if type(value) in (int, float, bool, str):
        return frozenset({type(value).__name__})
    if value is None:
        return frozenset({"none"})
    raise NotPure(f"an argument is a {type(value).__name__}")


def argument_of(kind: Tensor | View) -> Tensor:
    return kind.of if isinstance(kind, View) else kind


def nested(ndim: int) -> Kind:
    """The kind of a list of integers, of lists of them, ..."""
    return Each(frozenset({"int" if ndim == 1 else nested(ndim - 1)}))


def only(found: Kinds, allowed: Iterable[Kind]) -> Kinds:
    if not found <= set(allowed):
        raise NotPure("it gives a builtin something else than numbers")
    return found


def class_of(kind: Kind) -> type:
    if isinstance(kind, str):
        return _CLASSES[kind]
    return kind.of if isinstance(kind, (Each, Several)) else torch.Tensor


def is_plain(kind: Kind) -> bool:
    """Whether a kind is a number, None, a string, or tuples and lists of these, not too deep."""
    return _depth(kind) <= _DEPTH


def _depth(kind: Kind) -> int:
    if isinstance(kind, Several):
        return 1 + max((_depth(each) for item in kind.items for each in item), default=0)
    if isinstance(kind, Each):
        return 1 + max(map(_depth, kind.items), default=0)
    return 0 if kind in NUMBERS | {"none", "str"} else _DEPTH + 1
