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
import dis
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from fxpasses.sequences.capture.expressions import CLASSES, Expressions
from fxpasses.sequences.capture.kinds import (
    NONE,
    NUMBERS,
    Each,
    Kind,
    Kinds,
    NotPure,
    Several,
    View,
    class_of,
    kinds_of,
)

_DEPTH = 4  # of functions that call others
_FUTURE = 0x1000000  # `from __future__ import annotations`
_ROUNDS = 16  # of a loop, until its variables have all their kinds
_STATEMENTS = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Return, ast.Raise, ast.Pass, ast.Break,
    ast.Continue, ast.Expr,
)  # fmt: skip


def results_of(function: FunctionType, args: list[Kinds], kwargs: dict[str, Kinds]) -> Kind:
    """The kind of a function's result: "int", a `View`, or `Several` integers. Raises `NotPure` for other functions."""
    try:
        found = _Function(function).returned(args, kwargs)
    except NotPure:
        raise
    except Exception as error:  # what is not understood is not proved
        raise NotPure(f"its source is not understood: {error}") from error
    views = [kind for kind in found if isinstance(kind, View)]
    if found == {"int"} or (len(found) == 1 and all(map(_is_of_integers, found))):
        return next(iter(found))
    if not views or len(views) < len(found) or any(view.of != views[0].of for view in views):
        raise NotPure("its results are not of one kind")
    return View(views[0].of, frozenset().union(*(view.dims for view in views)))


def may_be_pure(function: Any) -> bool:
    """Whether nothing in a function's statements shows that it does more."""
    try:
        _source(function)
    except NotPure:
        return False
    return True


def _has_known_statements(tree: ast.FunctionDef) -> bool:
    """Whether a function has no other statements, and no `else` of a loop, anywhere."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node is not tree]
    is_generator = any(isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)) for node in ast.walk(tree))
    has_else = any(isinstance(node, (ast.For, ast.While)) and node.orelse for node in statements)
    return all(isinstance(node, _STATEMENTS) for node in statements) and not is_generator and not has_else


def _is_of_integers(kind: Kind) -> bool:
    is_tuple = isinstance(kind, Several) and kind.of is tuple and bool(kind.items)
    return is_tuple and all(item == {"int"} for item in kind.items)


def _source(function: Any) -> ast.FunctionDef:
    if not isinstance(function, FunctionType) or function.__closure__:
        raise NotPure("it is no plain function")
    if any(hasattr(function, name) for name in ("__wrapped__", "__signature__")):
        raise NotPure("it is no plain function")
    return _parsed(function.__code__)


@functools.lru_cache(maxsize=256)
def _parsed(code: CodeType) -> ast.FunctionDef:
    """The source of a function's code, which is compiled again to see that it is."""
    try:
        text = textwrap.dedent(inspect.getsource(code))
        tree = ast.parse(text).body[0]
        compiled = compile(text, code.co_filename, "exec", dont_inherit=True, flags=code.co_flags & _FUTURE)
    except (OSError, SyntaxError, TypeError, IndexError, ValueError) as error:
        raise NotPure("its source is not known") from error
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        raise NotPure("it is no plain function")
    if not _has_known_statements(tree):
        raise NotPure("it has statements of another kind")
    if not any(isinstance(each, CodeType) and _is_same(each, code) for each in compiled.co_consts):
        raise NotPure("its source has changed")
    return tree


def _is_same(one: CodeType, other: CodeType) -> bool:
    names = "co_name", "co_varnames", "co_argcount", "co_kwonlyargcount"
    return all(getattr(one, name) == getattr(other, name) for name in names) and _steps(one) == _steps(other)


def _steps(code: CodeType) -> list[str]:
    """The instructions of a function, but for what Python makes of a call on an imported module."""
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("PUSH_NULL", "PRECALL", "NOP")]
    names = [each.opname.replace("LOAD_METHOD", "LOAD_ATTR").replace("CALL_METHOD", "CALL") for each in steps]
    return [f"{name} {'' if 'JUMP' in name else repr(each.argval)}" for name, each in zip(names, steps, strict=True)]


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
                if isinstance(parameter.default, (list, tuple)):  # calls share it, and what is in it
                    raise NotPure("it has a list or a tuple as a default")
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
                return True
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
                if all(each in CLASSES for each in classes):
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
            elif kind not in NUMBERS | {"none"}:  # of which Python raises
                raise NotPure("it unpacks something else than a tuple or a list")
        return found

    def _check_raise(self, node: ast.Raise) -> None:
        """What is raised is a builtin exception, with text."""
        called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if not isinstance(called, ast.Name) or node.cause is not None:
            raise NotPure("it raises something else than a builtin exception")
        kind = self.value_of(called.id)
        if not (isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == "builtins"):
            raise NotPure("it raises something else than a builtin exception")
        if isinstance(node.exc, ast.Call):
            if node.exc.keywords or not all(map(self._is_text, node.exc.args)):
                raise NotPure("the text of an error is computed")

    def _is_text(self, node: ast.AST) -> bool:
        """Whether an expression is text made of the function's variables, their shapes and their classes."""
        if isinstance(node, (ast.JoinedStr, ast.FormattedValue)):
            return all(map(self._is_text, ast.iter_child_nodes(node)))
        if isinstance(node, ast.Attribute):
            return node.attr == "shape" and self._is_text(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1 and not node.keywords:
            return self.value_of(node.func.id) is type and self._is_text(node.args[0])
        return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in self.kinds)


def _joined(ends: list[Variables]) -> Variables:
    """The kinds of variables where several ways meet."""
    return {name: frozenset().union(*(end.get(name, NONE) for end in ends)) for end in ends for name in end}
