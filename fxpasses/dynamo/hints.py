"""Value hints: questions of the user's program that the traced batch answers.

The shape environment answers questions about numbers (`dynamo/trace.py`). `if tensor:`, `bool(tensor)`,
`torch.equal(a, b)`, `torch.allclose(a, b)` and `3 in lengths.tolist()` break the graph before Dynamo asks for a number:
on metadata, the handlers here turn each into a comparison of a symbol, and a tensor used as a size into the symbol of
its number. On other tensors, Dynamo proceeds as usual.

Private names, checked on torch 2.11, 2.13 and 2.15, are those of the handlers' sites.
"""

from __future__ import annotations

import dis
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, ListVariable, dicts, lists
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.lists import BaseListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.fx import Proxy

from fxpasses.dynamo.dynamo_names import DynamoNames
from fxpasses.dynamo.failures import CaptureRejected
from fxpasses.dynamo.interceptions import CONDITIONAL_JUMP, NOT_HANDLED, TRANSLATOR, Handlers, Proceed, Site, method
from fxpasses.dynamo.number_errors import check_assertion, check_operation
from fxpasses.dynamo.substitutions import TENSOR, TORCH_FUNCTION, are_constants, substitute
from fxpasses.dynamo.trace import Trace
from fxpasses.graph.collectives import is_collective
from fxpasses.graph.symbols import free_symbols, is_unbacked

try:
    from torch._dynamo.variables import object_protocol as protocol
except ImportError:  # torch 2.11
    protocol = None  # type: ignore[assignment]

BUILTIN = "torch._dynamo.variables.builtin.BuiltinVariable"
PROTOCOL = "torch._dynamo.variables.object_protocol"

# Methods whose arguments are all sizes. Dynamo breaks the graph at `x.view(h, w)` where `h` is a tensor.
_TAKE_SIZES = frozenset({"expand", "repeat", "reshape", "split", "view"})

# `//` and `%`: the instructions of Python 3.10, and what BINARY_OP has as its argument.
_QUOTIENTS = ("BINARY_FLOOR_DIVIDE", "BINARY_MODULO", 2, 6)

# Functions whose integer arguments are sizes and bounds.
_OF_SIZES = (torch.arange, F.interpolate)

handlers = Handlers()


@handlers.at(method(TRANSLATOR, "step"), order=1)
def attach(trace: Trace, proceed: Proceed, tx: Any) -> Any:
    trace.attach(tx.output)
    return NOT_HANDLED


@handlers.at(method("torch._dynamo.utils", "run_node"))
def run_node(trace: Trace, proceed: Proceed, tracer: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo runs each operator on fake tensors through this function: questions during the run are the operator's."""
    trace.catch_up()
    check_operation(trace, node, args[0] if args else ())
    try:
        with trace.running(node):
            return proceed(tracer, node, *args, **kwargs)
    finally:
        trace.has_read |= node.op == "call_method" and node.target == "item"
        trace.has_communicated |= node.op == "call_function" and is_collective(node.target)


@handlers.at(
    method("torch.utils._sympy.reference.PythonReferenceAnalysis", "int_truediv"),
    without="`if height / width > 1:` may fail, as under stock PyTorch with its capture flags",
)
def divide(trace: Trace, proceed: Proceed, a: Any, b: Any) -> Any:
    """Dynamo puts each assumption into the graph as an assertion, where PyTorch asks whether a divisor, a proxy, is
    zero."""
    return operator.truediv(a, b) if isinstance(a, Proxy) or isinstance(b, Proxy) else NOT_HANDLED


@handlers.at(CONDITIONAL_JUMP, order=3, without="`if tensor:` breaks the graph")
def jump(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    if not is_asked(tx) and isinstance(tx.stack[-1], SymNodeVariable):
        check_assertion(trace)
    if not is_asked(tx) or not isinstance(tx.stack[-1], TensorVariable):
        return NOT_HANDLED
    truth = _truth(trace, tx, tx.stack[-1])
    return NOT_HANDLED if truth is None else take(tx, inst, truth)


# `x[index] = y` of a tensor, which other versions of torch than 2.15 pass to `call_method`.
ITEM_WRITE = Site(
    f"{TENSOR}.mp_ass_subscript_impl",
    lambda: [(TensorVariable, "mp_ass_subscript_impl")] * ("mp_ass_subscript_impl" in vars(TensorVariable)),
)


def indexes_tensor(builtin: Any, args: Any) -> bool:
    """Whether a call of a builtin is `x[index]` or `x[index] = y` of a tensor."""
    is_index = builtin.fn in (operator.getitem, operator.setitem)
    return is_index and len(args) > 1 and isinstance(args[0], TensorVariable)


def is_asked(tx: Any) -> bool:
    """Whether a jump tests a tensor or a number. (Dynamo turns `assert tensor` into an assertion in the graph.)"""
    is_assertion = tx.instructions[tx.instruction_pointer].opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT")
    return isinstance(tx.stack[-1], (TensorVariable, SymNodeVariable)) and not is_assertion


def take(tx: Any, instruction: Any, truth: bool) -> None:
    """Jump as if the value on the stack were `truth`. Jumps that keep the value on the stack (`a or b`) keep it."""
    value = tx.pop()
    if truth is ("IF_TRUE" in instruction.opname):
        if "OR_POP" in instruction.opname:
            tx.push(value)
        tx.jump(instruction)


@handlers.at(method(BUILTIN, "call_bool"), order=1, without="`bool(tensor)` breaks the graph")
def call_bool(trace: Trace, proceed: Proceed, self: Any, tx: Any, arg: Any) -> Any:
    """`bool(n)` is True or False, as in Python, and not a symbol, which would be neither."""
    if isinstance(arg, TensorVariable):
        return _constant(_truth(trace, tx, arg))
    return _constant(_answer(trace, tx, arg)) if isinstance(arg, SymNodeVariable) else NOT_HANDLED


@handlers.at(
    method("torch._dynamo.variables.misc.NumpyVariable", "call_function"),
    order=2,
    without="`np.prod(x.shape)` fails where a size is known only at run time",
)
def product_of_sizes(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """`np.prod` makes an array of the sizes, which such a size cannot be in. A remainder or quotient of it that is
    compared is as that of Python's integers."""
    sizes = args[0].realize() if len(args) == 1 and not kwargs else None
    if getattr(self.value, "__name__", "") != "prod" or not isinstance(sizes, BaseListVariable) or not sizes.items:
        return NOT_HANDLED
    if not _is_divided_and_compared(tx):
        return NOT_HANDLED
    numbers = [item.realize() for item in sizes.items]
    if not any(isinstance(number, SymNodeVariable) and is_unbacked(number.sym_num) for number in numbers):
        return NOT_HANDLED
    if not all(isinstance(number, SymNodeVariable) or _is_integer(number) for number in numbers):
        return NOT_HANDLED
    product = numbers[0]
    for number in numbers[1:]:
        product = BuiltinVariable(operator.mul).call_function(tx, [product, number], {})
    return product


def _is_divided_and_compared(tx: Any) -> bool:
    """Whether the value of the traced call is the left operand of `%` or `//`, and the result is compared."""
    depth, following = 0, tx.instructions[tx.instruction_pointer :]  # how many values lie above it on the stack
    for instruction in following:
        name = instruction.opname
        is_quotient = name in _QUOTIENTS or (name == "BINARY_OP" and instruction.arg in _QUOTIENTS)
        is_load = name.startswith("LOAD_") and name not in ("LOAD_ATTR", "LOAD_METHOD")
        if depth == 1 and name == "COMPARE_OP":
            return True
        if "JUMP" in name or (depth == 0 and not is_load) or (depth == 1 and "BINARY" in name and not is_quotient):
            return False
        try:
            depth += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        except ValueError:  # an instruction of Dynamo's own
            return False
    return False


def _is_integer(value: Any) -> bool:
    return value.is_python_constant() and type(value.as_python_constant()) is int


@handlers.at(method(BUILTIN, "call_function"), order=4, without="`range(0, n)` where n is a tensor breaks the graph")
def ranges(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.fn is not range:
        return NOT_HANDLED
    numbers = [_as_number(trace, tx, argument) for argument in args]
    return NOT_HANDLED if all(map(operator.is_, numbers, args)) else proceed(self, tx, numbers, kwargs)


@handlers.at(method(BUILTIN, "_call_min_max_seq"), without="`max(found.tolist())` of nothing fails in Dynamo")
def of_nothing(trace: Trace, proceed: Proceed, self: Any, tx: Any, items: Any) -> Any:
    if items:
        return NOT_HANDLED
    raise DynamoNames.find().unsupported(f"`{self.fn.__name__}` of nothing\n  Explanation: It raises `ValueError`.")


@handlers.at(method(TORCH_FUNCTION, "call_function"), order=3, without="`torch.equal(a, b)` breaks the graph")
def torch_function(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.value is torch.equal and len(args) == 2 and not kwargs:
        return _constant(_equal(trace, tx, *args))
    if self.value in _OF_SIZES:
        numbers = [_as_number(trace, tx, argument) for argument in args]
        named = {name: _as_number(trace, tx, argument) for name, argument in kwargs.items()}
        same = all(map(operator.is_, (*numbers, *named.values()), (*args, *kwargs.values())))
        return NOT_HANDLED if same else proceed(self, tx, numbers, named)
    return NOT_HANDLED


def _is_metadata(trace: Trace, input: Any) -> bool:
    return _are_metadata(trace, [input])


@substitute(handlers, torch.is_nonzero, when=_is_metadata, without="`torch.is_nonzero(tensor)` breaks the graph")
def is_nonzero(input: Tensor) -> bool:
    return bool(input)


def _are_both_metadata(trace: Trace, input: Any, other: Any, **options: Any) -> bool:
    return _are_metadata(trace, [input, other]) and are_constants(*options.values())


@substitute(handlers, torch.allclose, when=_are_both_metadata, without="`torch.allclose(a, b)` breaks the graph")
def allclose(input: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


@handlers.at(method(TORCH_FUNCTION, "call_function"), order=7, without="`torch.autograd.grad` behind a read may fail")
def gradient(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """If the graph breaks at `torch.autograd.grad`, the tensors in that call are results of one graph, which autograd
    takes to be independent of each other. A read between them would have made two graphs of it."""
    if self.value is not torch.autograd.grad or trace.attempt.flags is None:
        return NOT_HANDLED
    if not any(node.target == "item" for node in tx.output.graph.nodes):
        return NOT_HANDLED
    try:
        return proceed(self, tx, args, kwargs)
    except DynamoNames.find().unsupported as broken:
        raise CaptureRejected("a gradient is taken behind a read") from broken


@handlers.at(method(TENSOR, "call_method"), order=2, without="`.tolist()` of a nonzero breaks the graph")
def tensor_method(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "tolist" and not args and not kwargs:
        return _numbers(trace, tx, self)
    if name == "equal" and len(args) == 1 and not kwargs:
        return _constant(_equal(trace, tx, self, args[0]))
    if name in _TAKE_SIZES and args:
        numbers = [_as_number(trace, tx, argument) for argument in args]
        return NOT_HANDLED if all(map(operator.is_, numbers, args)) else proceed(self, tx, name, numbers, kwargs)
    return NOT_HANDLED


@handlers.at(
    method("torch._dynamo.variables.lists.SliceVariable", "__init__"),
    without="`x[:n]` where n is a tensor may break the graph",
)
def bounds(trace: Trace, proceed: Proceed, self: Any, items: Any, tx: Any = None, **kwargs: Any) -> Any:
    if tx is None or not any(isinstance(item.realize(), TensorVariable) for item in items):
        return NOT_HANDLED
    return proceed(self, [_as_bound(trace, tx, item) for item in items], tx, **kwargs)


@handlers.at(
    Site(f"{PROTOCOL}.generic_richcompare_bool", lambda: _namesakes("generic_richcompare_bool")),
    without="`[n, 4] == [tensor, 4]` fails, as under stock PyTorch with its capture flags",
)
def equal_items(trace: Trace, proceed: Proceed, tx: Any, v: Any, w: Any, *args: Any, **kwargs: Any) -> Any:
    """`x.size() == [n, 4]` where n is a tensor: lists ask for the truth of each comparison; n is read as a number."""
    numbers = [_as_number(trace, tx, item) for item in (v, w)]
    same = all(number is item.realize() for number, item in zip(numbers, (v, w), strict=True))
    return NOT_HANDLED if same else proceed(tx, *numbers, *args, **kwargs)


def _namesakes(name: str) -> list[tuple[Any, str]]:
    """A function of Dynamo's protocols, and its name in the modules that import it; none on torch 2.11."""
    return [(module, name) for module in (protocol, lists, dicts) if hasattr(module, name)]


def _as_bound(trace: Trace, tx: Any, argument: Any) -> Any:
    """A bound of a slice as a number, whose sign is settled before the size of the slice depends on it."""
    number = _as_number(trace, tx, argument)
    if number is not argument and isinstance(number, SymNodeVariable) and trace.can_answer(number.sym_num):
        bool(number.sym_num >= 0)
    return number


def _as_number(trace: Trace, tx: Any, argument: Any) -> Any:
    """`tensor.item()` for a tensor of metadata where an operator takes a size, also in a list; else the argument."""
    argument = argument.realize()
    if isinstance(argument, BaseListVariable):
        items = [_as_number(trace, tx, item) for item in argument.items]
        return argument if all(map(operator.is_, items, argument.items)) else TupleVariable(items)
    if not isinstance(argument, TensorVariable) or not _are_metadata(trace, (argument,)):
        return argument
    example = argument.as_proxy().node.meta["example_value"]
    is_size = example.ndim == 0 and not example.dtype.is_floating_point and example.dtype is not torch.bool
    return argument.call_method(tx, "item", [], {}) if is_size else argument


def _constant(value: bool | None) -> Any:
    return NOT_HANDLED if value is None else ConstantVariable.create(value)


def _truth(trace: Trace, tx: Any, tensor: Any) -> bool | None:
    """The truth of a tensor of metadata with one element, else None."""
    example = tensor.as_proxy().node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return None
    if any(not isinstance(size, int) or size != 1 for size in example.shape):
        return None
    return _answer(trace, tx, tensor.call_method(tx, "item", [], {})) if _are_metadata(trace, (tensor,)) else None


def _answer(trace: Trace, tx: Any, number: Any) -> bool | None:
    """The truth of one of Dynamo's numbers; None if it has no hint."""
    if number.is_python_constant():
        return bool(number.as_python_constant())
    if not isinstance(number, SymNodeVariable) or not trace.can_answer(number.sym_num):
        return None
    if not isinstance(number.sym_num, torch.SymBool):
        number = SymNodeVariable.create(tx, number.as_proxy() != 0)
        if number.is_python_constant():
            return bool(number.as_python_constant())
    return bool(number.evaluate_expr(tx.output))


def _numbers(trace: Trace, tx: Any, tensor: Any) -> Any:
    """`.tolist()` of a data-dependent number of integers.

    Dynamo would unbind the tensor, which creates symbols that nothing binds. Here the batch determines the size, and
    each element is read.
    """
    example = tensor.as_proxy().node.meta["example_value"]
    if trace.attempt.flags is not None and example.ndim == 1 and _is_computed(example.shape[0]):
        text = "Each batch may have another number of them, and would be a graph of its own"
        raise DynamoNames.find().unsupported(f"`.tolist()` of a computed number of elements\n  Explanation: {text}.")
    if example.ndim != 1 or example.dtype.is_floating_point or not is_unbacked(example.shape[0]):
        return NOT_HANDLED
    if not _are_metadata(trace, (tensor,)) or not trace.can_answer(example.shape[0]):
        return NOT_HANDLED
    size: Any = tensor.call_method(tx, "size", [ConstantVariable.create(0)], {})
    count = size.as_python_constant() if size.is_python_constant() else size.evaluate_expr(tx.output)
    places = [ConstantVariable.create(place) for place in range(count)]
    items = [tensor.call_method(tx, "__getitem__", [p], {}).call_method(tx, "item", [], {}) for p in places]
    return ListVariable(items, mutation_type=ValueMutationNew())


def _is_computed(size: Any) -> bool:
    """Whether a size is computed from several numbers that the frame receives: from two images' sides, say."""
    return isinstance(size, torch.SymInt) and not is_unbacked(size) and len(free_symbols(size)) > 1


def _are_metadata(trace: Trace, values: Any) -> bool:
    return trace.graph is not None and all(
        isinstance(value, TensorVariable) and trace.graph.is_metadata(value.as_proxy().node) for value in values
    )


def _equal(trace: Trace, tx: Any, one: Any, other: Any) -> bool | None:
    """`torch.equal` of two tensors of metadata: equal sizes, and equal elements; None for other tensors."""
    if not _are_metadata(trace, (one, other)):
        return None
    shapes = [tensor.as_proxy().node.meta["example_value"].shape for tensor in (one, other)]
    if len(shapes[0]) != len(shapes[1]):
        return False
    for pair in zip(*shapes, strict=True):
        if not all(trace.can_answer(size) for size in pair):
            return None
        if pair[0] != pair[1]:
            return False
    return _truth(trace, tx, one.call_method(tx, "eq", [other], {}).call_method(tx, "all", [], {}))
