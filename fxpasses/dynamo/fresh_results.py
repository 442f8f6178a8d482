"""Results of copied operators, made without running them: the original's fake tensors, with other memory and sizes.

    y = silu(x)      [u0, 64], in memory of its own      y_1, the copy for `layers[1]`: [u4, 64], in memory of its own

Operators on fake tensors of a size without a value take milliseconds, most of them for questions about the size, whose
answers are known from the original. What shares memory with an operand, is written to, or has put an assertion on the
size, runs.

Private names, checked on torch 2.11, 2.13 and 2.15: `FakeTensor(mode, meta tensor, device)` and its `constant`; of the
shape environment, `create_symintnode`, `create_unbacked_symint` and `_constrain_range_for_size`; `unbacked_bindings` in
a node's `meta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from fxpasses.dynamo.made_sizes import Known, renamed
from fxpasses.graph.aliases import storages, storages_of, written_operands
from fxpasses.graph.effects import storage_key
from fxpasses.graph.symbols import expression, is_symbolic


def fresh_in(nodes: Iterable[Node], sizes: Mapping[Any, Known]) -> frozenset[Node]:
    """The nodes whose results may be made, of those of a layer and of the bodies in it.

    sizes: the symbols that the nodes have made, and what is known of them.
    """
    nodes = list(nodes)
    if any(known.asserted or known.replacement is not None for known in sizes.values()):
        return frozenset()
    operators = [node for node in nodes if not isinstance(node.target, torch._ops.HigherOrderOperator)]
    written = {storage for node in operators for operand in written_operands(node) for storage in storages(operand)}
    return frozenset(node for node in nodes if _is_fresh(node, written, sizes))


def _is_fresh(node: Node, written: set[int], sizes: Mapping[Any, Known]) -> bool:
    if node.op not in ("call_function", "call_method") or not _is_of_torch(node.target):
        return False
    results = pytree.tree_leaves(node.meta.get("example_value"))
    if not results or not all(map(_is_plain, results)) or written_operands(node):
        return False
    bound = [sizes[symbol] for symbol in node.meta.get("unbacked_bindings") or ()]
    if not all(known.is_size and known.range.lower == 0 for known in bound):
        return False
    own = storages(node)
    if len(set(own)) < len(results) and any(
        value.requires_grad or value.dtype != results[0].dtype for value in results
    ):
        return False
    given = {storage for operand in node.all_input_nodes for storage in storages(operand)}
    return len(own) == len(results) and given.isdisjoint(own) and written.isdisjoint(own)


def _is_of_torch(target: Any) -> bool:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return True
    module = getattr(target, "__module__", None) or "torch"
    return not isinstance(target, torch._ops.HigherOrderOperator) and module.partition(".")[0] in ("torch", "_operator")


def _is_plain(value: Any) -> bool:
    """Whether a result is a fake tensor like any other."""
    return (
        type(value) is FakeTensor
        and value.layout is torch.strided
        and value.constant is None
        and not (value.requires_grad and value.is_leaf)
        and not (value.is_conj() or value.is_neg() or value.is_inference())
    )


class FreshResults:
    """symbols: those of the copy's sizes, by the original's, to which those that results bind are added."""

    def __init__(self, output: Any, sizes: Mapping[Any, Known], symbols: dict[Any, Any]) -> None:
        self._fake_mode, self._shape_env = output.fake_mode, output.shape_env
        self._sizes, self._symbols = sizes, symbols
        self._numbers: dict[Any, Any] = {}  # by expression

    def of(self, node: Node) -> Any:
        """The result of a copy of a node of `fresh_in`."""
        for made in node.meta.get("unbacked_bindings") or ():
            number = self._shape_env.create_unbacked_symint()
            known = self._sizes[made]
            self._shape_env._constrain_range_for_size(number.node.expr, 0, known.most)
            self._symbols[made], self._numbers[number.node.expr] = number.node.expr, number
        return self.like(node.meta["example_value"])

    def like(self, value: Any) -> Any:
        """Tensors like those of a value, in memory of their own, or in one that they share.

        Whether they have its form is for the caller to ask.
        """
        tensors, structure = pytree.tree_flatten(value)
        memories: dict[int, Any] = {}
        shares = len({*storages_of(value)}) < len(tensors)
        made = [self._view(each, memories) if shares else self._made(each) for each in tensors]
        return pytree.tree_unflatten(made, structure)

    def _made(self, original: FakeTensor) -> Any:
        sizes, strides = ([self._number(number) for number in each] for each in (original.shape, original.stride()))
        meta = torch.empty(sizes, dtype=original.dtype, device="meta")
        if [*map(expression, meta.stride())] != [*map(expression, strides)]:
            meta = torch.empty_strided(sizes, strides, dtype=original.dtype, device="meta")
        made = FakeTensor(self._fake_mode, meta, original.device)
        return _Result.apply(_ANCHOR, [made]) if original.requires_grad else made

    def _view(self, original: FakeTensor, memories: dict[int, Any]) -> Any:
        """memories: by the original's."""
        key = storage_key(original)
        if key not in memories:
            elements = self._number(original.untyped_storage().nbytes() // original.element_size())
            memories[key] = torch.empty(elements, dtype=original.dtype, device="meta")
        sizes, strides = ([self._number(number) for number in each] for each in (original.shape, original.stride()))
        meta = memories[key].as_strided(sizes, strides, self._number(original.storage_offset()))
        return FakeTensor(self._fake_mode, meta, original.device)

    def _number(self, number: Any) -> Any:
        if not is_symbolic(number):
            return number
        found = renamed(number.node.expr, self._symbols)
        if found == number.node.expr:
            return number
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
