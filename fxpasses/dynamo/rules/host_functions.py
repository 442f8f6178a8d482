"""Functions of the batch's metadata, each one operator of the graph: numbers of windows, positions, lengths of images.

    for t, h, w in grid_thw.tolist():          # transformers.vision_utils.get_vision_position_ids
        ...                                    # reshapes by h and w, with a list that grows
    return torch.cat(position_ids)

To trace these loops means to guard the number of images and the sizes of each. But nobody needs to look into them: they
read integer tensors of the batch and constants, and compute small tensors on the host. Here the operator
(`dynamo/runtime/host_functions.py`) calls the function unchanged:

    host_function = torch.ops.fxpasses.host_function("...:0", [grid_thw])        # [u0, 2], once per batch
    position_ids = host_function[0]

A size that depends on the batch is a symbol, like that of `nonzero`; if an operator asks whether it equals another, the
answer is an assumption. The call also runs once while tracing, on the batch at hand, to learn the number, ranks and
dtypes of its results, and to check that it writes to no argument.

Two tables say what is served:
- functions of transformers that vision models call before their first layer, or the program ahead of the model. Results
  that are computed already are in a dict, from which the function removes them; those calls are left to Dynamo. The
  last size of a result with several dimensions depends on constants, the others on the batch. They depend on nothing
  else, so `hoist_metadata` moves them into the prologue.
- `get_rope_index` of Qwen-VL, GLM-V and their kin, which groups the tokens of a text by `itertools.groupby`. It is a
  method of the model, so the graph is for this model alone. It runs once per batch as well if its source shows that it
  reads constants of the model alone, which are guarded; else in each step. Its results have the sizes of the tokens.

Calls with arguments other than the batch's tensors and constants, or with results that have other sizes or require a
gradient, are left to Dynamo; so are those of functions where a default device is set, and methods run in each step.

Private names, checked on torch 2.11, 2.13 and 2.15: those of the handlers' sites, `GuardBuilder.ID_MATCH`, `fn` of
`UserFunctionVariable`, and `symbolic_torch_function_state`, the translator's modes. Seen in transformers 5.23.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import ConstantVariable, ConstDictVariable, TupleVariable
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from fxpasses.dynamo.dispatch_state import as_in_new_thread
from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.rules.bound_methods import BoundMethod
from fxpasses.dynamo.rules.module_reads import Path, constants_read
from fxpasses.dynamo.runtime.host_functions import Call, Look, Size, as_tuple, register
from fxpasses.metadata.runtime.prologue import autocast_state

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

_FUNCTIONS = "torch._dynamo.variables.functions"
_TRANSFORMERS, _MODELS = "transformers.", "transformers.models."

# Functions of transformers, and the keys under which their dict `kwargs` may hold the results.
_OF_GRIDS: dict[str, tuple[str, ...]] = {
    "get_vision_cu_seqlens": ("cu_seqlens",),
    "get_vision_frame_index": ("frame_index",),
    "get_vision_interpolation_indices_and_weights": ("interp_indices", "interp_weights"),
    "get_vision_nearest_position_ids": ("position_ids",),
    "get_vision_pixel_shuffle_index": ("pixel_shuffle_index",),
    "get_vision_position_ids": ("position_ids",),
    "get_vision_temporal_merge_index": ("temporal_merge_index",),
    "get_vision_window_index": ("window_index", "cu_window_seqlens"),
}
_OF_TOKENS = "get_rope_index"

SizesOf = Callable[[Any, dict[str, Tensor]], "list[tuple[Size, ...]] | None"]  # of the results, given the arguments

handlers = Handlers()


@handlers.at(method(f"{_FUNCTIONS}.UserFunctionVariable", "call_function"), order=3)
def function(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    called: Any = getattr(self, "fn", None)
    keys = _OF_GRIDS.get(getattr(called, "__qualname__", ""))
    if keys is None or not str(called.__module__).startswith(_TRANSFORMERS):
        return NOT_HANDLED
    if _has_default_device(tx):
        return NOT_HANDLED
    given = _bound(inspect.signature(called), args, kwargs)
    if given is None or not _lacks(tx, given.pop("kwargs", None), keys):
        return NOT_HANDLED
    return _operator(trace, tx, Call(called, None, (), ()), given, _sizes_of_grids, "host_function")


@handlers.at(method(f"{_FUNCTIONS}.UserMethodVariable", "call_function"))
def method_of_model(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    bound = BoundMethod.of(self)
    if bound is None or not bound.is_defined_in(_MODELS, _OF_TOKENS) or bound.source is None:
        return NOT_HANDLED
    given = _bound(inspect.signature(bound.function), (None, *args), kwargs)
    if given is None:
        return NOT_HANDLED
    given = dict([*given.items()][1:])
    further = given.pop("kwargs", {})
    if not isinstance(further, dict):
        return NOT_HANDLED
    given |= further
    read = constants_read(bound.function, bound.module) if not _has_default_device(tx) else None
    is_guarded = read is not None and all(_is_guarded(tx, bound.owner, path) for path in read)
    operator = "host_function" if is_guarded else "host_method"
    call = Call(bound.function, weakref.ref(bound.module), (), (), read=tuple((read or {}).items()))
    result = _operator(trace, tx, call, given, _sizes_of_tokens, operator)
    if result is not NOT_HANDLED:
        install_guard(bound.source.make_guard(GuardBuilder.ID_MATCH))
    return result


def _has_default_device(tx: Any) -> bool:
    """Whether a default device is set, which prologues have not; or another mode that changes functions of torch."""
    return tx.symbolic_torch_function_state.in_torch_function_mode()


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """Dynamo's variables by the names of the parameters; None if they do not fit."""
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return None


def _lacks(tx: Any, given: Any, keys: tuple[str, ...]) -> bool:
    """Whether `given` is None, or a dict that holds none of the keys."""
    if given is None or (given.is_python_constant() and given.as_python_constant() is None):
        return True
    if not isinstance(given.realize(), ConstDictVariable):
        return False
    names = [ConstantVariable.create(key) for key in keys]
    answer = UserFunctionVariable(cast(FunctionType, _holds)).call_function(tx, [given, *names], {})
    return answer.is_python_constant() and answer.as_python_constant() is False


def _holds(given: dict[str, Any], *keys: str) -> bool:
    """Traced by Dynamo, so that a dict which the frame receives is guarded."""
    return any(key in given for key in keys)


def _is_guarded(tx: Any, owner: Any, path: Path) -> bool:
    """Have Dynamo read an attribute, and so guard it. It may make a symbol of an integer, which holds for others."""
    names = [ConstantVariable.create(name) for name in path]
    value = UserFunctionVariable(cast(FunctionType, _read)).call_function(tx, [owner, *names], {})
    return not isinstance(value.realize(), SymNodeVariable)


def _read(value: Any, *names: str) -> Any:
    for name in names:
        value = getattr(value, name)
    return value


def _operator(trace: Trace, tx: Any, call: Call, given: dict[str, Any], sizes_of: SizesOf, operator: str) -> Any:
    """The operator's results for the arguments `given`, by name; NOT_HANDLED if the call cannot be one."""
    given = {name: value.realize() for name, value in given.items()}
    tensors = {name: value for name, value in given.items() if value.is_tensor()}
    others = {name: value for name, value in given.items() if name not in tensors}
    if not tensors or trace.graph is None or not all(value.is_python_constant() for value in others.values()):
        return NOT_HANDLED
    constants = tuple((name, value.as_python_constant()) for name, value in others.items())
    if not all(value is None or isinstance(value, (bool, int, float, str)) for _, value in constants):
        return NOT_HANDLED
    values = trace.graph.tensors([tensor.as_proxy().node for tensor in tensors.values()])
    if values is None:
        return NOT_HANDLED
    call = replace(call, names=tuple(tensors), constants=constants)
    results = _results(call, values)
    sizes = None if results is None else sizes_of(results, dict(zip(tensors, values, strict=True)))
    if results is None or sizes is None:
        return NOT_HANDLED
    looks = (Look(size, r.dtype, r.device) for size, r in zip(sizes, as_tuple(results), strict=True))
    name = register(replace(call, looks=tuple(looks)))
    target = getattr(torch.ops.fxpasses, operator).default
    operands = (name, [tensor.as_proxy() for tensor in tensors.values()])
    proxy = tx.output.create_proxy("call_function", target, operands, {}, name=call.function.__name__)
    found: Any = wrap_fx_proxy(tx=tx, proxy=proxy)
    return TupleVariable(found.items) if isinstance(results, tuple) else found.items[0]


def _results(call: Call, values: list[Tensor]) -> Tensor | tuple[Tensor, ...] | None:
    """The results for the traced batch; None if the call raises, writes to an argument, or returns anything but
    tensors without a gradient."""
    copies = [value.clone() for value in values]
    try:
        with as_in_new_thread(autocast_state()), torch.enable_grad():
            results = call(copies)
    except Exception:  # an error of the user's program recurs when Dynamo has traced it
        return None
    are_plain = all(
        type(found) is Tensor and found.layout is torch.strided and not found.requires_grad
        for found in as_tuple(results)
    )
    writes = any(not torch.equal(copy, value) for copy, value in zip(copies, values, strict=True))
    return results if are_plain and not writes else None


def _sizes_of_grids(results: Any, given: dict[str, Tensor]) -> list[tuple[Size, ...]] | None:
    found = as_tuple(results)
    if not all(result.ndim for result in found):
        return None
    return [(*[None] * max(result.ndim - 1, 1), *result.shape[1:][-1:]) for result in found]


def _sizes_of_tokens(results: Any, given: dict[str, Tensor]) -> list[tuple[Size, ...]] | None:
    """[axes, B, T] and [B, 1] for `input_ids` of [B, T]."""
    tokens = given.get("input_ids")
    if tokens is None or tokens.ndim != 2 or not isinstance(results, tuple):
        return None
    place, (rows, columns) = [*given].index("input_ids"), tokens.shape
    axes = results[0].shape[0] if results and results[0].ndim else 0
    if [tuple(result.shape) for result in results] != [(axes, rows, columns), (rows, 1)]:
        return None
    return [(axes, (place, 0), (place, 1)), ((place, 0), 1)]
