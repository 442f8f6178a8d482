"""Which assertions on the sizes of an expert's rows hold for any routing.

Dynamo asserts `u0 >= 0` and `u0 <= 48` of every data-dependent size, where 48 is the number of elements of the mask.
These always hold, and are erased with the query. The program's own `torch._check(tok.numel() <= capacity)` has the same
form, but with a smaller number, and may fail.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
from torch.fx import Node

from fxpasses.graph.calls import operator_of
from fxpasses.graph.symbols import constant, expression, is_symbolic


class Sizes:
    """What is known about the numbers of rows that the experts of a loop have.

    counts: a symbol for each expert's number of rows. known: the symbols of the graph's sizes, in terms of `counts`.
    most: an upper bound of an expert's rows. total: the number of all experts' rows. Both are None if not known.
    """

    def __init__(
        self,
        counts: Sequence[sympy.Symbol] = (),
        known: Mapping[Any, Any] | None = None,
        most: int | None = None,
        total: Any = None,
    ) -> None:
        self._counts, self._known, self._most = frozenset(counts), dict(known or {}), most
        self._ordered, self._total = tuple(counts), total

    @functools.cached_property
    def _last(self) -> dict[Any, Any]:
        """The sizes' symbols, with the last expert's number of rows as what the others leave of the total."""
        if self._total is None or not self._ordered:
            return {}
        *others, last = self._ordered
        rest = self._total - sympy.Add(*others)
        return {u: value.subs(last, rest) if value.has(last) else value for u, value in self._known.items()}

    def number(self, node: Node) -> int | None:
        """The value of a symbolic number, if it follows from the number of all experts' rows; else None."""
        example = node.meta.get("example_value")
        if not self._last or not is_symbolic(example) or constant(example) is not None:
            return None
        found = expression(example).xreplace(self._last)
        found = sympy.expand(found) if isinstance(found, sympy.Expr) else found
        return int(found) if isinstance(found, sympy.Integer) else None

    def imply(self, assertion: Node) -> bool:
        """Whether an assertion holds for any numbers of rows."""
        condition = assertion.args[0] if assertion.args else None
        if not isinstance(condition, Node):
            return False
        asserted = expression(condition.meta.get("example_value"))
        if isinstance(asserted, sympy.Basic) and asserted.free_symbols and asserted.free_symbols <= self._known.keys():
            if self._bounds_one(asserted):
                return True
            return self._holds(asserted.xreplace(self._known)) or self._holds(asserted.xreplace(self._last))
        return _is_of_any_size(condition, self._most)

    def _bounds_one(self, asserted: Any) -> bool:
        """Whether an assertion is `u >= n` or `u <= n`, about one expert's rows, and holds: as all of Dynamo's do.

        Substitution comes to the same, and takes SymPy a millisecond for each of them.
        """
        if not isinstance(asserted, (sympy.Ge, sympy.Le)):
            return False
        left, right = asserted.args
        if self._known.get(left) not in self._counts or not isinstance(right, sympy.Integer):
            return False
        if isinstance(asserted, sympy.Ge):
            return bool(right <= 0)
        return self._most is not None and bool(right >= self._most)

    def _holds(self, asserted: Any) -> bool:
        if asserted == sympy.true:
            return True
        if isinstance(asserted, sympy.Eq):
            return bool(sympy.expand(asserted.lhs - asserted.rhs) == 0)
        if isinstance(asserted, (sympy.Le, sympy.Lt)):
            above, strictly = asserted.rhs - asserted.lhs, isinstance(asserted, sympy.Lt)
        elif isinstance(asserted, (sympy.Ge, sympy.Gt)):
            above, strictly = asserted.lhs - asserted.rhs, isinstance(asserted, sympy.Gt)
        else:
            return False
        least = 0
        for term, factor in sympy.expand(above).as_coefficients_dict().items():
            if term == 1:
                least += factor
            elif term not in self._counts or (factor < 0 and self._most is None):
                return False
            elif factor < 0:
                least += factor * self._most
        return bool(least >= (1 if strictly else 0))


def _is_of_any_size(condition: Node, most_rows: int | None) -> bool:
    """For sizes whose symbols are not known: whether a condition has a form that holds for any size."""
    if len(condition.args) != 2:
        return False
    name, (left, right) = operator_of(condition), condition.args
    if name == "ge":
        return type(right) is int and right == 0
    if name not in ("eq", "le") or not isinstance(left, Node):
        return False
    if name == "eq":  # equal sizes of operands, and parts that cover a whole, always hold; equality to a number may not
        return isinstance(right, Node) or operator_of(left) == "sym_sum"
    if not isinstance(right, int):
        return isinstance(right, Node)
    bounds = [bound for bound in (_elements_of_mask(left), most_rows) if isinstance(bound, int)]
    return bool(bounds) and right >= min(bounds)


def _elements_of_mask(size: Node) -> Any:
    """The number of elements of the mask, if `size` is the size of a query's result; else None."""
    node: Any = size.args[0] if operator_of(size).startswith("sym_size") else None
    while isinstance(node, Node):
        name, operands = operator_of(node), [arg for arg in node.args[:2] if isinstance(arg, Node)]
        if name in ("where", "nonzero", "unique") and operands:
            return operands[0].meta["example_value"].numel()
        if name == "getitem" and len(operands) == 2:
            return operands[1].meta["example_value"].numel()
        keeps_rows = name in ("getitem", "squeeze", "flatten", "view", "reshape", "unbind")
        node = operands[0] if keeps_rows and operands else None
    return None
