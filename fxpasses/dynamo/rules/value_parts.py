"""What a value of the traced program consists of.

Private names, checked on torch 2.13: the types of variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable


def parts_of(value: Any) -> Iterator[Any]:
    """The lists, tuples and tensors in a value; integers and constants are skipped, and anything else gives None."""
    value = value.realize()
    if isinstance(value, BaseListVariable):
        yield value
        for item in value.items:
            yield from parts_of(item)
    elif type(value) is TensorVariable:
        yield value
    elif not isinstance(value, ConstantVariable) and not (
        isinstance(value, SymNodeVariable) and value.python_type() is int
    ):
        yield None
