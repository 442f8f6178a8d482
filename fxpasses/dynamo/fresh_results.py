"""Results of copied operators, made without running them: the original's fake tensors, with other memory and sizes.

    y = silu(x)      [u0, 64], in memory of its own      y_1, the copy for `layers[1]`: [u4, 64], in memory of its own
    z = y[:, :32]    [u0, 32], in that of `y`            z_1: [u4, 32], in that of `y_1`

Operators on fake tensors of a size without a value take milliseconds, most of them for questions about the size, whose
answers are known from the original. What is written to, is returned as a view, or has put an assertion on the size,
runs. A write, `out.index_add_(0, tok, y)`, only advances the version of its operand, unless it gives it a gradient.

Private names, checked on torch 2.11, 2.13 and 2.15: `FakeTensor(mode, meta tensor, device)` and its `constant`;
`in_kernel_invocation_manager`, in which a fake tensor is the meta tensor that it has; of the shape environment,
`create_symintnode`, `create_unbacked_symint` and `_constrain_range_for_size`; `unbacked_bindings` in a node's `meta`;
`torch.ops.inductor.resize_storage_bytes_`, which takes a symbolic size.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx import Node
from torch.utils import _pytree as pytree

from fxpasses.dynamo.made_sizes import Known, renamed
from fxpasses.graph.aliases import storages, written_operands
from fxpasses.graph.calls import operator_of
from fxpasses.graph.symbols import is_symbolic
from fxpasses.graph.traits import SQUEEZES, VIEWS

# Return parts of their first operand's memory, at places that only its sizes and strides and the arguments decide.
_PARTS = VIEWS | SQUEEZES | {"chunk", "flatten", "narrow", "select", "split", "unbind", "unflatten"}
# Write elements of their first operand, whose sizes and dtype stay.
_WRITES = frozenset(
    {"add_", "copy_", "div_", "fill_", "index_add_", "index_copy_", "index_put_", "masked_fill_", "mul_",
     "scatter_", "scatter_add_", "scatter_reduce_", "sub_", "zero_"}
)  # fmt: skip


@dataclass(frozen=True)
class _Like:
    """A tensor to be made. offset: in its memory, or after the place where the operand begins."""

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class Made:
    """How to make the result of a copy of a node.

    source: the operand whose memory it is in, if it is a view. memory: the bytes of each tensor's memory, or, if there
    is but one number, of the memory that all tensors share; none for a view.
    """

    node: Node
    tensors: tuple[_Like, ...]
    structure: Any
    source: Node | None
    memory: tuple[Any, ...]


def made_in(nodes: Iterable[Node], sizes: Mapping[Any, Known], returned: Collection[Node]) -> Iterator[Made]:
    """How to make results of copies, for those of the nodes of a layer, and of the bodies in it, that need not run.

    sizes: the symbols that the nodes have made, and what is known of them. returned: the nodes that are used outside.
    """
    nodes, numbers = list(nodes), dict[Any, Any]()
    if _are_asserted(sizes):
        return
    operators = [node for node in nodes if not isinstance(node.target, torch._ops.HigherOrderOperator)]
    written = {storage for node in operators for operand in written_operands(node) for storage in storages(operand)}
    outside = {storage for node in returned for storage in storages(node)}
    for node in nodes:
        if not _is_of_plain_tensors(node, written, sizes):
            continue
        own, given = storages(node), [storage for operand in node.all_input_nodes for storage in storages(operand)]
        if set(own).isdisjoint(given):
            yield from _fresh(node, own, numbers)
        elif outside.isdisjoint(own):
            yield from _view(node, own, given, numbers)


def writes_in(nodes: Iterable[Node], sizes: Mapping[Any, Known]) -> Iterator[Node]:
    """The nodes that do nothing but write elements of their first operand, and return it."""
    if _are_asserted(sizes):
        return
    for node in nodes:
        if operator_of(node) in _WRITES and _is_of_torch(node.target) and written_operands(node) == [*node.args[:1]]:
            (operand,) = written_operands(node)
            value = node.meta.get("example_value")
            is_operand = value is operand.meta.get("example_value")
            if isinstance(value, FakeTensor) and is_operand and _is_plain(value) and not value._is_view():
                yield node


def _are_asserted(sizes: Mapping[Any, Known]) -> bool:
    return any(known.asserted or known.replacement is not None for known in sizes.values())


def _is_of_plain_tensors(node: Node, written: set[int], sizes: Mapping[Any, Known]) -> bool:
    if node.op not in ("call_function", "call_method") or not _is_of_torch(node.target):
        return False
    results = pytree.tree_leaves(node.meta.get("example_value"))
    if not results or not all(map(_is_plain, results)) or written_operands(node):
        return False
    bound = [sizes[symbol] for symbol in node.meta.get("unbacked_bindings") or ()]
    if not all(known.is_size and known.range.lower == 0 for known in bound):
        return False
    return len(storages(node)) == len(results) and written.isdisjoint(storages(node))


def _fresh(node: Node, own: list[int], numbers: dict[Any, Any]) -> Iterator[Made]:
    """Of an operator that allocates its results."""
    results, structure = pytree.tree_flatten(node.meta["example_value"])
    likes = tuple(_like(value, value.storage_offset(), numbers) for value in results)
    memory = _interned([value.untyped_storage().nbytes() for value in results], numbers)
    if len(set(own)) == len(results):
        yield Made(node, likes, structure, None, memory)
    elif len(set(own)) == 1 and not any(value.requires_grad or value.dtype != results[0].dtype for value in results):
        yield Made(node, likes, structure, None, memory[:1])


def _view(node: Node, own: list[int], given: list[int], numbers: dict[Any, Any]) -> Iterator[Made]:
    """Of an operator that returns parts of its only operand's memory."""
    results, structure = pytree.tree_flatten(node.meta["example_value"])
    if len(node.all_input_nodes) != 1 or given != [own[0]] or len(set(own)) > 1 or operator_of(node) not in _PARTS:
        return
    (source,) = node.all_input_nodes
    operand = source.meta["example_value"]
    is_tensor = isinstance(operand, FakeTensor) and all(value.dtype == operand.dtype for value in results)
    if not is_tensor or any(value is operand for value in results) or is_symbolic(operand.storage_offset()):
        return
    start = operand.storage_offset()
    likes = tuple(_like(value, value.storage_offset() - start, numbers) for value in results)
    yield Made(node, likes, structure, source, ())


def _like(value: FakeTensor, offset: Any, numbers: dict[Any, Any]) -> _Like:
    sizes, strides = (_interned(each, numbers) for each in (value.shape, value.stride()))
    (offset,) = _interned([offset], numbers)
    return _Like(sizes, strides, offset, value.dtype, value.device, value.requires_grad)


def _interned(found: Iterable[Any], numbers: dict[Any, Any]) -> tuple[Any, ...]:
    """Numbers, with one object for all that have the same expression, of which a copy then has one as well."""
    return tuple(numbers.setdefault(number.node.expr, number) if is_symbolic(number) else number for number in found)


def _is_of_torch(target: Any) -> bool:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return True
    module = getattr(target, "__module__", None) or "torch"
    return not isinstance(target, torch._ops.HigherOrderOperator) and module.partition(".")[0] in ("torch", "_operator")


def is_leaf(value: torch.Tensor) -> bool | None:
    """None for a part of a tensor that was written to afterwards, of which autograd refuses to tell."""
    try:
        return value.is_leaf
    except RuntimeError:
        return None


def _is_plain(value: Any) -> bool:
    """Whether a result is a fake tensor like any other."""
    return (
        type(value) is FakeTensor
        and value.layout is torch.strided
        and value.constant is None
        and not (value.requires_grad and is_leaf(value) is not False)
        and not (value.is_conj() or value.is_neg() or value.is_inference())
    )


def distance(made: Made, place: Any) -> int | None:
    """By how many elements `x[place]` begins later in its operand than the original, `x[2]`; None if not known."""
    node = made.node
    if made.source is None or node.target is not operator.getitem or type(node.args[1]) is not int:
        return None
    operand = made.source.meta["example_value"]
    size, stride = operand.shape[0], operand.stride(0)
    is_known = type(place) is type(size) is type(stride) is int and 0 <= node.args[1] < size and 0 <= place < size
    return (place - node.args[1]) * stride if is_known else None


class FreshResults:
    """symbols: those of the copy's sizes, by the original's, to which those that results bind are added."""

    def __init__(self, output: Any, sizes: Mapping[Any, Known], symbols: dict[Any, Any]) -> None:
        self._fake_mode, self._shape_env = output.fake_mode, output.shape_env
        self._sizes, self._symbols = sizes, symbols
        self._numbers: dict[Any, Any] = {}  # by expression
        self._renamed: dict[int, tuple[Any, Any]] = {}  # a number and that of the copy, by the identity of the former

    def of(self, made: Made, operand: Any = None, further: int = 0) -> Any:
        """The result of a copy of a node. operand: of a view, the fake tensor of which it is one.

        further: by how many elements a view begins later in its operand than the original's.
        """
        for symbol in made.node.meta.get("unbacked_bindings") or ():
            number = self._shape_env.create_unbacked_symint()
            known = self._sizes[symbol]
            self._shape_env._constrain_range_for_size(number.node.expr, 0, known.most)
            self._symbols[symbol], self._numbers[number.node.expr] = number.node.expr, number
        return self.like(made, operand, further)

    def like(self, made: Made, operand: Any = None, further: int = 0) -> Any:
        """Tensors like those of the original. Whether they have its form is for the caller to ask."""
        if made.source is not None:
            tensors = [self._part(each, operand, further) for each in made.tensors]
        else:
            memory = [self._memory(size, like.dtype) for size, like in zip(made.memory, made.tensors, strict=False)]
            shared = memory * len(made.tensors) if len(memory) == 1 else memory
            tensors = [self._in(found, each) for found, each in zip(shared, made.tensors, strict=True)]
        return pytree.tree_unflatten(tensors, made.structure)

    def _memory(self, size: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor with a memory of so many bytes. `torch.empty` would ask ten questions about symbolic sizes."""
        memory = torch.empty(0, dtype=dtype, device="meta")
        torch.ops.inductor.resize_storage_bytes_(memory, self._number(size))
        return memory

    def _in(self, memory: torch.Tensor, like: _Like) -> Any:
        sizes, strides = ([*map(self._number, each)] for each in (like.sizes, like.strides))
        return self._result(memory.as_strided(sizes, strides, self._number(like.offset)), like)

    def _part(self, like: _Like, operand: Any, further: int) -> Any:
        start = operand.storage_offset() + further
        sizes, strides = ([*map(self._number, each)] for each in (like.sizes, like.strides))
        with torch.no_grad(), in_kernel_invocation_manager(self._fake_mode):
            meta = operand.as_strided(sizes, strides, self._number(like.offset) + start)
        return self._result(meta, like)

    def _result(self, meta: torch.Tensor, like: _Like) -> Any:
        made = FakeTensor(self._fake_mode, meta, like.device)
        return _Result.apply(_ANCHOR, [made]) if like.requires_grad else made

    def _number(self, number: Any) -> Any:
        if not is_symbolic(number):
            return number
        if id(number) not in self._renamed:
            found = renamed(number.node.expr, self._symbols)
            of_copy = number if found == number.node.expr else self._of_expression(found)
            self._renamed[id(number)] = number, of_copy
        return self._renamed[id(number)][1]

    def _of_expression(self, found: Any) -> Any:
        if found not in self._numbers:
            self._numbers[found] = self._shape_env.create_symintnode(found, hint=None)
        return self._numbers[found]


class _Result(torch.autograd.Function):
    """Gives a tensor a gradient function, as if it had been computed. In a list, it is no argument, and so is new."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, made: list[Any]) -> Any:
        return made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("fake tensors have no backward pass")


_ANCHOR = torch.zeros((), requires_grad=True)
