"""Functions that compute nothing but numbers and slices, by their source: what kinds of results they have.

    def unpad_image(tensor, original_size):                         # activation, integers
        original_height, original_width = original_size.tolist()    # int, int
        if original_width / original_height > 1.5:                  # float, compared
            new_height = int(round(original_height * 0.5, 7))       # int
            return tensor[:, :new_height]                           # a slice of dimension 1
        return tensor                                               # not allowed: it is no new object

A function may assign to its own variables, branch, loop, raise, ask for sizes, and call some builtins, functions of
`math` and other such functions (`expressions.py`). So it has no effect and reads nothing but its arguments, and may be
called as often as one likes, in forward and again in backward. Where Python raises for a kind, as it does when it
unpacks None, that kind goes no further.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from fxpasses.sequences.capture.expressions import Expressions
from fxpasses.sequences.capture.kinds import NONE, Each, Kind, Kinds, NotPure, Several, Tensor, View, class_of, kinds_of

_DEPTH = 4  # of functions that call others
_ROUNDS = 16  # of a loop, until its variables have all their kinds
_STATEMENTS = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Return, ast.Raise, ast.Pass, ast.Break,
    ast.Continue, ast.Expr,
)  # fmt: skip


def results_of(function: FunctionType, args: list[Kinds], kwargs: dict[str, Kinds]) -> Kind:
    """The kind of a function's result: "int", a `View`, or `Several` integers. Raises `NotPure` for other functions."""
    found = _Function(function).returned(args, kwargs)
    views = [kind for kind in found if isinstance(kind, View)]
    if found == {"int"} or (len(found) == 1 and all(map(_is_of_integers, found))):
        return next(iter(found))
    if not views or len(views) < len(found) or any(view.of != views[0].of for view in views):
        raise NotPure("its results are not of one kind")
    return View(views[0].of, frozenset().union(*(view.dims for view in views)))


def may_be_pure(function: Any) -> bool:
    """Whether nothing in a function's statements shows that it does more."""
    try:
        tree = _source(function)
    except NotPure:
        return False
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node is not tree]
    return all(isinstance(node, _STATEMENTS) for node in statements)


def _is_of_integers(kind: Kind) -> bool:
    return isinstance(kind, Several) and bool(kind.items) and all(item == {"int"} for item in kind.items)


@functools.lru_cache(maxsize=256)
def _source(function: Any) -> ast.FunctionDef:
    if not isinstance(function, FunctionType) or function.__closure__ or hasattr(function, "__wrapped__"):
        raise NotPure("it is no plain function")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError, TypeError, IndexError) as error:
        raise NotPure("its source is not known") from error
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list or tree.name != function.__code__.co_name:
        raise NotPure("it is no plain function")
    return tree


Variables = dict[str, Kinds]


@dataclass
class _Function(Expressions):
    """A function that is being read. kinds: of its variables, at the statement that is read; results: so far."""

    function: Any
    depth: int = 0
    kinds: Variables = field(default_factory=dict)
    locals: set[str] = field(default_factory=set)
    results: Kinds = NONE
    left: list[list[Variables]] = field(default_factory=list)  # of each loop, where it is left or begun again

    def returned(self, args: list[Kinds], kwargs: dict[str, Kinds]) -> Kinds:
        if self.depth > _DEPTH:
            raise NotPure("it calls too many others")
        tree, signature = _source(self.function), inspect.signature(self.function)
        if tree.args.vararg or tree.args.kwarg:
            raise NotPure("it takes any number of arguments")
        try:
            self.kinds = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise NotPure("its arguments do not fit") from error
        for name, parameter in signature.parameters.items():
            if name not in self.kinds:
                self.kinds[name] = kinds_of(parameter.default)
        self.locals = {*self.function.__code__.co_varnames}
        if self._block(tree.body):
            self.results |= {"none"}
        return self.results

    def called(self, function: FunctionType, args: list[Kinds], kwargs: dict[str, Kinds]) -> Kinds:
        return _Function(function, self.depth + 1).returned(args, kwargs)

    # Statements: whether the program may go on after them

    def _block(self, statements: list[ast.stmt]) -> bool:
        return all(map(self._statement, statements))

    def _statement(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Assign):
            value = self.of(node.value)
            for target in node.targets:
                self.assign(target, value)
        elif isinstance(node, ast.AugAssign):
            if not isinstance(node.target, ast.Name):
                raise NotPure("it writes to an object")
            before = self.of(ast.Name(node.target.id, ast.Load()))
            self.assign(node.target, self.operation(node.op, before, self.of(node.value)))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, self.of(node.value))
        elif isinstance(node, ast.If):
            return self._branch(node)
        elif isinstance(node, (ast.For, ast.While)):
            return self._loop(node)
        elif isinstance(node, ast.Return):
            self.results |= self.of(node.value) if node.value is not None else {"none"}
            return False
        elif isinstance(node, ast.Raise):
            self._check_raise(node)
            return False
        elif isinstance(node, (ast.Break, ast.Continue)):
            self.left[-1].append(dict(self.kinds))
            return False
        elif isinstance(node, ast.Expr):
            if not isinstance(node.value, ast.Constant):
                raise NotPure("it calls something for its effect")
        elif not isinstance(node, ast.Pass):
            raise NotPure(f"it has a statement of the kind {type(node).__name__}")
        return True

    def _branch(self, node: ast.If) -> bool:
        self.truth(node.test)
        before, ends = self.kinds, []
        for block, truth in ((node.body, True), (node.orelse, False)):
            self.kinds = dict(before)
            self._narrow(node.test, truth)
            if self._block(block):
                ends.append(self.kinds)
        self.kinds = _joined(ends)
        return bool(ends)

    def _loop(self, node: ast.For | ast.While) -> bool:
        for _ in range(_ROUNDS):
            before = dict(self.kinds)
            self.left.append([])
            if isinstance(node, ast.For):
                self.assign(node.target, self.elements(self.of(node.iter)))
            else:
                self.truth(node.test)
            ends = [self.kinds] if self._block(node.body) else []
            self.kinds = _joined([before, *ends, *self.left.pop()])
            if self.kinds == before:
                return self._block(node.orelse)
        raise NotPure("its variables have ever more kinds")

    def _narrow(self, test: ast.expr, truth: bool) -> None:
        """Leave out the kinds of a variable for which a test, `isinstance(x, list)` or `x is None`, says otherwise."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._narrow(test.operand, not truth)
        elif isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot)) and len(test.ops) == 1:
            right = test.comparators[0]
            if isinstance(test.left, ast.Name) and isinstance(right, ast.Constant) and right.value is None:
                is_none = truth is isinstance(test.ops[0], ast.Is)
                self._keep(test.left.id, lambda kind: (kind == "none") is is_none)
        elif isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and len(test.args) == 2:
            tested, given = test.args
            if self.value_of(test.func.id) is isinstance and isinstance(tested, ast.Name):
                classes = [self.named_class(each) for each in (given.elts if isinstance(given, ast.Tuple) else [given])]
                if None not in classes:
                    self._keep(tested.id, lambda kind: issubclass(class_of(kind), tuple(classes)) is truth)

    def _keep(self, name: str, is_kept: Callable[[Kind], bool]) -> None:
        if name in self.kinds:
            self.kinds[name] = frozenset(filter(is_kept, self.kinds[name]))

    def assign(self, target: ast.expr, value: Kinds) -> None:
        if isinstance(target, ast.Name):
            self.kinds[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for at, each in enumerate(target.elts):
                self.assign(each, self._unpacked(value, at, len(target.elts)))
        else:
            raise NotPure("it writes to an object")

    def _unpacked(self, value: Kinds, at: int, count: int) -> Kinds:
        found: Kinds = NONE
        for kind in value:
            if isinstance(kind, Several) and len(kind.items) == count:
                found |= kind.items[at]
            elif isinstance(kind, Each):
                found |= kind.items
            elif isinstance(kind, (Tensor, View)):
                raise NotPure("it unpacks a tensor")
        return found

    def _check_raise(self, node: ast.Raise) -> None:
        """What is raised is a builtin exception, with text."""
        called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if not isinstance(called, ast.Name) or node.cause is not None:
            raise NotPure("it raises something else than a builtin exception")
        kind = self.value_of(called.id)
        if not (isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == "builtins"):
            raise NotPure("it raises something else than a builtin exception")
        for each in node.exc.args if isinstance(node.exc, ast.Call) else []:
            for inner in ast.walk(each):
                if isinstance(inner, (ast.Call, ast.Await, ast.NamedExpr)) and not self._is_type_of(inner):
                    raise NotPure("it calls something for the text of an error")

    def _is_type_of(self, node: ast.AST) -> bool:
        is_type = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1
        return is_type and self.value_of(node.func.id) is type  # type: ignore[attr-defined]


def _joined(ends: list[Variables]) -> Variables:
    """The kinds of variables where several ways meet."""
    return {name: frozenset().union(*(end.get(name, NONE) for end in ends)) for end in ends for name in end}
