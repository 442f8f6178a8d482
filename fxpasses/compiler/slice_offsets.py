"""Inductor computes where a slice begins, also if that depends on a floating-point number of the batch.

    padding = (x.shape[0] - int(round(height * (28 / width), 3))) // 2
    x[padding : x.shape[0] - padding]

    u3 = 0 + 1 * (max(0, min(40, ... TruncToInt(RoundDecimal(...)) ...)))      # sympy's names: NameError in each call
    u3 = 0 + 1 * (max(0, min(40, ... math.trunc(round(...)) ...)))             # with the printer of the slice's size

Private names, checked on torch 2.11, 2.13 and 2.15: `PythonWrapperCodegen.codegen_dynamic_select_index`, the attributes
of its node, which it formats as text, and `codegen_sizevar`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fxpasses.base.patching import Patch

_PRINTED = ("index", "size", "base_offset", "base_dim_stride")


def _wrapper() -> Any:
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    return PythonWrapperCodegen


def _in_python(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def codegen(self: Any, node: Any, *args: Any, **kwargs: Any) -> None:
        printed = {name: f"({self.codegen_sizevar(getattr(node, name))})" for name in _PRINTED}
        original(self, SimpleNamespace(unbacked_offset_symbol=node.unbacked_offset_symbol, **printed), *args, **kwargs)

    return codegen


# Has the offsets of slices written in Python while Inductor compiles a graph.
in_python = Patch("offsets of slices", _wrapper, codegen_dynamic_select_index=_in_python)
