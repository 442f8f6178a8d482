"""Sizes that a layer's trace makes, and that are known only at run time: whether a copy of the layer makes the same.

    tok = mask.nonzero()          [u0, 1] for `layers[0]`, how many tokens an expert has;  [u4, 1] for its copy

What the shape environment knows of `u4` has to be what it knows of `u0`.

Private names, checked on torch 2.11, 2.13 and 2.15: of the shape environment, `var_to_range`, `size_like`,
`replacements` and `deferred_runtime_asserts`, all by symbol, and `expr` of what is asserted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy


def made_since(shape_env: Any, known: frozenset[Any]) -> dict[Any, Any]:
    """What is known of the symbols that are not in `known`, in the order in which they were made."""
    return {found: _known(shape_env, found) for found in shape_env.var_to_range if found not in known}


def _known(shape_env: Any, found: Any) -> Any:
    asserted = frozenset(each.expr for each in shape_env.deferred_runtime_asserts.get(found, ()))
    return shape_env.var_to_range[found], found in shape_env.size_like, shape_env.replacements.get(found), asserted


def renamed(value: Any, copies: Mapping[Any, Any]) -> Any:
    """An expression, or containers of them and of other things, with copies in place of symbols."""
    if isinstance(value, dict):
        return {renamed(key, copies): renamed(item, copies) for key, item in value.items()}
    if isinstance(value, (tuple, frozenset)):
        return type(value)(renamed(item, copies) for item in value)
    return value.xreplace(copies) if isinstance(value, sympy.Basic) else value
