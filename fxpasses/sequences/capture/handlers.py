"""The handlers by which Dynamo traces a loop over parts of the batch once (`sequences/capture/loops.py`).

Private names, checked on torch 2.11, 2.13 and 2.15, are those of the handlers' sites, and `instructions` and `stack` of
a translator.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, TupleVariable
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from fxpasses.dynamo.births import CHANGES, born
from fxpasses.dynamo.hints import BUILTIN, ITEM_WRITE
from fxpasses.dynamo.interceptions import NOT_HANDLED, TRANSLATOR, Handlers, Proceed, method, opcodes
from fxpasses.dynamo.substitutions import TENSOR, TORCH_FUNCTION, example
from fxpasses.dynamo.trace import Trace
from fxpasses.experts.capture.speculation import is_running
from fxpasses.graph.calls import is_in_place, operator_of
from fxpasses.graph.symbols import expression, hint_of, is_unbacked
from fxpasses.sequences.capture import called, lists, part_counts
from fxpasses.sequences.capture.items import Numbers, Tensors
from fxpasses.sequences.capture.joining import cat, numbers_of, pad_sequence, stack, tensor, total
from fxpasses.sequences.capture.lists import Elements, Indices, Lengths, Parts, Results, Sizes
from fxpasses.sequences.capture.loops import PartIterator, Sequences
from fxpasses.sequences.capture.writer import key_of

_MOST_COLUMNS = 8
_SPLITS = (torch.split, torch.split_with_sizes)
_SPLIT_METHODS = ("split", "split_with_sizes")
_JOINS: dict[Any, Callable[..., Any]] = {
    torch.cat: cat, torch.concat: cat, torch.concatenate: cat, torch.stack: stack,
    torch._C._nn.pad_sequence: pad_sequence, torch.tensor: tensor, torch.as_tensor: tensor,
}  # fmt: skip
# What may stand between the iterator of a comprehension and its loop, which Python 3.12 inlines.
_PREPARES = ("LOAD_FAST_AND_CLEAR", "SWAP", "BUILD_LIST", "COPY", "NOP", "RESUME", "CACHE")

handlers = Handlers()


def is_following(trace: Trace) -> bool:
    return trace.state(Sequences).open is not None or trace.state(Sequences).is_reading


def changed(trace: Trace) -> None:
    trace.state(Sequences).changed()


def close(trace: Trace) -> None:
    """Note a loop that the program has left by a break or a return, or in which tracing has failed."""
    sequences = trace.state(Sequences)
    if sequences.open is not None:
        trace.unrolled.update(dict.fromkeys(sequences.open.places, "it is left before its end"))
        sequences.open = None


# Lists of the batch's numbers, and what they cut


@handlers.at(method(TENSOR, "call_method"), order=0)
def tensor_method(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "tolist" and not args and not kwargs:
        lengths = _lengths(trace, self)
        if lengths is None:
            return NOT_HANDLED
        read = _reading(trace, lengths, lambda: proceed(self, tx, name, args, kwargs).items)
        found = example(self)
        return lists.sizes(lengths, read) if found.ndim == 1 else lists.rows(lengths, read, found.shape[1])
    if name == "__setitem__" and len(args) == 2 and (key := _at_number(trace, tx, self, args[0])) is not None:
        return proceed(self, tx, name, [key, args[1]], kwargs)
    if name in _SPLIT_METHODS and args:
        return _split(trace, (self, *args), kwargs, lambda *given: proceed(self, tx, name, given[1:], {}))
    return NOT_HANDLED


@handlers.at(method(TORCH_FUNCTION, "call_function"), order=0)
def function(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.value in _SPLITS and args:
        return _split(trace, args, kwargs, lambda *given: proceed(self, tx, list(given), {}))
    join = _JOINS.get(self.value) if callable(self.value) else None
    taken = (Results, Sizes if join is tensor else Parts)
    if join is None or not args or type(args[0].realize()) not in taken:
        return NOT_HANDLED
    try:
        inspect.signature(join).bind(None, None, *args, **kwargs)
    except TypeError:  # other arguments
        return NOT_HANDLED
    return join(trace.state(Sequences), tx, *args, **kwargs)


def _lengths(trace: Trace, tensor: Any) -> Lengths | None:
    """The lengths that a tensor holds; None if it may hold something else, or if its loops are unrolled."""
    found = example(tensor)
    if not isinstance(found, Tensor) or found.dtype not in (torch.int32, torch.int64):
        return None
    if found.ndim != 1 and (found.ndim != 2 or type(found.shape[1]) is not int or found.shape[1] > _MOST_COLUMNS):
        return None
    if type(found.shape[0]) is int and found.shape[0] == 0:  # Python's answers for an empty list are its own
        return None
    place = trace.place()
    if part_counts.varies(place, found.shape[0]):
        trace.varying.add(place)
    sequences = trace.state(Sequences)
    if _is_unrolled(trace, place) or sequences.open is not None or sequences.is_reading:
        return None
    key = key_of(trace, tensor)
    return None if key is None else Lengths(tensor, key, place)


def _is_unrolled(trace: Trace, place: Any) -> bool:
    return any(place == unrolled for unrolled, _ in trace.attempt.unrolled)


def _reading(trace: Trace, lengths: Lengths, read: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    """The elements of a list, which is read later than the program makes it."""
    sequences, gradients = trace.state(Sequences), torch.is_grad_enabled()

    def elements() -> list[Any]:
        if key_of(trace, lengths.tensor) != lengths.key or torch.is_grad_enabled() != gradients:
            sequences.refuse(lengths.place, why="its list is read after something has changed")
        before, sequences.is_reading = sequences.is_reading, True
        try:
            return read()
        finally:
            sequences.is_reading = before

    return elements


def _split(trace: Trace, args: Any, kwargs: Any, read: Callable[..., Any]) -> Any:
    """`tensor.split(sizes, dim)`."""
    given = dict(zip(("tensor", "sizes", "dim"), args, strict=False))
    given.update(("sizes" if name.startswith("split_size") else name, value) for name, value in kwargs.items())
    found = {name: value.realize() for name, value in given.items()}
    tensor, sizes, dim = found.get("tensor"), found.get("sizes"), found.get("dim", ConstantVariable.create(0))
    lengths = _lengths_of(trace, sizes)
    if lengths is None or not isinstance(tensor, TensorVariable) or not dim.is_python_constant():
        return NOT_HANDLED
    if trace.state(Sequences).is_reading or trace.is_in_try():  # where the program may catch the error of wrong lengths
        return NOT_HANDLED
    whole, at = example(tensor), dim.as_python_constant()
    if len(found) != len(args) + len(kwargs) or whole.layout is not torch.strided or type(at) is not int:
        return NOT_HANDLED
    if not -whole.ndim <= at < whole.ndim:
        return NOT_HANDLED

    def elements() -> list[Any]:
        return list(read(tensor, sizes, dim).items)

    return lists.parts(lengths, _reading(trace, lengths, elements), tensor, at % whole.ndim)


def _lengths_of(trace: Trace, sizes: Any) -> Lengths | None:
    """The lengths of a list of numbers: the batch's, or those that a loop has made."""
    if type(sizes) is Sizes:
        return sizes.lengths
    if type(sizes) is not Results:
        return None
    item = sizes.item
    if isinstance(item, Numbers):
        numbers = item.variable
    elif isinstance(item, Tensors) and not item.value.dims:
        numbers = item.value.variable
    else:
        return None
    if example(numbers).ndim != 1 or example(numbers).dtype not in (torch.int32, torch.int64):
        return None
    key = key_of(trace, numbers)
    return Lengths(numbers, object() if key is None else key, sizes.lengths.place, is_own=True)


# Loops


@handlers.at(method(BUILTIN, "call_function"), order=0)
def builtin(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if not args:
        return NOT_HANDLED
    if self.fn is zip and not kwargs.keys() - {"strict"}:
        return _iterator(trace, tx, tuple(args)) or NOT_HANDLED
    if self.fn in (max, min) and len(args) == 1 and not kwargs:
        numbers = numbers_of(trace.state(Sequences), args[0])
        if numbers is not None:
            return numbers.call_method(tx, f"a{self.fn.__name__}", [], {}).call_method(tx, "item", [], {})
    loop = trace.state(Sequences).open
    if self.fn is operator.getitem and loop is not None and isinstance(args[1], SymNodeVariable):
        found = loop.at_index(args[0].realize(), args[1]) if _is_of_parts(args[0]) else None
        return NOT_HANDLED if found is None else found
    if self.fn is operator.getitem and len(args) == 2 and type(args[0].realize()) is Parts:
        return _part_at(trace, tx, args[0].realize(), args[1].realize())
    is_padding = tx.f_code is torch.nn.utils.rnn.pad_sequence.__code__
    if self.fn is tuple and is_padding and len(args) == 1 and type(args[0].realize()) in (Parts, Results):
        return args[0].realize()
    if self.fn is len and len(args) == 1 and _is_of_parts(args[0]):
        trace.state(Sequences).check(tx, args[0].realize(), set())
        return args[0].realize().lengths.tensor.call_method(tx, "size", [ConstantVariable.create(0)], {})
    return NOT_HANDLED


@handlers.at(method("torch._dynamo.variables.functions.UserFunctionVariable", "call_function"), order=4)
def user_function(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    loop = trace.state(Sequences).open
    if loop is None or getattr(getattr(self, "fn", None), "__code__", None) not in trace.attempt.called:
        return NOT_HANDLED
    return called.call(tx, self.fn, args, kwargs) if loop.is_one_by_one else NOT_HANDLED


@handlers.at(method("torch._dynamo.variables.functions.PolyfilledFunctionVariable", "call_function"))
def polyfilled(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.fn is enumerate and args and not kwargs.keys() - {"start"}:
        return _iterator(trace, tx, args[0], [*args[1:], *kwargs.values()]) or NOT_HANDLED
    if self.fn is not sum or len(args) != 1 or kwargs or type(args[0].realize()) not in (Results, Sizes):
        return NOT_HANDLED
    return total(trace.state(Sequences), tx, args[0])


@handlers.at(opcodes("GET_ITER"), order=2)
def get_iter(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    value = tx.stack[-1].realize()
    if isinstance(value, PartIterator):
        return None
    found = _iterator(trace, tx, value) if _is_looped_over(tx) else None
    if found is None:
        return NOT_HANDLED
    tx.pop()
    tx.push(found)
    return None


def _part_at(trace: Trace, tx: Any, parts: Any, index: Any) -> Any:
    """`parts[1]` where the number of parts differs from batch to batch: reading the list would fix it."""
    at = index.as_python_constant() if index.is_python_constant() else None
    lengths, count = parts.lengths, example(parts.lengths.tensor).shape[0]
    if type(at) is not int or at < 0 or lengths.place not in trace.varying or not _is_at_most(at + 1, count):
        return NOT_HANDLED
    if parts.gradients != torch.is_grad_enabled():
        return NOT_HANDLED
    if at in parts.taken:
        return parts.taken[at]
    trace.state(Sequences).check(tx, parts, set())
    zero, dim, place = (ConstantVariable.create(number) for number in (0, parts.dim, at))
    before = lengths.tensor.call_method(tx, "narrow", [zero, zero, place], {}).call_method(tx, "sum", [], {})
    size = lengths.tensor.call_method(tx, "select", [zero, place], {}).call_method(tx, "item", [], {})
    start = before.call_method(tx, "item", [], {}) if at else zero
    parts.taken[at] = parts.tensor.call_method(tx, "narrow", [dim, start, size], {})
    return parts.taken[at]


def _is_of_parts(value: Any) -> bool:
    return type(value.realize()) in lists.KINDS


def _iterator(trace: Trace, tx: Any, over: Any, start: Any = None) -> PartIterator | None:
    """The iterator of a loop over some lists; None if it cannot be traced once.

    over: a list, or a tuple of what is zipped. start: what `enumerate` takes besides; None for another iterator.
    """
    sequences = trace.state(Sequences)
    flags = trace.attempt.flags
    if sequences.open is not None or sequences.is_reading or (flags is not None and not flags.dynamic_output_shapes):
        return None
    over = _zipped(over)
    found = tree_leaves(over)
    first = _first_number(start)
    if first is None or not all(type(value) in lists.KINDS or isinstance(value, TensorVariable) for value in found):
        return None
    if not any(type(value) in lists.KINDS for value in found):
        return _over_tensors(trace, tx, over, found, first if start is not None else None)
    if start is None and _has_rules(found):
        is_one_by_one = sequences.are_one_by_one([value.lengths.place for value in found])
        return PartIterator(sequences, over, is_one_by_one)
    known = [value.lengths for value in found if type(value) in lists.KINDS]
    if not all(lengths.place in trace.varying for lengths in known):
        sequences.unrolled += [(tx, lengths.place) for lengths in known]
        return None
    return _one_by_one(sequences, tx, over, found, known[0], first if start is not None else None)


def _zipped(over: Any) -> Any:
    """Lists, and tuples of those that are zipped."""
    if isinstance(over, tuple):
        return tuple(map(_zipped, over))
    over = over.realize()
    return over.over if isinstance(over, PartIterator) and over.loop is None else over


def _first_number(start: Any) -> int | None:
    """The first number of `enumerate`; None if it is no constant."""
    if not start:
        return 0
    found = start[0].as_python_constant() if len(start) == 1 and start[0].is_python_constant() else None
    return found if type(found) is int else None


def _has_rules(found: list[Any]) -> bool:
    """Whether lists are of the same lengths, and one is cut from a tensor."""
    if any(type(value) not in (Sizes, Parts, Results) for value in found):
        return False
    if len({value.lengths.key for value in found}) != 1 or found[0].lengths.is_own:
        return False
    items = [value.item for value in found if type(value) is Results]
    if any(type(item) is not Tensors for item in items):
        return False
    return any(type(value) is Parts for value in found) or any(item.value.dims for item in items)


def _over_tensors(trace: Trace, tx: Any, over: Any, found: list[Any], first: int | None) -> PartIterator | None:
    """The iterator of a loop over the elements of tensors, if batches have had other numbers of them."""
    sequences, place = trace.state(Sequences), trace.place()
    if not found or any(not example(value).ndim for value in found):
        return None
    counts = [example(value).shape[0] for value in found]
    is_symbolic = all(type(count) is torch.SymInt and not is_unbacked(count) for count in counts)
    if is_symbolic:
        trace.varying.add(place)
    if _is_unrolled(trace, place) or not (is_symbolic or sequences.are_one_by_one([place])):
        sequences.unrolled.append((tx, place))
        return None
    keys = [key_of(trace, value) for value in found]
    known = next((value for value, key in zip(found, keys, strict=True) if key is not None), found[0])
    lengths = Lengths(known, object(), place, is_own=True)
    return _one_by_one(sequences, tx, over, found, lengths, first)


def _one_by_one(
    sequences: Sequences, tx: Any, over: Any, found: list[Any], lengths: Lengths, first: int | None
) -> PartIterator | None:
    """The iterator of a loop that runs part by part; None if there are not as many parts of each."""
    count = example(lengths.tensor).shape[0]
    made = []
    for value in found:
        if isinstance(value, TensorVariable):
            if not example(value).ndim:
                return None
            value = Elements(lengths, value)
        of_parts = value.tensor if type(value) is Elements else value.lengths.tensor
        if not _are_equal(example(of_parts).shape[0], count):
            return None
        made.append(value)
    over = tree_unflatten(made, tree_structure(over))
    if first is not None:
        size = lengths.tensor.call_method(tx, "size", [ConstantVariable.create(0)], {})
        numbers = TorchInGraphFunctionVariable(torch.arange).call_function(tx, [size], {})
        if first:
            numbers = numbers.call_method(tx, "add", [ConstantVariable.create(first)], {})
        over = Indices(lengths, numbers, first), over
    return PartIterator(sequences, over, is_one_by_one=True)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two sizes of the batch are equal, which is guarded."""
    if expression(one) == expression(other):
        return True
    is_known = not is_unbacked(one) and not is_unbacked(other)
    return is_known and hint_of(one) == hint_of(other) and bool(one == other)


def _is_at_most(one: Any, other: Any) -> bool:
    """Whether a size of the batch is no more than another, which is guarded."""
    if statically_known_true(one <= other):
        return True
    is_known = not is_unbacked(one) and not is_unbacked(other)
    return is_known and hint_of(one) <= hint_of(other) and bool(one <= other)


def _is_looped_over(tx: Any) -> bool:
    """Whether the program only loops over the list that it is about to iterate over."""
    after = 0
    while _opname(tx, after) in _PREPARES:
        after += 1
    return _opname(tx, after) == "FOR_ITER" or _is_comprehension(tx)


def _is_comprehension(tx: Any) -> bool:
    """Whether the iterator is for a list comprehension, which is a function before Python 3.12."""
    named = (value for value in tx.stack[-4:] if hasattr(value, "get_name"))
    return any(value.get_name() == "<listcomp>" for value in named)


def _opname(tx: Any, after: int) -> str:
    place = tx.instruction_pointer + after
    return tx.instructions[place].opname if place < len(tx.instructions) else ""


# What a loop's body does


@handlers.at(opcodes("LIST_APPEND"))
def list_append(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    loop = trace.state(Sequences).open
    made = tx.stack[-1 - inst.argval].realize() if loop is not None else None
    if loop is None or not isinstance(made, ListVariable) or born(made) >= loop.born:
        return NOT_HANDLED
    loop.append(made, tx.pop())
    return None


@handlers.at(method("torch._dynamo.variables.lists.ListVariable", "call_method"), order=2)
def append(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    loop = trace.state(Sequences).open
    if loop is None or name != "append" or len(args) != 1 or kwargs or born(self) >= loop.born:
        return NOT_HANDLED
    loop.append(self, args[0])
    return ConstantVariable.create(None)


@handlers.at(ITEM_WRITE, order=8, without="`mask[i, :n] = True` has its loop unrolled")
def write(trace: Trace, proceed: Proceed, self: Any, tx: Any, key: Any, value: Any) -> Any:
    key = _at_number(trace, tx, self, key)
    return NOT_HANDLED if key is None else proceed(self, tx, key, value)


def _at_number(trace: Trace, tx: Any, written: Any, key: Any) -> Any:
    """The index `i : i + 1, :n` for `i, :n` where i is the number of a part; None for others.

    written: the tensor. Refuses the loop unless that has a row for each part: a slice would write nothing beyond it.
    """
    loop, items = trace.state(Sequences).open, list(key.items) if type(key) is TupleVariable else [key]
    first = items[0] if items else None
    if loop is None or not isinstance(first, SymNodeVariable) or not loop.carried.is_index(first, loop.part):
        return None
    if not _is_at_most(example(loop.lengths.tensor).shape[0], example(written).shape[0]):
        loop.refuse("it writes to more rows than a tensor may have")
    following = BuiltinVariable(operator.add).call_function(tx, [first, ConstantVariable.create(1)], {})
    return TupleVariable([BuiltinVariable(slice).call_function(tx, [first, following], {}), *items[1:]])


@handlers.at(*CHANGES, order=4)
def change(trace: Trace, proceed: Proceed, effects: Any, *args: Any, **kwargs: Any) -> Any:
    trace.state(Sequences).changed(born(args[0]))
    return NOT_HANDLED


@handlers.at(method("torch._dynamo.utils", "run_node"), order=0)
def run_node(trace: Trace, proceed: Proceed, tracer: Any, node: Any, args: Any, kwargs: Any, nnmodule: Any) -> Any:
    sequences = trace.state(Sequences)
    if sequences.kept:
        written = [*args[:1]] if is_in_place(operator_of(node)) else []
        for tensor in [*written, *(value for name, value in kwargs.items() if name == "out")]:
            if isinstance(tensor, Tensor):
                sequences.written(tensor)
    return NOT_HANDLED


@handlers.at(method(TRANSLATOR, "step"), order=3)
def step(trace: Trace, proceed: Proceed, tx: Any) -> Any:
    if trace.crowded:
        trace.state(Sequences).call_what_asks(tx)
    if trace.unrolled:
        trace.state(Sequences).refuse(why="its parts may answer a question differently")
    loop = trace.state(Sequences).open
    if loop is not None and loop.questions.asking is not None:
        trace.state(Sequences).call(loop.questions.asking, *loop.places)
    if loop is not None and not is_running(loop.tx, tx):
        loop.refuse("its function returns from it")
    return NOT_HANDLED
