"""Symbolic sizes: queries to PyTorch's shape environment.

Private names, checked on torch 2.11, 2.13 and 2.15: `free_symbols`, `free_unbacked_symbols` and `constrain_unify` of
`torch.fx.experimental.symbolic_shapes`, `SymT` and `symbol_is_type` of `torch.utils._sympy.symbol`,
`torch._guards.detect_fake_mode`, `ShapeEnv.create_symintnode` and the attributes `SymInt.node.expr` and
`SymInt.node._expr`; `ShapeEnv.backed_var_to_val` and `ShapeEnv.real_tensor_prop_unbacked_vals`, dicts from symbols to
values; the numbers `ShapeEnv._version_counter`, and `ShapeEnv._replacements_version_counter`, which 2.13 has.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import constrain_unify, free_unbacked_symbols
from torch.fx.experimental.symbolic_shapes import free_symbols as _free_symbols
from torch.utils._sympy.symbol import SymT, symbol_is_type

from fxpasses.graph.bodies import nodes_in

log = logging.getLogger(__name__)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_symbolic(value: Any) -> bool:
    return isinstance(value, _SYMBOLIC)


def is_unbacked(value: Any) -> bool:
    """Whether a number, or a tensor's size, is known only at run time."""
    return bool(free_unbacked_symbols(value))


def unbacked_symbols(value: Any) -> set[Any]:
    """The unbacked symbols in a symbolic number, or in a tensor's size, strides and offset."""
    return set(free_unbacked_symbols(value))


def free_symbols(value: Any) -> set[Any]:
    """The symbols in a symbolic number, or in a tensor's size, strides and offset."""
    return set(_free_symbols(value))


def has_unbacked_floats(value: Any) -> bool:
    """Whether a number depends on a float that is known only at run time."""
    return any(symbol_is_type(found, SymT.UNBACKED_FLOAT) for found in unbacked_symbols(value))


def binds_symbols(gm: GraphModule) -> bool:
    """Whether a graph, or a body in it, has numbers or sizes that are known only at run time."""
    return any(node.meta.get("unbacked_bindings") for node in nodes_in(gm))


def expression(value: Any) -> Any:
    """The current expression of a symbolic number, or the number itself."""
    return value.node.expr if is_symbolic(value) else value


def constant(value: Any) -> int | float | bool | None:
    """The number, if it is a constant or a symbolic number with a constant value, else None."""
    found = expression(value)
    if isinstance(found, (bool, int, float)):
        return found
    if found == sympy.true or found == sympy.false:
        return bool(found)
    if isinstance(found, sympy.Integer):
        return int(found)
    if isinstance(found, sympy.Float):
        return float(found)
    return None


def symbol(value: Any) -> Any:
    """The symbol, if a symbolic integer is a single symbol, else None."""
    found = expression(value)
    return found if isinstance(found, sympy.Symbol) and isinstance(value, torch.SymInt) else None


def is_younger(found: Any, other: Any) -> bool:
    """Whether a symbol known at run time is `other`, which is one too, or was created after it."""
    if not symbol_is_type(found, SymT.UNBACKED_INT):
        return False
    return int(found.name[1:]) >= int(other.name[1:])


def symbol_as_created(value: torch.SymInt) -> Any:
    """The symbol with which a graph's input was created, even if Dynamo has specialised it since."""
    return value.node._expr


def bytes_of(tensor: torch.Tensor) -> int | None:
    """A fake tensor's size in bytes at the traced sizes; None if a size is known only at run time."""
    elements = elements_of(tensor)
    return None if elements is None else elements * tensor.element_size()


def elements_of(tensor: torch.Tensor) -> int | None:
    """The number of a fake tensor's elements at the traced sizes; None if a size is known only at run time."""
    sizes = sizes_of(tensor)
    return None if sizes is None else math.prod(sizes)


def sizes_of(tensor: torch.Tensor) -> list[int] | None:
    """A fake tensor's traced sizes; None if one is known only at run time."""
    if any(isinstance(size, torch.SymInt) and size.node.is_nested_int() for size in tensor.shape):
        return None  # ragged
    sizes = [size if isinstance(size, int) else size.node.hint for size in tensor.shape]
    return None if None in sizes else [int(size) for size in sizes]


def batch_sizes_of(tensor: torch.Tensor) -> list[int] | None:
    """A fake tensor's sizes in the batch being traced; None if one depends on more than the batch.

    To be called while the graph is compiled. Nothing may be assumed from these sizes: another batch has others.
    """
    if any(isinstance(size, torch.SymInt) and size.node.is_nested_int() for size in tensor.shape):
        return None  # ragged
    sizes = [size if isinstance(size, int) else in_batch(size) for size in tensor.shape]
    return None if None in sizes else [int(size) for size in sizes]


def in_batch(size: Any) -> Any:
    """The traced value of a number; if it is unbacked, its value for the batch, if known (`dynamo/trace.py`)."""
    if size.node.hint is not None:
        return size.node.hint
    shape_env, unbacked = size.node.shape_env, unbacked_symbols(size)
    of_batch, of_sizes = shape_env.real_tensor_prop_unbacked_vals, shape_env.backed_var_to_val
    values = {found: (of_batch if found in unbacked else of_sizes).get(found) for found in free_symbols(size)}
    return None if None in values.values() else expression(size).xreplace(values)


def symbols_in_batch(tensor: torch.Tensor) -> dict[Any, Any]:
    """The values of the symbols in a tensor's sizes and strides for the batch being traced, where they are known."""
    found: dict[Any, Any] = {}
    for size in (*tensor.shape, *tensor.stride()):
        if isinstance(size, torch.SymInt) and not size.node.is_nested_int():
            known = size.node.shape_env.real_tensor_prop_unbacked_vals
            for each in free_symbols(size) - found.keys():
                value = size.node.shape_env.backed_var_to_val.get(each)
                value = known.get(each) if value is None else value
                if value is not None:
                    found[each] = value
    return found


class BatchValues(dict[Any, Any]):
    """The values of symbols for a batch, for `in_batch`. It is False, so that PyTorch does not decide by them."""

    def __bool__(self) -> bool:
        return False


def note_batch_values(value: Any, values: dict[Any, int]) -> None:
    """Let `in_batch` know the values of unbacked symbols. value: a size, or a tensor with sizes, that has some."""
    sizes: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else [value]
    for size in sizes:
        if is_symbolic(size):
            shape_env = size.node.shape_env
            if not isinstance(shape_env.real_tensor_prop_unbacked_vals, BatchValues):
                shape_env.real_tensor_prop_unbacked_vals = BatchValues(shape_env.real_tensor_prop_unbacked_vals)
            shape_env.real_tensor_prop_unbacked_vals.update(values)
            return


def hint_of(size: Any) -> int:
    """The traced value of a size; 0 if it is known only at run time."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def declare_equal(first: Any, second: Any) -> None:
    """Declare to the shape environment that two numbers, or the sizes of two tensors, are equal."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        for one, other in zip(first.shape, second.shape, strict=False):
            declare_equal(one, other)
        return
    if not isinstance(first, torch.SymInt) or not isinstance(second, torch.SymInt):
        return
    if expression(first) == expression(second):
        return
    if symbol(first) is not None and symbol(second) is not None:
        constrain_unify(first, second)
        _forget_expressions(first.node.shape_env)
    else:
        torch._check(first == second)


def _forget_expressions(shape_env: Any) -> None:
    """Advance the counters that invalidate cached expressions and replacements: `constrain_unify` does not do so."""
    for counter in ("_version_counter", "_replacements_version_counter"):
        if hasattr(shape_env, counter):
            setattr(shape_env, counter, getattr(shape_env, counter) + 1)


def scalar_tensor(number: torch.SymFloat) -> torch.Tensor:
    """A fake CPU tensor [] of dtype float64, which carries a number across the boundary of a graph."""
    from torch._guards import detect_fake_mode

    fake_mode: Any = detect_fake_mode()
    with fake_mode, torch.no_grad():
        return torch.empty((), dtype=torch.float64, device="cpu")


def integer_behind(flag: torch.SymBool) -> torch.SymInt | None:
    """`u0` for a flag `Eq(u0, 1)`, Dynamo's form of a bool that is read from a tensor; else None."""
    found = expression(flag)
    if not isinstance(found, sympy.Eq) or not isinstance(found.lhs, sympy.Symbol) or found.rhs != 1:
        return None
    return flag.node.shape_env.create_symintnode(found.lhs, hint=None)
