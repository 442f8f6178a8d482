"""Positions of text and images (`get_rope_index` of Qwen-VL, GLM-V and their kin), in one graph.

transformers computes them with Python's `itertools.groupby` over the type of each token, which Dynamo does not trace
for data. Tracing it would guard the type of every token, and so compile for each batch. The positions are metadata of
the same sizes as the tokens: here one operator of the graph (`dynamo/runtime/rope_index.py`) runs the method unchanged.
The method also runs once while tracing, on the batch at hand, to check that its results have the sizes of the tokens,
and that it writes to no argument. The operator refers to its model, so the graph is for that model alone.

Calls with arguments other than the batch's tensors and constants, or with other results, are left to Dynamo.

Private names, checked on torch 2.11, 2.13 and 2.15: those of the handlers' sites, and `GuardBuilder.ID_MATCH`. Seen in
transformers 5.23.
"""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables.builder import wrap_fx_proxy

from fxpasses.dynamo.dispatch_state import as_in_new_thread
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.rules.bound_methods import BoundMethod
from fxpasses.dynamo.runtime.rope_index import Call, register
from fxpasses.metadata.runtime.prologue import autocast_state

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_NAME, _PACKAGE = "get_rope_index", "transformers.models."

handlers = Handlers()


@handlers.at(method("torch._dynamo.variables.functions.UserMethodVariable", "call_function"))
def call(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    bound = BoundMethod.of(self)
    if bound is None or not bound.is_defined_in(_PACKAGE, _NAME):
        return NOT_HANDLED
    function, model = bound.function, bound.module
    given = _arguments(inspect.signature(function), args, kwargs)
    if given is None or bound.source is None or trace.graph is None:
        return NOT_HANDLED
    tensors, constants = given
    nodes = [tensor.as_proxy().node for tensor in tensors.values()]
    values = trace.graph.tensors(nodes)
    if values is None:
        return NOT_HANDLED
    dtypes = _dtypes(function, model, dict(zip(tensors, values, strict=True)), constants)
    if dtypes is None:
        return NOT_HANDLED
    install_guard(bound.source.make_guard(GuardBuilder.ID_MATCH))
    name = register(Call(weakref.ref(model), function, tuple(tensors), tuple(constants.items()), dtypes))
    operands = (name, [tensor.as_proxy() for tensor in tensors.values()])
    proxy = tx.output.create_proxy("call_function", torch.ops.fxpasses.rope_index.default, operands, {})
    return wrap_fx_proxy(tx=tx, proxy=proxy)


def _arguments(signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The tensor arguments by name, `input_ids` first, and the others; None if one is neither tensor nor constant."""
    try:
        given = dict(signature.bind(None, *args, **kwargs).arguments)
    except TypeError:
        return None
    given.pop(next(iter(signature.parameters)))
    found = {"input_ids": given.pop("input_ids", None), **given, **given.pop("kwargs", {})}
    found.pop("kwargs", None)
    found = {name: value.realize() for name, value in found.items() if value is not None}
    tensors = {name: value for name, value in found.items() if value.is_tensor()}
    others = {name: value for name, value in found.items() if name not in tensors}
    if "input_ids" not in tensors or not all(value.is_python_constant() for value in others.values()):
        return None
    constants = {name: value.as_python_constant() for name, value in others.items()}
    simple = all(value is None or isinstance(value, (bool, int, float, str)) for value in constants.values())
    return (tensors, constants) if simple else None


def _dtypes(
    function: Any, model: torch.nn.Module, values: dict[str, torch.Tensor], constants: dict[str, Any]
) -> tuple[torch.dtype, torch.dtype] | None:
    """The dtypes of the results for the traced batch; None if the method raises, or a result has other sizes."""
    copies = {name: value.clone() for name, value in values.items()}
    try:
        with as_in_new_thread(autocast_state()), torch.no_grad():
            positions, deltas = function(model, **copies, **constants)
        rows, columns = values["input_ids"].shape
    except Exception:  # an error of the user's program recurs when Dynamo has traced it
        return None
    look_as_expected = positions.shape == (3, rows, columns) and deltas.shape == (rows, 1)
    writes = any(not torch.equal(copies[name], value) for name, value in values.items())
    return (positions.dtype, deltas.dtype) if look_as_expected and not writes else None
