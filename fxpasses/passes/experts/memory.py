"""Whether a value keeps what it was made with until it is asked again: who writes to its memory, through any view.

A pass that reads `idx == e` from the graph, and sorts `idx` in its place, must know that nobody changed the mask before
it was asked, nor `idx` after. Nodes share memory where their examples on fake tensors share a storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fxpasses.graph import effects
from fxpasses.graph.effects import leaves, storage_key
from fxpasses.graph.families import operator_of

# Never write, whatever their arguments; asking PyTorch takes a run on fake tensors.
_PURE = frozenset(
    {"add", "any", "eq", "floordiv", "gather_rows", "getitem", "matmul", "mod", "mul", "ne", "nonzero", "one_hot",
     "permute", "reshape", "size", "sum", "topk", "transpose", "unsqueeze", "view", "where", "sym_size.int"}
)  # fmt: skip


class Memory:
    """Who uses which memory in one graph. inputs_in_one: storages of inputs that may be the same memory."""

    def __init__(self, graph: Graph, fake_mode: Any, inputs_in_one: Iterable[int] = ()) -> None:
        self._graph, self._fake_mode = graph, fake_mode
        self._inputs_in_one = frozenset(inputs_in_one)
        self._storages_of: dict[Node, frozenset[int]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look at the graph again, after it was changed."""
        self._users: defaultdict[int, list[Node]] = defaultdict(list)
        self._written: dict[Node, frozenset[int]] = {}
        self.positions: dict[Node, int] = {}
        for position, node in enumerate(self._graph.nodes):
            self.positions[node] = position
            for key in {key for operand in node.all_input_nodes for key in self._storages(operand)}:
                self._users[key].append(node)

    def is_constant(self, node: Node) -> bool:
        """Whether nobody writes to a node's memory once it is made."""
        return self.writer(node, node, None) is None

    def is_pure(self, node: Node) -> bool:
        """Whether a node writes to none of its operands, and so can go where nobody looks at it."""
        return not self.written_by(node)

    def written_by(self, node: Node) -> frozenset[int]:
        """The storages that a node may write to."""
        if node not in self._written:
            self._written[node] = self._find_written(node)
        return self._written[node]

    def writer(self, node: Node, after: Node, until: Node | None) -> Node | None:
        """Who may write to the memory of `node` after one node and before another."""
        return next(
            (user for user in self.users(node, after, until) if self.written_by(user) & self._storages(node)), None
        )

    def users(self, node: Node, after: Node, until: Node | None) -> Iterator[Node]:
        """Who looks at the memory of `node`, by whatever view, after one node and before another."""
        start = self.positions[after]
        end = self.positions[until] if until is not None else len(self.positions)
        found = {user for key in self._storages(node) for user in self._users[key]}
        return iter(sorted((u for u in found if start < self.positions[u] < end), key=self.positions.__getitem__))

    def _storages(self, node: Node) -> frozenset[int]:
        if node not in self._storages_of:
            keys = frozenset(storages(node))
            self._storages_of[node] = keys | self._inputs_in_one if keys & self._inputs_in_one else keys
        return self._storages_of[node]

    def _find_written(self, user: Node) -> frozenset[int]:
        if user.op not in ("call_function", "call_method", "call_module") or operator_of(user) in _PURE:
            return frozenset()
        everything = frozenset(key for operand in user.all_input_nodes for key in self._storages(operand))
        if user.op == "call_module" or isinstance(user.target, torch._ops.HigherOrderOperator):
            return everything  # its body may
        args, kwargs = torch.fx.map_arg((user.args, user.kwargs), lambda operand: operand.meta.get("example_value"))
        touch = effects.touch(user, args, kwargs, self._fake_mode)
        if touch is None:
            return everything
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = frozenset(storage_key(tensors[position]) for position in touch.writes)
        return written | self._inputs_in_one if written & self._inputs_in_one else written


def storages(node: Node) -> Iterator[int]:
    """The storages of a node's tensors."""
    for leaf in pytree.tree_leaves(node.meta.get("example_value")):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            try:
                yield storage_key(leaf)
            except (NotImplementedError, RuntimeError):  # a subclass without a storage of its own
                continue
