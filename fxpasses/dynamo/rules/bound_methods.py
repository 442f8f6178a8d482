"""The method of a module that Dynamo is about to trace.

Private names, checked on torch 2.11, 2.13 and 2.15: the attributes in which `UserMethodVariable` holds its function and
its object; `source`, by which the frame reaches the object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn import Module


@dataclass(frozen=True)
class BoundMethod:
    """owner: Dynamo's variable of the module. source: None for a module that the frame made itself."""

    function: Callable[..., Any]
    module: Module
    source: Any
    owner: Any

    @classmethod
    def of(cls, variable: Any) -> BoundMethod | None:
        """The method that a variable stands for; None if that is not a method of a module."""
        # The attributes of torch 2.11 and 2.13, then of 2.15.
        function = getattr(variable, "fn", getattr(getattr(variable, "im_func", None), "fn", None))
        owner = getattr(variable, "obj", getattr(variable, "im_self", None))
        module = getattr(owner, "value", None)
        if function is None or not isinstance(module, Module):
            return None
        return cls(function, module, getattr(owner, "source", None), owner)

    def is_defined_in(self, modules: str | tuple[str, ...], *names: str) -> bool:
        """Whether the function has one of `names` and its Python module's name begins with one of `modules`."""
        return self.function.__name__ in names and str(self.function.__module__).startswith(modules)
