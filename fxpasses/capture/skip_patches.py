"""Where Dynamo is watched for loops that pass over experts without tokens (`capture/skipping.py`).

Private names, checked on torch 2.11, 2.13 and 2.15: `InstructionTranslatorBase.step`, the handlers of GET_ITER,
FOR_ITER and COMPARE_OP in its dispatch tables, `SideEffects.mutation`, `.store_attr` (cells are stored as attributes
too) and `.store_global`, the marks on new objects `ValueMutationNew` and `AttributeMutationNew`,
`BuiltinVariable.call_function`, and `TensorVariable.call_method`; of iterators, `IteratorVariable` and
`LocalGeneratorObjectVariable` with what takes elements (`_TAKING`); of `OutputGraph`, `random_calls`,
`side_effects.tensor_hooks`; of the shape environment, `var_to_range` and `deferred_runtime_asserts`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import side_effects, symbolic_convert, variables
from torch._dynamo.variables import base
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.iter import IteratorVariable
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable, SymNodeVariable, TensorVariable

from fxpasses.capture import hints
from fxpasses.capture.experts_hit import choices_of, is_routing
from fxpasses.capture.grown_lists import GrownList, asks_whether_empty, joined
from fxpasses.capture.skipping import Skipping, born, stamped

# What takes elements from an iterator, in one version of torch or another.
_TAKING = ("next_variable", "tp_iternext_impl", "unpack_var_sequence", "force_unpack_var_sequence",
           "force_apply_to_var_sequence", "gen_send_ex2", "call_method")  # fmt: skip


def skip_patches() -> Iterator[tuple[Any, str, Any]]:
    """All but those of the dispatch tables; see `questions.patches`."""
    translator, effects = symbolic_convert.InstructionTranslatorBase, side_effects.SideEffects
    yield translator, "step", _step(translator.step)
    for name in ("mutation", "store_attr", "store_global"):
        yield effects, name, _changing(getattr(effects, name))
    yield BuiltinVariable, "call_function", _builtin(BuiltinVariable.call_function)
    yield TensorVariable, "unpack_var_sequence", _unpack(TensorVariable.unpack_var_sequence)
    yield NumpyNdarrayVariable, "call_method", _array_method(NumpyNdarrayVariable.call_method)
    yield ListVariable, "call_method", _list_method(ListVariable.call_method)
    reading = "var_getattr" if hasattr(SymNodeVariable, "var_getattr") else "tp_getattro_impl"  # torch 2.15
    for name in ("call_method", reading):
        yield SymNodeVariable, name, _number_method(getattr(SymNodeVariable, name))
    for mark in (base.ValueMutationNew, base.AttributeMutationNew):
        yield mark, "__init__", stamped(mark.__init__)
    for kind in (IteratorVariable, LocalGeneratorObjectVariable):
        yield kind, "__init__", stamped(kind.__init__)
        for iterator in _with_subclasses(kind):
            for name in _TAKING:
                if name in vars(iterator):
                    yield iterator, name, _taking(vars(iterator)[name])


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def loop_patch(handler: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """What to put in place of the handler of an opcode, if it begins or continues a loop, or compares."""
    wrap = {"GET_ITER": _get_iter, "FOR_ITER": _for_iter, "COMPARE_OP": _compare}.get(name)
    return wrap(handler) if wrap is not None else None


def skipping_for(output: Any) -> Skipping | None:
    """The skips of the trace that writes `output`, if loops may be captured so."""
    found = hints.hints_for(output)
    return found.skipping if found is not None else None


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any) -> Any:
        skipping = skipping_for(self.output)
        if skipping is not None and self.instruction_pointer is not None:
            skipping.before_step(self)
        return original(self)

    return step


def _changing(original: Callable[..., Any]) -> Callable[..., Any]:
    def changing(self: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
        found = hints.current.get()
        if found is not None and found.skipping is not None:
            found.skipping.changed(born(variable))
        return original(self, variable, *args, **kwargs)

    return changing


def _taking(original: Callable[..., Any]) -> Callable[..., Any]:
    def taking(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = hints.current.get()
        if found is not None and found.skipping is not None:
            found.skipping.changed(born(self))
        return original(self, *args, **kwargs)

    return taking


def _get_iter(handler: Callable[..., Any]) -> Callable[..., Any]:
    def get_iter(tx: Any, instruction: Any) -> Any:
        skipping = skipping_for(tx.output)
        if skipping is not None:
            value = tx.stack[-1]
            if isinstance(value, TensorVariable):
                every = skipping.all_experts(tx, value)
                if every is not None:
                    tx.pop()
                    tx.push(every)
            elif isinstance(value, variables.TupleVariable):
                skipping.begin_list(tx, value)
        return handler(tx, instruction)

    return get_iter


def _compare(handler: Callable[..., Any]) -> Callable[..., Any]:
    """`ids == e`, with a number in place of a tensor of one element that is known."""

    def compare(tx: Any, instruction: Any) -> Any:
        skipping = skipping_for(tx.output)
        if skipping is not None and skipping.values.of(tx.stack[-2]) is None:
            tx.push(_number_or(skipping, tx.pop()))
        return handler(tx, instruction)

    return compare


def _for_iter(handler: Callable[..., Any]) -> Callable[..., Any]:
    def for_iter(tx: Any, instruction: Any) -> Any:
        place = tx.instruction_pointer - 1
        result = handler(tx, instruction)
        skipping = skipping_for(tx.output)
        if skipping is not None:
            skipping.begin_round(tx, place)
        return result

    return for_iter


def truth_if_experts_have_tokens(tx: Any, instruction: Any, jumps_if: bool) -> bool | None:
    """The truth of what a jump asks, on the top of the stack, if every expert has tokens; None for other questions."""
    skipping = skipping_for(tx.output)
    return skipping.truth(tx, instruction, tx.stack[-1], jumps_if) if skipping is not None else None


def asks_for_tokens(tx: Any, tensor: Any) -> bool:
    """Whether a tensor of one element may say whether an expert has tokens; its truth is left to the jump."""
    skipping = skipping_for(tx.output)
    return skipping is not None and is_routing(skipping.values.routing, tensor.as_proxy().node) is not None


def counted(tx: Any, function: str, args: Any, kwargs: Any) -> Any:
    """`torch.bincount(ids, minlength=E)` with a size that is known, where the graph shows that the ids are below E.

    Its own size is E or more, by the ids: nobody could loop over it. None for other calls.
    """
    skipping = skipping_for(tx.output)
    if function != "bincount" or len(args) != 1 or set(kwargs) != {"minlength"} or skipping is None:
        return None
    (ids,), count = args, kwargs["minlength"]
    if not isinstance(ids, TensorVariable) or not count.is_python_constant():
        return None
    node = ids.as_proxy().node
    choices = choices_of(skipping.values.routing, node)
    if choices is None or node.meta["example_value"].ndim != 1 or choices > count.as_python_constant():
        return None
    constant = variables.ConstantVariable.create
    options = {"dtype": constant(torch.int64)}
    zeros = ids.call_method(tx, "new_zeros", [count], options)
    index = ids.call_method(tx, "long", [], {})
    ones = index.call_method(tx, "new_ones", [index.call_method(tx, "size", [], {})], {})
    return zeros.call_method(tx, "scatter_add", [constant(0), index, ones], {})


def known_number(tx: Any, tensor: Any, name: str) -> Any:
    """`e.item()` and `hit.tolist()` as a constant or a tuple of constants in Dynamo's hands; None where not known."""
    skipping = skipping_for(tx.output)
    if skipping is None:
        return None
    value = skipping.values.of(tensor)
    if value is not None and value.numel() == 1 and (value.ndim == 0 or name != "tolist"):
        return variables.ConstantVariable.create(value.item())
    return skipping.list_of_all_experts(tx, tensor) if name == "tolist" else None


def _builtin(original: Callable[..., Any]) -> Callable[..., Any]:
    """`mask[e]`, with a number in place of a tensor of one element that is known."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        skipping = skipping_for(tx.output)
        if skipping is not None:
            skipping.check_use(self.fn, (*args, *kwargs.values()))
            if self.fn is operator.getitem and len(args) == 2 and (number := _element(skipping, tx, *args)) is not None:
                return number
            if self.fn is len and len(args) == 1 and type(args[0]) is GrownList and asks_whether_empty(tx):
                skipping.is_empty_asked(tx, args[0])
                with args[0].opened():
                    return original(self, tx, args, kwargs)
        if self.fn is operator.getitem and len(args) == 2 and _takes_numbers(args[0]):
            if skipping is not None and skipping.values.of(args[0]) is None:
                args = [args[0], _number_or(skipping, args[1])]
        return original(self, tx, args, kwargs)

    return call_function


def _element(skipping: Skipping, tx: Any, array: Any, index: Any) -> Any:
    """`counts[e]` of an array of counts, for a number e."""
    if not isinstance(array, NumpyNdarrayVariable) or not index.is_python_constant():
        return None
    place, numbers = index.as_python_constant(), skipping.numbers(tx, array)
    return numbers[place] if numbers is not None and type(place) is int and place < len(numbers) else None


def _unpack(original: Callable[..., Any]) -> Callable[..., Any]:
    """`for count in counts.numpy()`."""

    def unpack_var_sequence(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        skipping = skipping_for(tx.output)
        numbers = skipping.numbers(tx, self) if skipping is not None else None
        return list(numbers) if numbers is not None else original(self, tx, *args, **kwargs)

    return unpack_var_sequence


def _array_method(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        skipping = skipping_for(tx.output)
        if name == "cumsum" and skipping is not None and skipping.arrays is not None:
            ends = skipping.arrays.cumsum(tx, self, args, kwargs)
            if ends is not None:
                return ends
        return original(self, tx, name, args, kwargs)

    return call_method


def _list_method(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        skipping = skipping_for(tx.output)
        if name == "append" and len(args) == 1 and not kwargs and skipping is not None:
            result = skipping.append(tx, self, args[0], lambda: original(self, tx, name, args, kwargs))
            if result is not None:
                return result
        return original(self, tx, name, args, kwargs)

    return call_method


def joined_list(tx: Any, function: Any, args: Any, join: Callable[[], Any]) -> Any:
    """`torch.cat(outputs)` of a list that grew where experts have tokens, which `join` does; None for other calls."""
    skipping = skipping_for(tx.output)
    grown = joined(function, args) if skipping is not None else None
    return skipping.join(grown, join) if skipping is not None and grown is not None else None


def is_grown_list(tx: Any, value: Any) -> bool:
    """Whether a jump asks if a list is empty that grew where experts have tokens: it is not."""
    skipping = skipping_for(tx.output)
    return skipping is not None and skipping.is_empty_asked(tx, value)


def _number_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """`count.item()`, `count.dtype`: Python's integers have none."""

    def method(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        skipping = skipping_for(tx.output)
        if skipping is not None:
            skipping.check_use(name, (self,))
        return original(self, tx, name, *args, **kwargs)

    return method


def _takes_numbers(container: Any) -> bool:
    """Whether a tensor of one element, as an index, is a number. A dict or one's own class may tell them apart."""
    modules = (torch.nn.ModuleList, torch.nn.ParameterList, torch.nn.Sequential)
    known = isinstance(container, (TensorVariable, variables.ListVariable, variables.TupleVariable))
    return known or type(getattr(container, "value", None)) in modules


def _number_or(skipping: Skipping, index: Any) -> Any:
    if isinstance(index, variables.TupleVariable):
        items = [_number_or(skipping, item) for item in index.items]
        return variables.TupleVariable(items) if items != index.items else index
    value = skipping.values.of(index)
    if value is None or value.ndim != 0 or value.dtype.is_floating_point or value.dtype is torch.bool:
        return index
    return variables.ConstantVariable.create(value.item())
