"""Insert new nodes, each with its value on fake tensors, at one place of a graph; undo all of them if one fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fxpasses.graph import effects
from fxpasses.graph.aliases import storages
from fxpasses.graph.calls import operator_of
from fxpasses.graph.refusals import Refused
from fxpasses.graph.symbols import is_symbolic, is_unbacked, symbol
from fxpasses.report import Reason

# Operators that create new symbols in every run on fake tensors.
_ASKING = ("where", "nonzero", "masked_select", "item", "unique", "getitem")
_PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack")


class NodeBuilder:
    """Creates nodes at the graph's insertion point, with the provenance of `origin`.

    reason: that of the refusal if a node cannot be created. autocast: the regions around the place.
    """

    def __init__(
        self,
        graph: Graph,
        fake_mode: Any,
        origin: Node,
        reason: Reason = Reason.UNKNOWN_OPERATOR,
        autocast: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        self.graph = graph
        self._fake_mode = fake_mode
        self._origin, self._reason, self._autocast = origin, reason, autocast
        self._emitted: dict[Node, None] = {}

    def __call__(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, like: Node | None = None
    ) -> Node:
        """Call a function, or a method if `target` is a string, or the target of `like`; raises `Refused`."""
        kwargs = kwargs or {}
        op = like.op if like is not None else "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(op, target if like is None else like.target, args, kwargs)
        self._note(node, like or self._origin)
        fakes = torch.fx.map_arg((args, kwargs), lambda operand: operand.meta["example_value"])
        try:
            with self._fake_mode, enable_python_dispatcher(), effects.regions(self._autocast):
                node.meta["example_value"] = effects.call(node, *fakes)
        except Exception as error:
            raise Refused(self._reason, f"`{node.name}` cannot be created: {error}", like or self._origin) from error
        return node

    def size(self, tensor: Node, axis: int) -> int | Node:
        """A size of a tensor: an integer, or a node if it is symbolic."""
        size = tensor.meta["example_value"].shape[axis]
        return size if isinstance(size, int) else self(torch.ops.aten.sym_size.int, (tensor, axis))

    def read(self, element: Node, number: torch.SymInt, bound: Any) -> Node:
        """`element.item()`, the number whose symbol in the graph is `bound`."""
        node = self.graph.create_node("call_method", "item", (element,), {})
        self._note(node, self._origin)
        node.meta["example_value"] = number
        node.meta["unbacked_bindings"] = {bound: ()}
        return node

    def ask(self, element: Node) -> Node:
        """`element.item()` of an integer tensor [], with a new symbol."""
        with effects.quiet(self._fake_mode):
            number: Any = element.meta["example_value"].item()
        return self.read(element, number, symbol(number))

    def settle(self, number: Node, known: int | Node) -> None:
        """Replace a symbolic number by its known value, and update the nodes that depend on it."""
        self._update(_replace_by_number(number, known), [])

    def update(self, results: list[Node]) -> None:
        """Update the nodes that depend on results whose sizes are now known."""
        self._update({user for node in results for user in node.users}, results)

    def _update(self, stale: set[Node], known: list[Node]) -> None:
        """Recompute fake values whose sizes were unknown, and the values of all nodes that share their memory."""
        renewed: set[int] = set()
        for node in [node for node in self.graph.nodes if node not in known]:
            before = node.meta.get("example_value")
            asks = "unbacked_bindings" in node.meta and operator_of(node) in _ASKING
            if node not in stale or asks or not node.op.startswith("call"):
                continue
            shared = set(storages(node))
            if not shared & renewed and not any(map(_is_unknown, pytree.tree_leaves(before))):
                continue
            fakes = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("example_value"))
            with self._fake_mode, enable_python_dispatcher():
                value = effects.call(node, *fakes)
            if isinstance(value, int):
                stale |= _replace_by_number(node, value)
                self.graph.erase_node(node)
                continue
            node.meta["example_value"] = value
            node.meta.pop("unbacked_bindings", None)
            renewed |= shared
            stale |= set(node.users)

    def made(self, node: Node) -> bool:
        """Whether this builder created the node."""
        return node in self._emitted

    @contextlib.contextmanager
    def before(self, place: Node) -> Iterator[None]:
        """Insert before a node; a `Refused` removes all new nodes again."""
        try:
            with self.graph.inserting_before(place):
                yield
        except Refused:
            for node in reversed(self._emitted):
                self.graph.erase_node(node)
            raise

    def after(self, place: Node) -> Any:
        """Insert after a node, before everything that may depend on it."""
        following = place.next
        while following.op == "placeholder":
            following = following.next
        return self.graph.inserting_before(following)

    def _note(self, node: Node, origin: Node) -> None:
        self._emitted[node] = None
        node.meta = {key: value for key, value in origin.meta.items() if key in _PROVENANCE}


def erase_unused(nodes: Iterable[Node], removable: Callable[[Node], bool]) -> None:
    """Erase those of the nodes that are removable and have no users, then their operands in the same way."""
    waiting, erased = list(nodes), set[Node]()
    while waiting:
        node = waiting.pop(0)
        if node not in erased and not node.users and removable(node):
            waiting += node.all_input_nodes
            erased.add(node)
            node.graph.erase_node(node)


def replace_operand(user: Node, old: Node, new: Any) -> None:
    """Let `user` take a node, or a number, in place of an operand."""
    user.args, user.kwargs = torch.fx.map_arg((user.args, user.kwargs), lambda n: new if n is old else n)


def _replace_by_number(node: Node, number: int | Node) -> set[Node]:
    """Replace a node by a number in its users; returns them."""
    users = set(node.users)
    for user in users:
        replace_operand(user, node, number)
    return users


def _is_unknown(value: Any) -> bool:
    return (isinstance(value, torch.Tensor) or is_symbolic(value)) and is_unbacked(value)


def nodes_after(first: Node, root: Node) -> Iterator[Node]:
    """The nodes of a graph after a given one, the last one first."""
    node = root.prev
    while node is not first and node is not root:
        yield node
        node = node.prev
