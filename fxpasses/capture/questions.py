"""Questions of the user's program that Dynamo gives up on before it asks for a number: they are put as one.

`if tensor:`, `bool(tensor)`, `torch.equal(a, b)`, `torch.allclose(a, b)` and `3 in lengths.tolist()` on metadata. Each
becomes the comparison of a symbol, which has a hint (`capture/hints.py`). What is no metadata takes Dynamo's own way.

Private names, checked on torch 2.11, 2.13 and 2.15, all looked up in `patches`: the `dispatch_table` of the classes
below `InstructionTranslatorBase` (a list of handlers by opcode, called with the translator and the instruction),
`BuiltinVariable.call_bool`, `TorchInGraphFunctionVariable.call_function`, `TensorVariable.call_method`, and
`variables.lists.iter_contains`.
"""

from __future__ import annotations

import dis
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import symbolic_convert, utils, variables
from torch._dynamo.variables import lists
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._subclasses import fake_impls

from fxpasses.capture.hints import hints_for, run_node_with_hints
from fxpasses.capture.recorded_outputs import recording_patches
from fxpasses.capture.skip_patches import (
    asks_for_tokens,
    counted,
    is_grown_list,
    joined_list,
    known_number,
    loop_patch,
    skip_patches,
    truth_if_experts_have_tokens,
)
from fxpasses.capture.slices import slice_with_hints
from fxpasses.capture.stored_numbers import storing_patches
from fxpasses.graph.symbols import is_unbacked

Patch = tuple[Any, Any, Any]  # where (an object, a list or a dict), under which name or index, and what instead


def patches() -> Iterator[Patch]:
    """What is put into Dynamo for the time of a trace. Raises where torch lacks a name."""
    yield from skip_patches()
    yield from recording_patches()
    yield from storing_patches()
    yield utils, "run_node", run_node_with_hints(utils.run_node)
    yield BuiltinVariable, "call_bool", _call_bool(BuiltinVariable.call_bool)
    yield lists, "iter_contains", _iter_contains(lists.iter_contains)
    yield TensorVariable, "call_method", _tensor_method(TensorVariable.call_method)
    yield TorchInGraphFunctionVariable, "call_function", _torch_function(TorchInGraphFunctionVariable.call_function)
    slice_tensor = torch.ops.aten.slice.Tensor
    implementations = fake_impls.op_implementations_dict
    yield implementations, slice_tensor, slice_with_hints(implementations[slice_tensor])
    for table in _dispatch_tables():
        for opcode, handler in enumerate(table):
            name = dis.opname[opcode]
            wrapper = (_jump(handler, name) or loop_patch(handler, name)) if handler is not None else None
            if wrapper is not None:
                yield table, opcode, wrapper


def _dispatch_tables() -> Iterator[list[Any]]:
    waiting = [symbolic_convert.InstructionTranslatorBase]
    while waiting:
        translator = waiting.pop()
        waiting += translator.__subclasses__()
        if "dispatch_table" in vars(translator):
            yield translator.dispatch_table


def _jump(handler: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """`if tensor:`. The jumps that keep the tensor on the stack (`a or b`) keep it."""
    if "JUMP" not in name or not ("IF_TRUE" in name or "IF_FALSE" in name):
        return None

    def jump(tx: Any, instruction: Any) -> Any:
        if name.startswith("POP_JUMP") and is_grown_list(tx, tx.stack[-1]):
            tx.pop()
            if "IF_TRUE" in name:
                tx.jump(instruction)
            return None
        if not isinstance(tx.stack[-1], (TensorVariable, SymNodeVariable)) or _is_assertion(tx):
            return handler(tx, instruction)
        truth = None
        if name.startswith("POP_JUMP"):
            truth = truth_if_experts_have_tokens(tx, instruction, "IF_TRUE" in name)
        if truth is None and isinstance(tx.stack[-1], TensorVariable):
            truth = _truth(tx, tx.stack[-1])
        if truth is None:
            return handler(tx, instruction)
        value = tx.pop()
        if truth is ("IF_TRUE" in name):
            if "OR_POP" in name:
                tx.push(value)
            tx.jump(instruction)
        return None

    return jump


def _is_assertion(tx: Any) -> bool:
    """Whether the jump is that of `assert tensor`, which becomes an assertion in the graph."""
    return tx.instructions[tx.instruction_pointer].opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")


def _truth(tx: Any, tensor: Any) -> bool | None:
    """The truth of a tensor of metadata with one element, or None."""
    hints = hints_for(tx.output)
    example = tensor.as_proxy().node.meta.get("example_value")
    if hints is None or not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return None
    if any(not isinstance(size, int) or size != 1 for size in example.shape):
        return None
    if not _are_metadata(tx, (tensor,)):
        return None
    return _answer(tx, tensor.call_method(tx, "item", [], {}))


def _answer(tx: Any, number: Any) -> bool | None:
    """The truth of a number in Dynamo's hands, or None where it has no hint."""
    if number.is_python_constant():
        return bool(number.as_python_constant())
    hints = hints_for(tx.output)
    if hints is None or not isinstance(number, SymNodeVariable) or not hints.can_answer(number.sym_num):
        return None
    if not isinstance(number.sym_num, torch.SymBool):
        number = SymNodeVariable.create(tx, number.as_proxy() != 0)
        if number.is_python_constant():
            return bool(number.as_python_constant())
    return bool(number.evaluate_expr(tx.output))


def _constant(tx: Any, value: bool) -> Any:
    return variables.ConstantVariable.create(value)


def _call_bool(original: Callable[..., Any]) -> Callable[..., Any]:
    """`bool(n)` is True or False, as in Python, and not a symbol that compares with neither."""

    def call_bool(self: Any, tx: Any, argument: Any) -> Any:
        if isinstance(argument, (TensorVariable, SymNodeVariable)):
            truth = _truth(tx, argument) if isinstance(argument, TensorVariable) else _answer(tx, argument)
            if truth is not None:
                return _constant(tx, truth)
            if isinstance(argument, TensorVariable) and asks_for_tokens(tx, argument):
                return argument.call_method(tx, "item", [], {})
        return original(self, tx, argument)

    return call_bool


def _iter_contains(original: Callable[..., Any]) -> Callable[..., Any]:
    """`3 in lengths.tolist()`: Dynamo passes over symbols when it looks for a constant."""

    def iter_contains(items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(items)
        if hints_for(tx.output) is not None and any(isinstance(item, SymNodeVariable) for item in (*items, search)):
            for item in items:
                equal: Any = BuiltinVariable(operator.eq).call_function(tx, [item, search], {})
                truth = _answer(tx, equal)
                if truth is None:
                    truth = bool(equal.evaluate_expr(tx.output))  # breaks the graph where nothing is known
                if truth:
                    return _constant(tx, True)
            return _constant(tx, False)
        return original(items, search, tx, *args, **kwargs)

    return iter_contains


def _torch_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        counts = counted(tx, getattr(self.value, "__name__", ""), args, kwargs)
        if counts is not None:
            return counts
        whole = joined_list(tx, self.value, args, lambda: original(self, tx, args, kwargs))
        if whole is not None:
            return whole
        if self.value is torch.equal and len(args) == 2 and not kwargs:
            equal = _equal(tx, *args)
            if equal is not None:
                return equal
        if self.value is torch.allclose and _are_metadata(tx, args):
            close = TorchInGraphFunctionVariable(torch.isclose).call_function(tx, args, kwargs)
            truth = _truth(tx, close.call_method(tx, "all", [], {}))
            if truth is not None:
                return _constant(tx, truth)
        if self.value is torch.is_nonzero and len(args) == 1 and not kwargs and isinstance(args[0], TensorVariable):
            truth = _truth(tx, args[0])
            if truth is not None:
                return _constant(tx, truth)
        return original(self, tx, args, kwargs)

    return call_function


def _tensor_method(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in ("item", "tolist", "__index__", "__int__"):
            number = known_number(tx, self, name)
            if number is not None:
                return number
        counts = counted(tx, name, [self, *args], kwargs)
        if counts is not None:
            return counts
        if name == "tolist" and not args and not kwargs:
            numbers = _numbers(tx, self)
            if numbers is not None:
                return numbers
        if name == "equal" and len(args) == 1 and not kwargs:
            equal = _equal(tx, self, args[0])
            if equal is not None:
                return equal
        return original(self, tx, name, args, kwargs)

    return call_method


def _numbers(tx: Any, tensor: Any) -> Any:
    """`.tolist()` of a data-dependent number of integers, which Dynamo counts by unbinding the tensor.

    That makes symbols which nothing binds; here the size is asked for, and each number read.
    """
    hints = hints_for(tx.output)
    if hints is None or not _are_metadata(tx, (tensor,)):
        return None
    example = tensor.as_proxy().node.meta["example_value"]
    if example.ndim != 1 or example.dtype.is_floating_point or not is_unbacked(example.shape[0]):
        return None
    if not hints.can_answer(example.shape[0]):
        return None
    size: Any = tensor.call_method(tx, "size", [variables.ConstantVariable.create(0)], {})
    count = size.as_python_constant() if size.is_python_constant() else size.evaluate_expr(tx.output)
    places = [variables.ConstantVariable.create(place) for place in range(count)]
    items = [tensor.call_method(tx, "__getitem__", [p], {}).call_method(tx, "item", [], {}) for p in places]
    return variables.ListVariable(items, mutation_type=ValueMutationNew())


def _are_metadata(tx: Any, values: Any) -> bool:
    hints = hints_for(tx.output)
    return hints is not None and all(
        isinstance(v, TensorVariable) and hints.metadata is not None and hints.metadata.is_metadata(v.as_proxy().node)
        for v in values
    )


def _equal(tx: Any, one: Any, other: Any) -> Any:
    """`torch.equal` of two tensors of metadata: the same sizes, and all elements equal."""
    hints = hints_for(tx.output)
    if hints is None or not _are_metadata(tx, (one, other)):
        return None
    shapes = [t.as_proxy().node.meta["example_value"].shape for t in (one, other)]
    if len(shapes[0]) != len(shapes[1]):
        return _constant(tx, False)
    for pair in zip(*shapes, strict=True):
        if not all(hints.can_answer(size) for size in pair):
            return None
        if pair[0] != pair[1]:
            return _constant(tx, False)
    every = one.call_method(tx, "eq", [other], {}).call_method(tx, "all", [], {})
    truth = _truth(tx, every)
    return None if truth is None else _constant(tx, truth)
