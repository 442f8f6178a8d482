"""`mask[start : start + n]` where torch creates a symbol for the size of the slice: define it by the bounds.

Torch 2.11 creates one for all data-dependent bounds, later versions for few. Such a symbol is created and queried
inside one operator (`mask[a:b, a:b] = block`), so no node of the graph defines it; its bounds do.

The size of a slice whose node binds a symbol may become known later: `x[:n]` of max(n, m) rows has n rows. When
AOTAutograd runs the node again it expects another new symbol, and raises `possible memo disaster` or `should have been
constant`, under stock PyTorch with its capture flags as well. Here such a node loses its binding, and the sizes of all
nodes after it are computed anew.

PyTorch asserts that `x.masked_select(mask)` has no more elements than `x`, but a larger mask broadcasts `x`: here `x`
is broadcast first.

Private names, checked on torch 2.11, 2.13 and 2.15: `torch._subclasses.fake_impls.op_implementations_dict`, whose
functions run an operator on fake tensors, given the fake mode, the operator and its arguments;
`symbolic_shapes.rebind_unbacked`, which AOTAutograd calls with the result of each node that it runs again; and
`SymNode._expr`, an expression without what was learned after its creation.
"""

from __future__ import annotations

import sys
from typing import Any

import sympy
import torch
from torch._subclasses import fake_impls
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Max, Min

from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, Site, method
from fxpasses.dynamo.trace import Definition, Trace
from fxpasses.graph.calls import operator_of
from fxpasses.graph.symbols import expression, is_unbacked, symbol

_IMPORTED_BY = ("torch._inductor.fx_utils", "torch._inductor.ir")

handlers = Handlers()


@handlers.at(
    Site("implementation of slices", lambda: [(fake_impls.op_implementations_dict, torch.ops.aten.slice.Tensor)]),
    without="a slice whose bounds depend on the batch may break the graph",
)
def slice_tensor(trace: Trace, proceed: Proceed, mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    result = proceed(mode, func, *args, **kwargs)
    if trace.graph is None or trace.graph.output.shape_env is not mode.shape_env:
        return result
    tensor, dimension, start, end, step = _arguments(*args, **kwargs)
    size = result.shape[dimension]
    if step == 1 and symbol(size) is not None and is_unbacked(size):
        bounds = [expression(number) for number in (tensor.shape[dimension], start, end)]
        definition = _definition(trace, *map(sympy.sympify, bounds))
        if definition is not None and not definition.value.has(symbol(size)):
            trace.definitions[symbol(size)] = definition
    return result


@handlers.at(
    Site(
        "implementation of masked_select",
        lambda: [(fake_impls.op_implementations_dict, torch.ops.aten.masked_select.default)],
    ),
    without="`x.masked_select(mask)` fails where the mask has more elements",
)
def masked_select(trace: Trace, proceed: Proceed, mode: Any, func: Any, *tensors: Any, **named: Any) -> Any:
    if named or len(tensors) != 2:
        return NOT_HANDLED
    x, mask = tensors
    if trace.graph is None or trace.graph.output.shape_env is not mode.shape_env:
        return NOT_HANDLED
    if [*map(expression, x.shape)] == [*map(expression, mask.shape)]:  # asks nothing
        return NOT_HANDLED
    with mode:
        return proceed(mode, func, torch.broadcast_tensors(x, mask)[0], mask)


@handlers.at(
    method("torch.fx.experimental.symbolic_shapes", "rebind_unbacked", imported_by=_IMPORTED_BY),
    without="a slice whose size is learned after it was taken may not compile",
)
def rebind(trace: Trace, proceed: Proceed, shape_env: Any, n: Node, result: Any) -> Any:
    bindings = n.meta.get("unbacked_bindings") or {}
    if operator_of(n) in ("getitem", "autograd_function_apply") or n.target is torch.ops.aten.slice.Tensor:
        known = [bound for bound, path in bindings.items() if _is_known(bound, pytree.key_get(result, path))]
        if known:
            n.meta["unbacked_bindings"] = {b: path for b, path in bindings.items() if b not in known}
    return NOT_HANDLED


def _is_known(bound: Any, size: Any) -> bool:
    """Whether the size of a slice, computed again, is not a new symbol."""
    if not isinstance(size, torch.SymInt) or size.node.hint is not None:
        return False
    created = size.node._expr
    return created == bound or not created.is_Symbol


def _arguments(
    tensor: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> tuple[torch.Tensor, int, Any, Any, int]:
    return tensor, dim, 0 if start is None else start, sys.maxsize if end is None else end, step


def _definition(trace: Trace, size: Any, start: Any, end: Any) -> Definition | None:
    """The length of `[start:end]` of `size` elements; None if a bound has no hint."""
    bounds, conditions = [], []
    for bound in (start, end):
        value = trace.number(bound)
        if value is None:
            return None
        if bound.free_symbols:
            conditions.append(bound >= 0 if value >= 0 else bound < 0)  # a negative bound counts from the end
        bounds.append(Min(bound, size) if value >= 0 else Max(bound + size, 0))
    return Definition(Max(bounds[1] - bounds[0], 0), tuple(conditions))
