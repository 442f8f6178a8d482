"""The handlers that begin, monitor and end speculated branches (`experts/capture/speculation.py`).

Private names, checked on torch 2.11, 2.13 and 2.15, besides those of the handlers' sites: of `OutputGraph`,
`random_calls` and `side_effects.tensor_hooks`; of the shape environment, `var_to_range` and `deferred_runtime_asserts`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables import ConstantVariable, ListVariable, TupleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._subclasses.fake_tensor import disable_fake_tensor_cache
from torch.fx import Node

from fxpasses.dynamo.births import BIRTHS, CHANGES, TAKES, born, stamp
from fxpasses.dynamo.hints import BUILTIN, is_asked, take
from fxpasses.dynamo.interceptions import (
    CONDITIONAL_JUMP,
    NOT_HANDLED,
    TRANSLATOR,
    Handlers,
    Proceed,
    method,
    opcodes,
)
from fxpasses.dynamo.substitutions import TENSOR, are_constants, example, substitute
from fxpasses.dynamo.trace import Trace
from fxpasses.experts.capture.assumed_values import AssumedValues, Read, choices_of, is_routing
from fxpasses.experts.capture.speculation import Speculation

handlers = Handlers()


# Side effects of a branch


def is_following(trace: Trace) -> bool:
    return bool(trace.state(Speculation).open)


def changed(trace: Trace) -> None:
    trace.state(Speculation).changed()


def may_replace(trace: Trace, operands: Mapping[Node, Node]) -> bool:
    return trace.state(Speculation).may_replace(operands)


def can_be_copied(trace: Trace, branches: range, nodes: Collection[Node], results: Collection[Node]) -> bool:
    return trace.state(Speculation).can_copy(branches, nodes, results)


def copied(trace: Trace, branches: range, copies: Mapping[Node, Node], symbols: Mapping[Any, Any]) -> None:
    trace.state(Speculation).copy(branches, copies, symbols)


@handlers.at(method(TRANSLATOR, "step"), order=2)
def step(trace: Trace, proceed: Proceed, tx: Any) -> Any:
    if tx.instruction_pointer is not None:
        trace.state(Speculation).before_step(tx)
    return NOT_HANDLED


@handlers.at(*CHANGES, order=2)
def change(trace: Trace, proceed: Proceed, effects: Any, *args: Any, **kwargs: Any) -> Any:
    """Note a change of an object, the first argument; stores to cells are stores to attributes."""
    trace.state(Speculation).changed(born(args[0]))
    return NOT_HANDLED


@handlers.at(*TAKES)
def take_elements(trace: Trace, proceed: Proceed, iterator: Any, *args: Any, **kwargs: Any) -> Any:
    trace.state(Speculation).changed(born(iterator))
    return NOT_HANDLED


@handlers.at(*BIRTHS)
def make(
    trace: Trace, proceed: Proceed, self: Any, *args: Any, fxpasses_born: int | None = None, **kwargs: Any
) -> None:
    """Stamp Dynamo's iterators, and its marks on new objects, with their time of creation. Clones copy it."""
    proceed(self, *args, **kwargs)
    stamp(self, fxpasses_born)


# The beginning of a branch


@handlers.at(CONDITIONAL_JUMP, order=2, without="`if tok.numel() > 0:` breaks the graph")
def jump(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    if not inst.opname.startswith("POP_JUMP") or not is_asked(tx):
        return NOT_HANDLED
    truth = trace.state(Speculation).truth(tx, inst, tx.stack[-1], "IF_TRUE" in inst.opname)
    return NOT_HANDLED if truth is None else take(tx, inst, truth)


@handlers.at(method(BUILTIN, "call_bool"), order=2, without="`bool(mask.any())` breaks the graph")
def call_bool(trace: Trace, proceed: Proceed, self: Any, tx: Any, arg: Any) -> Any:
    """Leave the truth of a tensor that says whether an expert has tokens to the jump."""
    if (
        isinstance(arg, TensorVariable)
        and is_routing(trace.state(Speculation).values.routing, arg.as_proxy().node) is not None
    ):
        return arg.call_method(tx, "item", [], {})
    return NOT_HANDLED


@handlers.at(opcodes("GET_ITER"))
def get_iter(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    value = tx.stack[-1]
    if isinstance(value, TensorVariable):
        every = trace.state(Speculation).all_experts(tx, value)
        if every is not None:
            tx.pop()
            tx.push(every)
    elif isinstance(value, TupleVariable):
        trace.state(Speculation).begin_list(tx, value)
    return NOT_HANDLED


@handlers.at(opcodes("FOR_ITER"))
def for_iter(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    place = tx.instruction_pointer - 1
    result = proceed(tx, inst)
    trace.state(Speculation).begin_round(tx, place)
    return result


@handlers.at(method("torch._dynamo.utils", "run_node"), order=2)
def run_node(trace: Trace, proceed: Proceed, tracer: Any, *args: Any, **kwargs: Any) -> Any:
    """Inside a branch, sizes are those of one expert: fake results with them are not looked up, as nothing else has
    them. PyTorch would compute each of them twice, to keep it."""
    if not trace.state(Speculation).open:
        return NOT_HANDLED
    with disable_fake_tensor_cache(tracer.fake_mode):
        return proceed(tracer, *args, **kwargs)


# Values that are known if all experts have tokens


@handlers.at(opcodes("COMPARE_OP"), without="`ids == e` breaks the graph where e is a tensor")
def compare(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    """`ids == e`, with a number in place of a known tensor of one element."""
    values = trace.state(Speculation).values
    if values.of(tx.stack[-2]) is None:
        asked = tx.pop()
        tx.push(_number_or(values, asked))
        _note_number(values, asked, tx.stack[-1])
    return NOT_HANDLED


@handlers.at(method(BUILTIN, "call_function"), order=3, without="`mask[e]` breaks the graph where e is a tensor")
def get_item(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """`mask[e]`, with a number in place of a known tensor of one element."""
    if self.fn is not operator.getitem or len(args) != 2 or not _takes_numbers(args[0]):
        return NOT_HANDLED
    values = trace.state(Speculation).values
    if values.of(args[0]) is not None:
        return NOT_HANDLED
    number, last = _number_or(values, args[1]), tx.output.current_tracer.graph._root.prev
    result = proceed(self, tx, [args[0], number], kwargs)
    _note_number(values, args[1], number, result, last)
    return result


@handlers.at(method(TENSOR, "call_method"), order=1, without="`e.item()` breaks the graph")
def tensor_method(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name in ("item", "tolist", "__index__", "__int__"):
        value = trace.state(Speculation).values.of(self)
        if value is not None and value.numel() == 1 and (value.ndim == 0 or name != "tolist"):
            trace.state(Speculation).values.reads.append(Read(self.as_proxy().node))
            return ConstantVariable.create(value.item())
        every = trace.state(Speculation).list_of_all_experts(tx, self) if name == "tolist" else None
        if every is not None:
            return every
    return NOT_HANDLED


def _are_below(trace: Trace, input: Any, minlength: Any) -> bool:
    """Whether the graph shows that all ids are below a constant, so that there are exactly as many counts."""
    if not isinstance(input, TensorVariable) or not are_constants(minlength):
        return False
    choices = choices_of(trace.state(Speculation).values.routing, input.as_proxy().node)
    return choices is not None and example(input).ndim == 1 and choices <= minlength.as_python_constant()


@substitute(
    handlers, torch.bincount, Tensor.bincount, when=_are_below, without="`torch.bincount(ids)` breaks the graph"
)
def bincount(input: Tensor, *, minlength: int) -> Tensor:
    """`torch.bincount` of known size; a size that depends on the ids would keep a loop over it from being unrolled."""
    index = input.long()
    ones = index.new_ones(index.size())
    return input.new_zeros(minlength, dtype=torch.int64).scatter_add(0, index, ones)


def _takes_numbers(container: Any) -> bool:
    """Whether a container treats an index that is a tensor of one element as a number; a dict does not."""
    modules = (torch.nn.ModuleList, torch.nn.ParameterList, torch.nn.Sequential)
    known = isinstance(container, (TensorVariable, ListVariable, TupleVariable))
    return known or type(vars(container).get("value")) in modules


def _number_or(values: AssumedValues, index: Any) -> Any:
    if isinstance(index, TupleVariable):
        items = [_number_or(values, item) for item in index.items]
        return TupleVariable(items) if items != index.items else index
    value = values.of(index)
    if value is None or value.ndim != 0 or value.dtype.is_floating_point or value.dtype is torch.bool:
        return index
    return ConstantVariable.create(value.item())


def _note_number(values: AssumedValues, asked: Any, number: Any, result: Any = None, last: Node | None = None) -> None:
    """Note where `_number_or` has put a number in place of a tensor, and the node of `x[number]`, if that is one.

    last: the graph's before. An item of a tuple, as of `w.unbind()`, has a node that others with this number use too.
    """
    if number is asked:
        return
    if isinstance(asked, TupleVariable):
        for one, other in zip(asked.items, number.items, strict=True):
            _note_number(values, one, other)
        return
    node: Any = result.as_proxy().node if isinstance(result, TensorVariable) else None
    is_new = node is not None and node.prev is last and isinstance(node.args[0], Node)
    is_index = is_new and node.target is operator.getitem and isinstance(node.args[0].meta.get("example_value"), Tensor)
    is_index = is_index and type(node.args[1]) is int and node.args[1] == number.as_python_constant()
    values.reads.append(Read(asked.as_proxy().node, index_of=node if is_index else None))
