"""The kinds of the expressions of a function of numbers (`pure_functions.py`)."""

from __future__ import annotations

import ast
import builtins
import math
from types import FunctionType
from typing import Any

import torch

from fxpasses.sequences.capture.kinds import (
    NONE,
    NUMBERS,
    Each,
    Kinds,
    NotPure,
    Several,
    Tensor,
    View,
    argument_of,
    is_plain,
    kinds_of,
    nested,
    only,
)

_TO_INTEGERS = (math.ceil, math.floor, math.trunc, math.gcd, math.isqrt)
_TO_FLOATS = (math.sqrt, math.log, math.log2, math.exp, math.pow, math.hypot, math.cos, math.sin)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)

try:
    from numpy import ndarray
except ImportError:
    ndarray = torch.Tensor  # type: ignore[assignment, misc]

# For which `isinstance` is understood.
CLASSES: tuple[Any, ...] = (int, float, bool, str, list, tuple, torch.Tensor, ndarray)


class Expressions:
    """Those of one function. kinds: of its variables, where an expression stands; locals: the names of all of them."""

    function: Any
    kinds: dict[str, Kinds]
    locals: set[str]

    def called(self, function: FunctionType, args: list[Kinds], kwargs: dict[str, Kinds]) -> Kinds:
        """The kinds of what another function returns."""
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Kinds) -> None:
        """Note that a variable, or several, have a value."""
        raise NotImplementedError

    def of(self, node: ast.expr) -> Kinds:
        """The kinds that an expression may have."""
        if isinstance(node, ast.Constant):
            return kinds_of(node.value)
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, (ast.Tuple, ast.List)):
            items = tuple(map(self.of, node.elts))
            kind = Several(items) if isinstance(node, ast.Tuple) else Each(NONE.union(*items))
            if not is_plain(kind):
                raise NotPure("it puts something else than numbers into a tuple or a list")
            return frozenset({kind})
        if isinstance(node, ast.BinOp):
            return self.operation(node.op, self.of(node.left), self.of(node.right))
        if isinstance(node, ast.UnaryOp):
            if isinstance(node.op, ast.Not):
                return self.truth(node.operand)
            found = only(self.of(node.operand), NUMBERS | {"none"}) & NUMBERS
            if isinstance(node.op, ast.Invert):
                raise NotPure("it has an operator of the kind Invert")
            return frozenset("int" if kind == "bool" else kind for kind in found)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.BoolOp):
            return NONE.union(*(self._asked(self.of(value)) for value in node.values))
        if isinstance(node, ast.IfExp):
            self.truth(node.test)
            return self.of(node.body) | self.of(node.orelse)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        raise NotPure(f"it has an expression of the kind {type(node).__name__}")

    def _name(self, name: str) -> Kinds:
        if name in self.kinds:
            return self.kinds[name]
        if name in self.locals:
            return NONE  # assigned further down
        raise NotPure(f"it reads `{name}`")

    def value_of(self, name: str) -> Any:
        """The value of a name that is not the function's own."""
        if name in self.kinds or name in self.locals or name.startswith("__"):
            raise NotPure(f"it calls `{name}`")
        return self.function.__globals__.get(name, getattr(builtins, name, None))

    def named_class(self, node: ast.expr) -> Any:
        """The class that an expression names; None if it names something else."""
        found: Any = None
        if isinstance(node, ast.Name) and node.id not in self.locals:
            found = self.value_of(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in self.locals:
            found = getattr(self.value_of(node.value.id), node.attr, None)
        return found if isinstance(found, type) else None

    def truth(self, node: ast.expr) -> Kinds:
        self._asked(self.of(node))
        return frozenset({"bool"})

    def _asked(self, value: Kinds) -> Kinds:
        """A value whose truth is asked for."""
        if not all(map(is_plain, value)):
            raise NotPure("it asks for the truth of something else than numbers")
        return value

    def elements(self, value: Kinds) -> Kinds:
        found: Kinds = NONE
        for kind in value:
            if isinstance(kind, Each):
                found |= kind.items
            elif isinstance(kind, Several):
                found = found.union(*kind.items)
            elif kind not in NUMBERS | {"none"}:  # of which Python raises
                raise NotPure("it loops over something else than a tuple or a list")
        return found

    def operation(self, op: ast.operator, left: Kinds, right: Kinds) -> Kinds:
        if any(isinstance(kind, (Tensor, View)) for kind in left | right):
            raise NotPure("it computes with a tensor")
        if not (left | right) <= NUMBERS | {"none"}:
            raise NotPure("it computes with something else than numbers")
        if not left & NUMBERS or not right & NUMBERS:
            return NONE
        if isinstance(op, ast.Div):
            return frozenset({"float"})
        if not isinstance(op, _OPERATORS):
            raise NotPure(f"it has an operator of the kind {type(op).__name__}")
        of_integers = bool(left & {"int", "bool"}) and bool(right & {"int", "bool"})
        return frozenset({"int"} if of_integers else ()) | ({"float"} if "float" in left | right else set())

    def _comparison(self, node: ast.Compare) -> Kinds:
        kinds = NONE.union(*map(self.of, (node.left, *node.comparators)))
        if not _is_identity(node):
            if not all(map(is_plain, kinds)):
                raise NotPure("it compares something else than numbers")
            if any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
                raise NotPure("it asks whether two objects are one")
        return frozenset({"bool"})

    def _attribute(self, node: ast.Attribute) -> Kinds:
        if isinstance(node.value, ast.Name) and node.value.id not in self.kinds | dict.fromkeys(self.locals):
            raise NotPure(f"it reads `{node.attr}`")
        found: Kinds = NONE
        for kind in self.of(node.value):
            if not isinstance(kind, (Tensor, View)) or node.attr not in ("shape", "ndim"):
                raise NotPure(f"it reads `.{node.attr}`")
            ndim = argument_of(kind).ndim
            found |= {"int"} if node.attr == "ndim" else {Several((frozenset({"int"}),) * ndim, torch.Size)}
        return found

    def _subscript(self, node: ast.Subscript) -> Kinds:
        found: Kinds = NONE
        for kind in self.of(node.value):
            if isinstance(kind, (Tensor, View)):
                found |= {self._slice(kind, node.slice)}
            elif isinstance(kind, Several):
                found |= self._item(kind, node.slice)
            elif isinstance(kind, Each):
                is_slice = isinstance(node.slice, ast.Slice)
                self._check_bounds(node.slice)
                found |= {kind} if is_slice else kind.items
            elif kind not in NUMBERS | {"none"}:
                raise NotPure("it reads an element of something else than a list")
        return found

    def _item(self, kind: Several, index: ast.expr) -> Kinds:
        self._check_bounds(index)
        try:
            at = ast.literal_eval(index)
        except ValueError:
            at = None
        if type(at) is int:
            return kind.items[at] if -len(kind.items) <= at < len(kind.items) else NONE
        every = NONE.union(*kind.items)
        if not isinstance(index, ast.Slice):
            return every
        bounds = [None if each is None else _constant(each) for each in (index.lower, index.upper, index.step)]
        if _UNKNOWN in bounds or not all(type(bound) in (int, type(None)) for bound in bounds) or bounds[2] == 0:
            return frozenset({Each(every, kind.of)})
        return frozenset({Several(kind.items[slice(*bounds)], kind.of)})

    def _slice(self, kind: Tensor | View, index: ast.expr) -> View:
        """`tensor[:, a:b]`: slices alone, so that it has as many dimensions."""
        indices = index.elts if isinstance(index, ast.Tuple) else [index]
        of = argument_of(kind)
        if len(indices) > of.ndim or not all(isinstance(each, ast.Slice) for each in indices):
            raise NotPure("it indexes a tensor with something else than slices")
        dims = set(kind.dims if isinstance(kind, View) else ())
        for dim, each in enumerate(indices):
            assert isinstance(each, ast.Slice)
            self._check_bounds(each)
            if each.step is not None:
                raise NotPure("it indexes a tensor with steps")
            dims |= {dim} if each.lower is not None or each.upper is not None else set()
        return View(of, frozenset(dims))

    def _check_bounds(self, index: ast.expr) -> None:
        bounds = [index.lower, index.upper, index.step] if isinstance(index, ast.Slice) else [index]
        for bound in bounds:
            if bound is not None and not self.of(bound) <= {"int", "bool", "none"}:
                raise NotPure("it indexes with something else than integers")

    def _call(self, node: ast.Call) -> Kinds:
        if any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords):
            raise NotPure("it unpacks arguments")
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func)
        if not isinstance(node.func, ast.Name):
            raise NotPure("it calls what it computes")
        called = self.value_of(node.func.id)
        if called is isinstance and len(node.args) == 2:
            return self._is_instance(node.args[0], node.args[1])
        args, kwargs = [*map(self.of, node.args)], {str(each.arg): self.of(each.value) for each in node.keywords}
        if isinstance(called, FunctionType):
            return self.called(called, args, kwargs)
        if kwargs:
            raise NotPure("it gives a builtin a named argument")
        return self._builtin(called, args)

    def _is_instance(self, value: ast.expr, classes: ast.expr) -> Kinds:
        """The function gets plain tensors, where the program may have parameters, or others of a class of their own."""
        self.of(value)
        for each in classes.elts if isinstance(classes, ast.Tuple) else [classes]:
            found = self.named_class(each)
            if found not in CLASSES:
                raise NotPure("it asks for a class of another kind")
        return frozenset({"bool"})

    def _method(self, node: ast.Call, method: ast.Attribute) -> Kinds:
        if isinstance(method.value, ast.Name) and method.value.id not in self.kinds | dict.fromkeys(self.locals):
            called = getattr(self.value_of(method.value.id), method.attr, None)
            args = [*map(self.of, node.args)]
            if self.value_of(method.value.id) is not math or node.keywords or not all(each <= NUMBERS for each in args):
                raise NotPure(f"it calls `{method.attr}`")
            if called in _TO_INTEGERS or called in _TO_FLOATS:
                return frozenset({"int" if called in _TO_INTEGERS else "float"})
            raise NotPure(f"it calls `{method.attr}`")
        found: Kinds = NONE
        given = [*map(self.of, node.args)]
        for kind in self.of(method.value):
            if not isinstance(kind, Tensor) or node.keywords:
                raise NotPure(f"it calls `.{method.attr}`")
            if method.attr == "tolist" and kind.holds_integers and kind.ndim and not given:
                found |= {nested(kind.ndim)}
            elif (
                (method.attr == "item" and kind.holds_integers and not given)
                or (method.attr == "size" and given == [{"int"}])
                or (method.attr in ("dim", "numel") and not given)
            ):
                found |= {"int"}
            else:
                raise NotPure(f"it calls `.{method.attr}`")
        return found

    def _builtin(self, called: Any, args: list[Kinds]) -> Kinds:
        everything = NONE.union(*args)
        if any(isinstance(kind, (Tensor, View)) for kind in everything) and called is not len:
            raise NotPure("it gives a tensor to a builtin")
        if called is min or called is max:
            found = self.elements(args[0]) if len(args) == 1 else everything
            return only(found, NUMBERS)
        if called is sum and len(args) == 1:
            found = only(self.elements(args[0]), NUMBERS)
            return frozenset("int" if kind == "bool" else kind for kind in found) | {"int"}
        if called is len and len(args) == 1:
            return frozenset({"int"})
        if called is range:
            only(everything, {"int", "bool"})
            return frozenset({Each(frozenset({"int"}), range)})
        only(everything, NUMBERS | ({"str"} if called is int or called is float else set()))
        for kind in (int, float, bool):
            if called is kind and len(args) == 1:
                return frozenset({kind.__name__})
        if called is abs and len(args) == 1:
            return frozenset("int" if kind == "bool" else kind for kind in everything)
        if called is round and len(args) == 1:
            return frozenset({"int"})
        if called is round and len(args) == 2 and args[1] == {"int"}:
            return frozenset("int" if kind == "bool" else kind for kind in args[0])
        if called is divmod and len(args) == 2:
            return frozenset({Several((self.operation(ast.FloorDiv(), *args), self.operation(ast.Mod(), *args)))})
        raise NotPure(f"it calls `{getattr(called, '__name__', called)}`")


_UNKNOWN = object()


def _is_identity(node: ast.Compare) -> bool:
    """Whether a comparison is `x is None` or `x is not None`."""
    right = node.comparators[-1]
    is_none = isinstance(right, ast.Constant) and right.value is None
    return is_none and len(node.ops) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot))


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _UNKNOWN
