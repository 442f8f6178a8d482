"""Sizes that a layer's trace makes, and that are known only at run time: whether a copy of the layer makes the same.

    tok = mask.nonzero()          [u0, 1] for `layers[0]`, how many tokens an expert has;  [u4, 1] for its copy

What the shape environment knows of `u4` has to be what it knows of `u0`.

Private names, checked on torch 2.11, 2.13 and 2.15: of the shape environment, `var_to_range`, `size_like`,
`replacements` and `deferred_runtime_asserts`, all by symbol, and `expr` of what is asserted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy


@dataclass(frozen=True)
class Known:
    """What is known of a symbol: its range, whether it is a size, what equals it, and what is asserted of it."""

    range: Any
    is_size: bool
    replacement: Any
    asserted: frozenset[Any]

    @property
    def most(self) -> int | None:
        return int(self.range.upper) if self.range.upper.is_Integer else None

    def renamed(self, copies: Mapping[Any, Any]) -> Known:
        """What is then to be known of the symbol's copy."""
        asserted = frozenset(renamed(each, copies) for each in self.asserted)
        return replace(self, replacement=renamed(self.replacement, copies), asserted=asserted)


def made_since(shape_env: Any, before: frozenset[Any]) -> dict[Any, Known]:
    """What is known of the symbols that are not in `before`, in the order in which they were made."""
    return {found: _known(shape_env, found) for found in shape_env.var_to_range if found not in before}


def _known(shape_env: Any, found: Any) -> Known:
    asserted = frozenset(each.expr for each in shape_env.deferred_runtime_asserts.get(found, ()))
    replacement = shape_env.replacements.get(found)
    return Known(shape_env.var_to_range[found], found in shape_env.size_like, replacement, asserted)


def renamed(value: Any, copies: Mapping[Any, Any]) -> Any:
    """An expression, or tuples of them and of other things, with copies in place of symbols."""
    if isinstance(value, tuple):
        return tuple(renamed(item, copies) for item in value)
    return value.xreplace(copies) if isinstance(value, sympy.Basic) else value
