"""New nodes before an attention, each with its value on fake tensors; taken out again where the rest fails."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node

from fxpasses.graph import effects
from fxpasses.graph.families import operator_of
from fxpasses.passes.attention.found import Attention, Kept, Operand
from fxpasses.passes.attention.spelling import same, shape_of, tensor_of
from fxpasses.report import Reason

_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack")
_USUAL = (0, 1, 2, 3)


class Emitter:
    """Makes nodes before `origin`, under the autocast regions around it, and says that they come from where it does."""

    def __init__(self, graph: Graph, fake_mode: Any, origin: Node, autocast: tuple[Any, ...]) -> None:
        self._graph, self._fake_mode, self._origin, self._autocast = graph, fake_mode, origin, autocast
        self._emitted: list[Node] = []

    def __call__(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
        """A call of a function, or of a method if `target` is a string; raises `Kept` where it cannot be made."""
        kwargs = kwargs or {}
        op = "call_method" if isinstance(target, str) else "call_function"
        with self._graph.inserting_before(self._origin):
            node = self._graph.create_node(op, target, args, kwargs)
        self._emitted.append(node)
        node.meta = {key: value for key, value in self._origin.meta.items() if key in _PROVENANCE}
        fakes = torch.fx.map_arg((args, kwargs), lambda operand: operand.meta["example_value"])
        try:
            with self._fake_mode, enable_python_dispatcher(), contextlib.ExitStack() as stack:
                for device_type, dtype, enabled, cache_enabled in self._autocast:
                    stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled))
                node.meta["example_value"] = effects.call(node, *fakes)
        except Exception as error:
            raise Kept(Reason.NOT_BY_HEADS, f"`{node.name}` cannot be made: {error}", self._origin) from error
        return node

    def undo(self) -> None:
        for node in reversed(self._emitted):
            self._graph.erase_node(node)

    def by_heads(self, operand: Operand) -> Node:
        """An operand as [batch, heads, tokens, width]."""
        node = operand.node
        if operand.order != tuple(range(len(operand.order))):
            node = self("permute", (node, operand.order))
        return node if len(operand.order) == 4 else self("unsqueeze", (node, 0))

    def size(self, operand: Operand, axis: int) -> Any:
        """A size of an operand, its axes in order: an integer, or a node where it is symbolic."""
        axis = operand.order[axis]
        size = shape_of(operand.node)[axis]
        return size if isinstance(size, int) else self("size", (operand.node, axis))

    def as_before(self, result: Node, attention: Attention) -> Node:
        """The result with the axes, and the strides, of the attention that it takes the place of."""
        if len(attention.order) == 3:
            result = self("squeeze", (result, 0))
        if attention.order != _USUAL[: len(attention.order)]:
            result = self("permute", (result, attention.order))
        return self._as_laid_out(result, attention)

    def _as_laid_out(self, result: Node, attention: Attention) -> Node:
        """The result with the strides that it had, if any user may ask for them.

        SDPA's result is laid out as the new operator's, whatever Dynamo's example of it says.
        """
        before = attention.node
        found, expected = tensor_of(result), tensor_of(before)
        assert found is not None and expected is not None
        if found.dtype is not expected.dtype or not same(tuple(found.shape), tuple(expected.shape)):
            raise Kept(Reason.NOT_BY_HEADS, f"it gives {expected.dtype} {list(expected.shape)}", before)
        if same(tuple(found.stride()), tuple(expected.stride())) or all(
            _ignores_strides(user) or (attention.fused and user.op == "output") for user in before.users
        ):
            return result
        if not expected.is_contiguous():
            raise Kept(Reason.NOT_BY_HEADS, f"it gives strides {list(expected.stride())}", before)
        return self("contiguous", (result,))


# What these give does not depend on the strides of what they take, but for whether it is a copy.
_OF_ANY_STRIDES = frozenset({"contiguous", "reshape", "linear", "matmul", "clone", "flatten"})
_MOVES_AXES = frozenset({"transpose", "permute"})


def _ignores_strides(user: Node) -> bool:
    name = operator_of(user)
    return name in _OF_ANY_STRIDES or (name in _MOVES_AXES and all(map(_ignores_strides, user.users)))


def size_of(size: Any) -> Any:
    """What a size is, be it given as a node or as a number."""
    return size.meta["example_value"] if isinstance(size, Node) else size
