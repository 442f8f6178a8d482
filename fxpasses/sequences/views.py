"""The rules of `batching.py` for operators that only rearrange elements: reshapes, transposes, slices and splits."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxpasses.graph.calls import OperatorCall, swaps_last_dimensions
from fxpasses.sequences.batched import Batched, Unbatched, Values, constant_of, place_of


def reshaped(values: Values, node: Node, call: OperatorCall, name: str, first: Node, state: Batched) -> Batched:
    dims = values.dims_of(node)
    before, after = values.shape(first), values.shape(node)
    if len(state.dims) > 1 or bool(state.dims) != bool(dims):
        raise Unbatched(f"`{name}` mixes rows with other dimensions")
    if not dims:
        found = values.unsqueezed(state.node, len(after) - len(before) if name == "expand" else 0)
        sizes = [values.graph.count, *(constant_of(node, size) for size in after)]
        return Batched(values.graph.emit("expand" if name == "expand" else "reshape", found, sizes), ())
    at, to = state.dims[0], dims[0]
    keeps_place = at - len(before) == to - len(after)
    if not (keeps_place if name == "expand" else math.prod(before[:at]) == math.prod(after[:to])):
        raise Unbatched(f"`{name}` mixes rows with other dimensions")
    return values.as_it_is(node, dims)


def rearranged(values: Values, node: Node, call: OperatorCall, name: str, first: Node, state: Batched) -> Batched:
    ndim = len(values.shape(first))
    order = list(range(ndim))
    if name == "permute":
        order = [place_of(dim, ndim) for dim in call.sequence("dims")]
    elif name == "transpose" or swaps_last_dimensions(node):
        pair = (call.argument("dim0"), call.argument("dim1")) if name == "transpose" else (-2, -1)
        one, other = (place_of(dim, ndim) for dim in pair)
        order[one], order[other] = order[other], order[one]
    else:
        return _indexed(values, node, call, name, first, state)
    dims = tuple(sorted(order.index(at) for at in state.dims))
    if not state.dims:
        order = [0, *(at + 1 for at in order)]
    return Batched(values.graph.emit(torch.permute, state.node, order), dims, state.hides)


def _indexed(values: Values, node: Node, call: OperatorCall, name: str, first: Node, state: Batched) -> Batched:
    ndim = len(values.shape(first))
    each = not state.dims
    if name in ("unsqueeze", "squeeze"):
        dim = call.argument("dim")
        if type(dim) is not int:
            raise Unbatched(f"`{name}` of unknown dimensions")
        dim = place_of(dim, ndim + (name == "unsqueeze"))
        if dim in state.dims and name == "squeeze":
            raise Unbatched("`squeeze` of the rows of a part, which may be one")
        target = getattr(torch, name)
        by = 1 if name == "unsqueeze" else -1
        if name == "squeeze" and len(values.shape(node)) == ndim:
            return state
        dims = tuple(at + by if at > dim or (at == dim and by > 0) else at for at in state.dims)
        return Batched(values.graph.emit(target, state.node, dim + each), dims, state.hides)
    if name == "narrow":
        dim = place_of(call.argument("dim"), ndim)
        if dim in state.dims:
            raise Unbatched("a slice of a part")
        bounds = call.argument("start"), call.argument("length")
        return Batched(values.graph.emit(torch.narrow, state.node, dim + each, *bounds), state.dims)
    if name != "getitem":
        raise Unbatched(f"`{name}` has no rule for parts")
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return _sliced(values, node, index, ndim, state)


def _sliced(values: Values, node: Node, index: tuple[Any, ...], ndim: int, state: Batched) -> Batched:
    """`x[...]` by numbers, slices, None and an ellipsis."""
    given = sum(part is not None and part is not Ellipsis for part in index)
    full: list[Any] = []
    for part in index:
        full += [slice(None)] * (ndim - given) if part is Ellipsis else [part]
    full += [slice(None)] * (ndim - sum(part is not None for part in full))
    if any(isinstance(part, (Node, Tensor, list)) or type(part) is bool for part in full):
        raise Unbatched("an index that is no constant")
    at, dims, out = 0, [], 0
    for part in full:
        if part is None:
            out += 1
            continue
        if at in state.dims:
            if part != slice(None):
                raise Unbatched("a slice of a part")
            dims.append(out)
        elif isinstance(part, slice) and Node in map(type, (part.start, part.stop, part.step)):
            raise Unbatched("a slice that is no constant")
        out += not isinstance(part, int)
        at += 1
    if not state.dims:
        full = [slice(None), *full]
    return Batched(values.graph.emit(operator.getitem, state.node, tuple(full)), tuple(dims))


def split(values: Values, node: Node, name: str) -> list[Batched]:
    """`chunk`, `split` and `unbind` in a dimension that is not that of the rows."""
    call = OperatorCall.of(node)
    first = call.argument("input", node.args[0])
    state, ndim = values.known[first], len(values.shape(first))
    dim = call.argument("dim", 0)
    if type(dim) is not int or place_of(dim, ndim) in state.dims or len(state.dims) > 1:
        raise Unbatched(f"`{name}` of the rows of a part")
    dim = place_of(dim, ndim)
    how = {"chunk": ["chunks"], "split": ["split_size"], "unbind": []}[name]
    given = [call.argument(parameter) for parameter in how]
    if any(isinstance(operand, Node) for operand in given):
        raise Unbatched(f"`{name}` by a number that is no constant")
    found = values.graph.emit(getattr(torch, name), state.node, *given, dim=dim + (not state.dims))
    dims = tuple(at - (name == "unbind" and at > dim) for at in state.dims)
    return [Batched(part, dims) for part in found]
