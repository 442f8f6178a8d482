"""The modes of the process that calls of a graph enter and leave: autocast, gradients, levels of function transforms.

_set_grad_enabled(False)         no place to cut the graph
cos = freqs.cos()
_set_grad_enabled(True)
enter = _enter_autocast(...)     from here on, a graph that is cut out has to enter the same autocast
h = linear(x, w)
_exit_autocast(enter)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, Node

from fxpasses.graph.refusals import Refused
from fxpasses.report import Reason

_WITHOUT_EFFECT = frozenset(
    {"_assert", "_assert_async", "_assert_scalar", "_check", "_check_is_size", "_log_api_usage_once",
     "lazy_load_decompositions", "sym_constrain_range", "sym_constrain_range_for_size"}
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """autocast: the open calls of `_enter_autocast`, outermost first. changed: whether another mode differs from the
    one in which the graph begins."""

    autocast: tuple[Node, ...] = ()
    changed: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of each open autocast: equal for equal modes."""
        return tuple(call.args for call in self.autocast)


def enters_autocast(node: Node) -> bool:
    return node.target is _enter_autocast


def leaves_autocast(node: Node) -> bool:
    return node.target is _exit_autocast


def modes(graph: Graph) -> dict[Node, Mode]:
    """The mode before each call of a graph; raises `Refused` if a call may change a mode that is not known.

    To be called in the modes in which the graph begins, as Dynamo calls a backend.
    """
    autocast: tuple[Node, ...] = ()
    at_first = gradients = torch.is_grad_enabled()
    levels = 0
    found = {}
    for node in graph.nodes:
        if not node.op.startswith("call"):
            continue
        found[node] = Mode(autocast, levels > 0 or gradients is not at_first)
        name = getattr(node.target, "__name__", "")
        if enters_autocast(node):
            autocast = (*autocast, node)
        elif leaves_autocast(node):
            autocast = autocast[:-1]
        elif name.endswith(("increment_nesting", "decrement_nesting")):
            levels += 1 if name.endswith("increment_nesting") else -1
        elif name == "_set_grad_enabled":
            gradients = bool(node.args[0])
        elif _may_change_modes(node, name):
            raise Refused(Reason.UNKNOWN_OPERATOR, f"`{name or node.target}` may change the mode of what follows", node)
    return found


Regions: TypeAlias = tuple[tuple[Any, ...], ...]  # each region's arguments of `_enter_autocast`, outermost first


def autocast_regions(graph: Graph, around: Regions = ()) -> dict[Node, Regions]:
    """The autocast regions that are open before each node. around: those that are open where the graph begins."""
    found = {}
    for node in graph.nodes:
        found[node] = around
        around = regions_after(node, around)
    return found


def regions_after(node: Node, around: Regions) -> Regions:
    """The autocast regions that are open after a node: `around` itself, if the node neither enters nor leaves one."""
    if enters_autocast(node):
        return (*around, tuple(node.args))
    return around[:-1] if leaves_autocast(node) else around


def _may_change_modes(node: Node, name: str) -> bool:
    if node.op != "call_function" or node.all_input_nodes or name in _WITHOUT_EFFECT:
        return False
    return not isinstance(node.meta.get("example_value"), (torch.Tensor, int, float, torch.SymInt, tuple, list))


def enter(graph: Graph, open_calls: Iterable[Node]) -> dict[Node, Node]:
    """Enter autocast as the given calls do; returns the new call for each."""
    return {node: graph.call_function(_enter_autocast, node.args) for node in open_calls}


def leave(graph: Graph, open_calls: Iterable[Node]) -> None:
    """Leave the autocast regions of the given calls, outermost first."""
    for node in reversed(list(open_calls)):
        graph.call_function(_exit_autocast, (node,))
