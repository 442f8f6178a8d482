"""Products that round by their sizes, for tests: what equals eager mode bit for bit must not rest on one processor.

A library may compute a row of a product of 12 rows otherwise than one of a product of 4: MKL does so on processors with
AVX-512, and not on others. With `FXPASSES_ROUND_BY_SIZES=1`, each product of floating-point matrices on the CPU gets an
error in the last place, which depends on its sizes alone. A program that makes eager mode's calls on eager mode's sizes
is still equal to it bit for bit; one that makes others is not.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BY_SIZES = os.environ.get("FXPASSES_ROUND_BY_SIZES", "0") != "0"

IS_KNOWN = hasattr(torch.library, "get_kernel")  # which torch 2.11 may lack

# Where the first of the two matrices stands among the arguments.
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}

_active: list[Any] = []  # an override ends with its library


@contextlib.contextmanager
def by_sizes() -> Iterator[None]:
    """Products on the CPU round by their sizes, whoever calls them: eager mode or compiled code."""
    library = round_by_sizes()
    yield
    if library is not None:
        library._destroy()
        _active.remove(library)


def round_by_sizes() -> Any:
    """The same from now on; returns what ends it, or None where it holds already."""
    if _active:
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name, first in _PRODUCTS.items():
            for overload in ("", ".out"):
                kernel = torch.library.get_kernel(f"aten::{name}{overload}", "CPU")
                rounded = functools.partial(_rounded, kernel, first)
                library.impl(f"{name}{overload}", rounded, "CPU", with_keyset=True)
    _active.append(library)
    return library


@torch.compiler.disable  # a kernel that a compiled frame calls is none of its program
def _rounded(kernel: Any, first: int, keys: Any, *args: Any, **kwargs: Any) -> Tensor:
    product = kernel.call_boxed(keys, *args, **kwargs)
    if product.is_floating_point():
        product.mul_(_errors(*args[first].shape[-2:], product.shape[-1], product.dtype))
    return product


@functools.lru_cache(maxsize=4096)
def _errors(rows: int, depth: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Factors [columns] around 1."""
    places = torch.arange(columns, dtype=torch.int64)
    steps = (rows * 7 + depth * 13 + places * 5) * 2654435761 // 65536 % 3 - 1
    return (1 + steps * torch.finfo(dtype).eps).to(dtype)
