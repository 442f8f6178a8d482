"""Autocast rules of this package's operators.

`torch.library.register_autocast` casts to a dtype that is fixed at registration; these rules cast to autocast's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

DEVICES = ("cpu", "cuda", "hpu", "mtia", "xpu")
library = Library("fxpasses", "FRAGMENT")  # a registration lives as long as its library


def is_castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def cast(value: Any, device_type: str) -> Any:
    """The castable tensors of `device_type` in autocast's dtype, also within lists; anything else is unchanged."""
    if isinstance(value, (list, tuple)):
        return [cast(item, device_type) for item in value]
    is_cast = is_castable(value) and value.device.type == device_type
    return value.to(torch.get_autocast_dtype(device_type)) if is_cast else value


def register(name: str, rule: Callable[[str], Callable[..., Any]]) -> None:
    """Register `rule(device_type)` as the implementation of the operator `fxpasses::name` under autocast."""
    for device_type in DEVICES:
        library.impl(name, rule(device_type), f"Autocast{device_type.upper()}")

    def of_another_backend(*args: Any, **kwargs: Any) -> Any:
        # Private name, checked on torch 2.11 to 2.15. A backend may be given its name after this module is loaded.
        return rule(torch._C._get_privateuse1_backend_name())(*args, **kwargs)

    library.impl(name, of_another_backend, "AutocastPrivateUse1")
