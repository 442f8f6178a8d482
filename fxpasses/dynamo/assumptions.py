"""The assumptions of a graph about its batch: the distinct answers that its trace was given, with a text for each.

The answers (`dynamo/trace.py`) hold for the traced batch. Those that state consistency (`sum(lengths) == tokens`) are
already assertions in the graph: a batch that breaks them is invalid, and raises. The others are choices (`longest >
512`), which may differ for another batch, and which `dynamo/guarding.py` guards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.utils._sympy.solve import try_solve

from fxpasses.dynamo.attempt import Place
from fxpasses.dynamo.partial_graph import PartialGraph
from fxpasses.dynamo.trace import Answer, Trace
from fxpasses.graph.provenance import in_program
from fxpasses.metadata.describe import describe
from fxpasses.metadata.draft import Extra


@dataclass(frozen=True)
class Assumption:
    """A condition over symbols that must hold for a batch, and its text: `lengths.max() > 512`.

    places: all places that asked for it; `where` is the first, as text. is_tacit: whether PyTorch assumed it by
    default, without asking the batch.
    """

    condition: Any
    text: str
    where: str
    names: Mapping[Any, str]  # the names of the condition's symbols in the text
    places: frozenset[Place] = frozenset()
    is_tacit: bool = False

    def __str__(self) -> str:
        return f"{self.text}, at {self.where}" if self.where else self.text

    @property
    def fixes_number(self) -> bool:
        """Whether it holds for a single number, so that every batch may break it. A flag (0 or 1) does not count."""
        if not isinstance(self.condition, sympy.Eq):
            return False
        return any(side.is_Integer and side not in (0, 1) for side in self.condition.args)


def assumptions_of(trace: Trace) -> list[Assumption]:
    """The distinct choices among a trace's answers, without those that other choices imply."""
    if trace.graph is None:
        return []
    canonical = _Canonical(trace.graph)
    found: dict[Any, list[Answer]] = {}
    for answer in trace.answers:
        if answer.states_consistency:
            answer = replace(answer, condition=_unless_broadcast(answer.condition), is_tacit=True)
        for part in sympy.And.make_args(trace.defined(answer.condition)):
            condition = canonical(part)
            if condition != sympy.true:
                found.setdefault(condition, []).append(answer)
    kept = _without_implied(found)
    return [
        Assumption(
            c,
            canonical.in_words(c),
            found[c][0].where,
            {s: canonical.name(s) for s in c.free_symbols},
            frozenset(answer.place for answer in found[c]),
            all(answer.is_tacit for answer in found[c]),
        )
        for c in kept
    ]


def _unless_broadcast(equal: sympy.Eq) -> Any:
    """The sizes are equal, or neither is 1: then the operator fails in eager mode too, which broadcasts only a 1."""
    return sympy.Or(equal, sympy.And(*(sympy.Ne(side, 1) for side in equal.args)))


class _Canonical:
    """Maps all symbols of one value, which several layers may have read, to one symbol."""

    def __init__(self, graph: PartialGraph) -> None:
        self.graph = graph
        self._symbols: dict[Extra, Any] = {}

    def __call__(self, condition: Any) -> Any:
        condition = condition.xreplace({found: self._symbol(found) for found in condition.free_symbols})
        if len(condition.free_symbols) == 1:
            (found,) = condition.free_symbols
            solved = try_solve(condition, found)  # `n - 2 > 2` is `n > 4`
            if solved is not None:
                return type(solved[0])(found, solved[1])
        return condition

    def _symbol(self, found: Any) -> Any:
        if self.graph.is_size(found):
            return found
        return self._symbols.setdefault(self.graph.extra(found), found)

    def in_words(self, condition: Any) -> str:
        flag = self._flag(condition)
        if flag is not None:
            return flag
        words = {found: sympy.Symbol(self.name(found)) for found in condition.free_symbols}
        if isinstance(condition, sympy.Rel):
            return f"{condition.lhs.xreplace(words)} {condition.rel_op} {condition.rhs.xreplace(words)}"
        return str(condition.xreplace(words))

    def _flag(self, condition: Any) -> str | None:
        """`(lengths > 6).any()` for the condition that this flag is 1."""
        if not isinstance(condition, (sympy.Eq, sympy.Ne)) or not condition.lhs.is_Symbol:
            return None
        if self.graph.is_size(condition.lhs) or condition.rhs not in (0, 1):
            return None
        extra = self.graph.extra(condition.lhs)
        if not isinstance(self.graph.walk.closure.table.entries[extra.ref.number].fake, (bool, torch.SymBool)):
            return None
        holds = isinstance(condition, sympy.Eq) == (condition.rhs == 1)
        text = self.name(condition.lhs)
        return text if holds else f"not {text}"

    def name(self, found: Any) -> str:
        if self.graph.is_size(found):
            return in_program(self.graph.size_source(found))
        extra = self.graph.extra(found)
        text = describe(self.graph.walk.closure.table, extra.ref)
        return text if extra.dimension is None else f"{text}.shape[{extra.dimension}]"


def _without_implied(conditions: Iterable[Any]) -> list[Any]:
    """Keep only the tightest of the conditions on a single integer: an equality, or a lower and an upper bound."""
    conditions = list(conditions)
    ranges: dict[Any, _Range] = {}
    for condition in conditions:
        if (bounds := _Range.of(condition)) is not None:
            whole = ranges.setdefault(bounds.symbol, _Range(bounds.symbol))
            whole.low, whole.high = max(whole.low, bounds.low), min(whole.high, bounds.high)
    kept: dict[Any, Any] = {}  # by meaning, so that only one of `n > 4` and `n >= 5` stays
    for condition in conditions:
        bounds = _Range.of(condition)
        if bounds is not None:
            whole = ranges[bounds.symbol]
            tight = bounds.low == whole.low > -math.inf or bounds.high == whole.high < math.inf
            exact = whole.low == whole.high and (bounds.low, bounds.high) != (whole.low, whole.high)
            if tight and not (exact and any(_Range.of(c) == whole for c in conditions)):
                kept.setdefault((bounds.symbol, bounds.low, bounds.high), condition)
        elif not _is_outside(condition, ranges):
            kept.setdefault(condition, condition)
    return list(kept.values())


def _is_outside(condition: Any, ranges: dict[Any, _Range]) -> bool:
    """Whether `n != 1` is implied by the range of n."""
    if not isinstance(condition, sympy.Ne) or condition.lhs not in ranges or not condition.rhs.is_Integer:
        return False
    return not ranges[condition.lhs].low <= condition.rhs <= ranges[condition.lhs].high


@dataclass
class _Range:
    """The range of an integer symbol: low <= symbol <= high."""

    symbol: Any
    low: float = -math.inf
    high: float = math.inf

    @classmethod
    def of(cls, condition: Any) -> _Range | None:
        """The range that `n > 4` implies, n >= 5; None for a condition that does not bound a single integer."""
        if not isinstance(condition, sympy.Rel) or len(condition.free_symbols) != 1:
            return None
        (found,) = condition.free_symbols
        if condition.lhs != found or not condition.rhs.is_Integer or not found.is_integer:
            return None
        limit = int(condition.rhs)
        if isinstance(condition, sympy.Eq):
            return cls(found, limit, limit)
        if isinstance(condition, (sympy.Gt, sympy.Ge)):
            return cls(found, low=limit + isinstance(condition, sympy.Gt))
        if isinstance(condition, (sympy.Lt, sympy.Le)):
            return cls(found, high=limit - isinstance(condition, sympy.Lt))
        return None
