"""Functions of one part that a loop's body calls, and that ask what the parts answer differently.

    def image_size_to_num_patches(size, pinpoints, patch_size):      # for each image, in LLaVA-NeXT
        height, width = select_best_resolution(size.tolist(), pinpoints)
        ...                                                          # which compares areas and scales

To trace one answer would be wrong for other parts, and to trace the loop unrolled makes a program of each batch. In a
loop that runs part by part, such a function need not be traced: the body calls it, with the tensors and numbers of each
part. What it returns is learned by calling it while tracing, for the parts of the batch at hand and for others that
have other numbers; a size that differs between these calls is a symbol.

Only plain functions are called so, which write to no variable, attribute or element, draw no random numbers, and whose
results are tensors and integers that no parameter of theirs contributes to.

Private names, checked on torch 2.11, 2.13 and 2.15: `funcvar` and `parent` of an inlined translator, and
`symbolic_torch_function_state`, its modes.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import random
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables import ListVariable, TupleVariable
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fxpasses.dynamo.interceptions import NOT_HANDLED
from fxpasses.dynamo.runtime.host_functions import Look, Size
from fxpasses.dynamo.trace import Trace
from fxpasses.sequences.batched import Unbatched
from fxpasses.sequences.capture.lists import new_list
from fxpasses.sequences.part_functions import PartFunction, Results, Slot, register

_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "IMPORT_NAME")
_MOST_SCANNED = 64  # functions that one function may reach
_TRIALS = 16  # calls with other numbers than the batch's
_MOST_INTEGERS = 8  # of a tensor whose numbers are exchanged
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)

Arguments = tuple[list[Tensor], list[int]]


def function_that_asks(tx: Any, loop_tx: Any, known: frozenset[CodeType]) -> Any:
    """The outermost plain function that a loop's body calls, and that Dynamo is tracing; None if there is none.

    tx: Dynamo's innermost translator; loop_tx: the loop's. known: functions that could not be called.
    """
    found = None
    while tx is not None and tx is not loop_tx:
        variable: Any = getattr(tx, "funcvar", None)
        function: Any = getattr(variable, "fn", None)
        if type(variable) is UserFunctionVariable and function.__code__ not in known and _is_plain(function):
            found = function
        tx = getattr(tx, "parent", None)
    return found if tx is not None else None


def call(trace: Trace, questions: Any, tx: Any, function: FunctionType, args: Any, kwargs: Any) -> Any:
    """Dynamo's variable of what a function returns for a part; NOT_HANDLED if Dynamo has to trace it.

    questions: those of the loop that is being traced.
    """
    try:
        flat, structure = tree_flatten((_given([*args]), _given(kwargs)))
        if tx.symbolic_torch_function_state.in_torch_function_mode():
            raise Unbatched("it runs in a mode")
        tensors = [value for value in flat if isinstance(value, TensorVariable)]
        numbers = [value for value in flat if isinstance(value, SymNodeVariable)]
        slots = {id(value): Slot("tensor", at) for at, value in enumerate(tensors)}
        slots |= {id(value): Slot("number", at) for at, value in enumerate(numbers)}
        called = PartFunction(function, tuple(slots.get(id(value), value) for value in flat), structure)
        calls = questions.values([value.as_proxy().node for value in (*tensors, *numbers)])
        needed = [_example(value).requires_grad for value in tensors]
        results = _results(trace, called, [(one[: len(tensors)], one[len(tensors) :]) for one in calls], needed)
    except Unbatched:
        return NOT_HANDLED
    operands = register(called, results), [each.as_proxy() for each in tensors], [each.as_proxy() for each in numbers]
    target = torch.ops.fxpasses.part_function.default
    proxy = tx.output.create_proxy("call_function", target, operands, {}, name=function.__name__)
    found: Any = wrap_fx_proxy(tx=tx, proxy=proxy)
    made = [
        value.call_method(tx, "item", [], {}) if is_number else value
        for value, is_number in zip(found.items, results.are_numbers, strict=True)
    ]
    return _variable(tree_unflatten(made, results.structure))


def _given(value: Any) -> Any:
    """Tensors, numbers and constants, in lists, tuples and dicts, of one of Dynamo's variables."""
    if isinstance(value, dict):
        return {name: _given(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(_given, value)]
    value = value.realize()
    if isinstance(value, TensorVariable):
        return value
    if isinstance(value, SymNodeVariable) and isinstance(value.sym_num, torch.SymInt):
        return value
    if value.is_python_constant():
        found = value.as_python_constant()
        if all(isinstance(each, _CONSTANTS) for each in tree_leaves(found)):
            return found
    if type(value) in (TupleVariable, ListVariable):
        return (list if type(value) is ListVariable else tuple)(map(_given, value.items))
    raise Unbatched("a function takes something else than tensors, numbers and constants")


def _variable(value: Any) -> Any:
    if isinstance(value, tuple):
        return TupleVariable([*map(_variable, value)])
    return new_list([*map(_variable, value)]) if isinstance(value, list) else value


def _example(variable: Any) -> Any:
    return variable.as_proxy().node.meta["example_value"]


def _results(trace: Trace, called: PartFunction, given: list[Arguments], needed: list[bool]) -> Results:
    """What a function returns. Raises `Unbatched`.

    given: its tensors and numbers, for each part. needed: which of the tensors require a gradient.
    """
    assert trace.graph is not None
    before = torch.random.get_rng_state(), random.getstate()
    with trace.graph.outside(), torch.enable_grad():
        returned = [_flat(called, *one) for one in given]
        _check_gradients(called, given[0], needed)
        for other in _with_other_numbers(given):
            with contextlib.suppress(Exception):  # they may fit nothing else
                returned.append(_flat(called, *other))
    if not torch.equal(before[0], torch.random.get_rng_state()) or before[1] != random.getstate():
        torch.random.set_rng_state(before[0])
        random.setstate(before[1])
        raise Unbatched("it draws random numbers")
    (first, structure), *others = returned
    if any(other != structure or len(values) != len(first) for values, other in others):
        raise Unbatched("its results differ in kind")
    columns = [*zip(*(values for values, _ in returned), strict=True)]
    are_numbers = tuple(isinstance(value, int) for value in first)
    return Results(tuple(map(_look, columns)), are_numbers, structure)


def _flat(called: PartFunction, tensors: list[Tensor], numbers: list[int]) -> tuple[list[Any], Any]:
    """What one call returns, flat, and its structure."""
    given = [tensor.detach() for tensor in tensors]
    versions = [tensor._version for tensor in given]
    try:
        values, structure = tree_flatten(called(given, numbers))
    except Exception as error:  # the program's, which recurs when it runs
        raise Unbatched(f"it raises {type(error).__name__}") from error
    if versions != [tensor._version for tensor in given]:
        raise Unbatched("it writes to an argument")
    if not values or not all(type(value) is int or _is_plain_tensor(value) for value in values):
        raise Unbatched("it returns something else than tensors and integers")
    return values, structure


def _check_gradients(called: PartFunction, given: Arguments, needed: list[bool]) -> None:
    """Raise `Unbatched` unless results require a gradient if an argument does: a parameter that the function reads by
    itself would get none, and one that it detaches needs none."""
    tensors = [tensor.detach().requires_grad_(needs) for tensor, needs in zip(given[0], needed, strict=True)]
    try:
        results = tree_leaves(called(tensors, given[1]))
    except Exception as error:  # it may write to an argument
        raise Unbatched(f"it raises {type(error).__name__}") from error
    of_floats = [value for value in results if isinstance(value, Tensor) and value.dtype.is_floating_point]
    if any(value.requires_grad is not any(needed) for value in of_floats):
        raise Unbatched("its results require another gradient than its arguments")


def _is_plain_tensor(value: Any) -> bool:
    """Whether a result is a tensor to which no parameter contributes, as no argument requires a gradient."""
    is_plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
    return is_plain and not value.requires_grad


def _look(values: Sequence[Any]) -> Look:
    """What all calls have in common of one result."""
    tensors = [torch.tensor(value) if isinstance(value, int) else value for value in values]
    if len({(tensor.dtype, tensor.ndim) for tensor in tensors}) != 1:
        raise Unbatched("its results differ in kind")
    sizes: list[Size] = [
        one.pop() if len(one) == 1 else None for one in map(set, zip(*(t.shape for t in tensors), strict=True))
    ]
    return Look(tuple(sizes), tensors[0].dtype, tensors[0].device)


def _with_other_numbers(given: list[Arguments]) -> Iterator[Arguments]:
    """The arguments of parts, with the numbers of other parts, and others, in place of theirs."""
    chosen = random.Random(0)
    known = {int(n) for tensors, numbers in given for n in (*numbers, *_integers(tensors))}
    pool = sorted(known | {2 * number for number in known} | {number // 2 + 1 for number in known})
    for _ in range(_TRIALS if pool else 0):
        tensors, numbers = chosen.choice(given)
        others = [
            torch.tensor(chosen.choices(pool, k=tensor.numel()), dtype=tensor.dtype).view(tensor.shape)
            if _holds_integers(tensor) else tensor for tensor in tensors
        ]  # fmt: skip
        yield others, [chosen.choice(pool) for _ in numbers]


def _holds_integers(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64) and tensor.numel() <= _MOST_INTEGERS


def _integers(tensors: list[Tensor]) -> list[int]:
    return [int(number) for tensor in tensors if _holds_integers(tensor) for number in tensor.flatten().tolist()]


def _is_plain(function: Any) -> bool:
    """Whether a function, and those that it reaches by name, write to nothing but their own variables."""
    waiting, seen = [function], set[Any]()
    while waiting:
        found = waiting.pop()
        if found in seen:
            continue
        seen.add(found)
        if len(seen) > _MOST_SCANNED or not isinstance(found, FunctionType) or found.__closure__:
            return False
        if inspect.isgeneratorfunction(found) or inspect.iscoroutinefunction(found):
            return False
        for code in _codes(found.__code__):
            for instruction in dis.get_instructions(code):
                if instruction.opname in _WRITES:
                    return False
                if instruction.opname == "LOAD_GLOBAL":
                    value = found.__globals__.get(instruction.argval)
                    if isinstance(value, (Tensor, torch.nn.Module)):
                        return False
                    waiting += [value] if isinstance(value, FunctionType) else []
    return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of the comprehensions in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)
