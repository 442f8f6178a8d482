"""Functions of one part that a loop's body calls, and that ask what the parts answer differently.

    def image_size_to_num_patches(size, pinpoints, patch_size):      # for each image, in LLaVA-NeXT
        height, width = select_best_resolution(size.tolist(), pinpoints)
        ...                                                          # which compares areas and scales

To trace one answer would be wrong for other parts, and to trace the loop unrolled makes a program of each batch. In a
loop that runs part by part, such a function need not be traced: the body calls it, with the tensors and numbers of each
part. It has to be one that computes nothing but numbers and slices (`pure_functions.py`).

Private names, checked on torch 2.11, 2.13 and 2.15: `funcvar` and `parent` of an inlined translator, and
`symbolic_torch_function_state`, its modes.
"""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

import torch
from torch._dynamo.variables import ListVariable, TupleVariable
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.utils._pytree import tree_flatten

from fxpasses.dynamo.interceptions import NOT_HANDLED
from fxpasses.sequences.capture.kinds import Each, Kind, Kinds, NotPure, Several, Tensor, View, kinds_of
from fxpasses.sequences.capture.pure_functions import may_be_pure, results_of
from fxpasses.sequences.part_functions import Integers, PartFunction, Slice, Slot, register


def function_that_asks(tx: Any, loop_tx: Any, known: frozenset[CodeType]) -> Any:
    """The outermost function that a loop's body calls, that Dynamo is tracing, and that may be called; None if there is
    none.

    tx: Dynamo's innermost translator; loop_tx: the loop's. known: functions that could not be called.
    """
    found = None
    while tx is not None and tx is not loop_tx:
        variable: Any = getattr(tx, "funcvar", None)
        function: Any = getattr(variable, "fn", None)
        if type(variable) is UserFunctionVariable and function.__code__ not in known and may_be_pure(function):
            found = function
        tx = getattr(tx, "parent", None)
    return found if tx is not None else None


def call(tx: Any, function: FunctionType, args: Any, kwargs: Any) -> Any:
    """Dynamo's variable of what a function returns for a part; NOT_HANDLED if Dynamo has to trace it."""
    if tx.symbolic_torch_function_state.in_torch_function_mode():
        return NOT_HANDLED
    tensors: list[Any] = []
    try:
        given = [_given(each) for each in args], {name: _given(each) for name, each in kwargs.items()}
        flat, structure = tree_flatten(given)
        tensors = [value for value in flat if isinstance(value, TensorVariable)]
        positional, named = given
        kinds = [_kinds(each, tensors) for each in positional], {n: _kinds(each, tensors) for n, each in named.items()}
        found = results_of(function, *kinds)
    except NotPure:
        return NOT_HANDLED
    numbers = [value for value in flat if isinstance(value, SymNodeVariable)]
    slots = {id(value): Slot("tensor", at) for at, value in enumerate(tensors)}
    slots |= {id(value): Slot("number", at) for at, value in enumerate(numbers)}
    called = PartFunction(function, tuple(slots.get(id(value), value) for value in flat), structure)
    operands = register(called, _results(found)), [x.as_proxy() for x in tensors], [x.as_proxy() for x in numbers]
    target = torch.ops.fxpasses.part_function.default
    proxy = tx.output.create_proxy("call_function", target, operands, {}, name=function.__name__)
    made: Any = wrap_fx_proxy(tx=tx, proxy=proxy)
    if isinstance(found, View):
        return made.items[0]
    integers = [value.call_method(tx, "item", [], {}) for value in made.items]
    return integers[0] if found == "int" else TupleVariable(integers)


def _given(value: Any) -> Any:
    """Tensors, numbers and constants, in lists and tuples, of one of Dynamo's variables."""
    value = value.realize()
    if isinstance(value, TensorVariable):
        return value
    if isinstance(value, SymNodeVariable) and isinstance(value.sym_num, torch.SymInt):
        return value
    if value.is_python_constant():
        found = value.as_python_constant()
        kinds_of(found)
        return found
    if type(value) in (TupleVariable, ListVariable):
        return (list if type(value) is ListVariable else tuple)(map(_given, value.items))
    raise NotPure("it takes something else than tensors, numbers and constants")


def _kinds(value: Any, tensors: list[Any]) -> Kinds:
    """The kinds of an argument, as above."""
    if isinstance(value, TensorVariable):
        example = value.as_proxy().node.meta["example_value"]
        if example.layout is not torch.strided:
            raise NotPure("it takes a tensor of another layout")
        at = next(at for at, each in enumerate(tensors) if each is value)
        return frozenset({Tensor(at, example.ndim, example.dtype in (torch.int32, torch.int64))})
    if isinstance(value, SymNodeVariable):
        return frozenset({"int"})
    if type(value) is tuple:
        return frozenset({Several(tuple(_kinds(each, tensors) for each in value))})
    if type(value) is list:
        return frozenset({Each(frozenset[Kind]().union(*(_kinds(each, tensors) for each in value)))})
    return kinds_of(value)


def _results(found: Kind) -> Integers | Slice:
    if isinstance(found, View):
        return Slice(found.of.at, found.dims)
    return Integers(len(found.items) if isinstance(found, Several) else 0)
