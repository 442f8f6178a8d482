"""Whether a graph's results require gradients although some intermediates do not: a lower bound.

A program may request the gradient of an intermediate that nobody reads: `embedded.requires_grad_()`. The graph's
examples show which values require a gradient because of the request. AOTAutograd differentiates only with respect to
inputs, so the request may be left out if no result loses its gradient, and no operator on the way then has another
effect:

    x = embedding(ids, frozen);  x.requires_grad_()
    y = linear(x, frozen_w)         requires a gradient only with the request
    z = y + linear(x, a)            requires one in any case, because `a` does: a result that depends on z may stay

A node whose operands all keep their gradients keeps its own; one whose operands all lose theirs loses it. Only nodes
with operands of both kinds run again, on fake tensors. A tensor that is written to has the gradients of the writes so
far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fxpasses.graph import effects
from fxpasses.graph.aliases import AliasSets, written_operands
from fxpasses.graph.calls import operator_of
from fxpasses.graph.effects import leaves
from fxpasses.graph.modes import modes, regions_after
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import CHECKPOINT, Region
from fxpasses.report import Reason

# Functions with a gradient of their own compute the same results whether their operands require gradients or not.
_FUNCTIONS = frozenset({"autograd_function_apply", "custom_function_call"})
Flags = tuple[bool, ...]  # one for each leaf of a node's result


def requiring(graph: Graph) -> set[Node]:
    """The nodes whose results require gradients, in the modes in which the graph begins.

    Examples that passes have computed may claim gradients where the program has switched them off: a node requires one
    only if one of its operands does. Raises `Refused` if a mode is not known.
    """
    found: set[Node] = set()
    before, enabled = modes(graph), torch.is_grad_enabled()
    for node in graph.nodes:
        is_given = not node.op.startswith("call")
        follows = is_given or any(operand in found for operand in node.all_input_nodes)
        if follows and any(_flags_of(node)) and (is_given or enabled is not before[node].changed):
            found.add(node)
    return found


def check_gradients(main: Region, without: Sequence[torch.Tensor], autocast: Sequence[Any], enabled: bool) -> None:
    """Raise `Refused` unless the graph's results are the same if the fake tensors `without` require no gradients.

    autocast, enabled: the autocast regions and autograd's mode around the graph.
    """
    walk = _Walk(without)
    flags = walk.region(main, tuple(autocast), enabled)
    output = main.gm.graph.output_node()
    for required, kept, operand in zip(_result_flags(output), flags, leaves(output.args), strict=True):
        if required and not kept:
            raise Refused(Reason.ESCAPES, f"`{operand.name}` is returned and would lose its gradient", operand)


class _Walk:
    """flags: whether a node's tensors certainly require gradients, as far as the graph has been walked."""

    def __init__(self, without: Sequence[torch.Tensor]) -> None:
        self.without = {id(tensor) for tensor in without}
        self.fake_mode = without[0].fake_mode  # type: ignore[attr-defined]
        self.flags: dict[Node, Flags] = {}

    def region(self, region: Region, autocast: tuple[Any, ...], enabled: bool) -> Flags:
        """Walk a graph or a body, and return the flags of its results."""
        nodes = region.gm.graph.nodes
        sets = AliasSets(nodes)
        writes = {node: written for node in nodes if (written := written_operands(node, region.gm))}
        changing = {number for written in writes.values() for operand in written for number in sets.of(operand)}
        for node in nodes:
            if (after := regions_after(node, autocast)) is not autocast:
                autocast = after
            elif getattr(node.target, "__name__", "") == "_set_grad_enabled":
                enabled = bool(node.args[0])
            elif node.op == "placeholder":
                self.flags[node] = self._of_placeholder(region, node, bool(sets.of(node) & changing))
            elif node.op == "get_attr":
                self.flags[node] = _flags_of(node)
            elif node.op != "output":
                is_stable = not sets.of(node) & changing and node not in writes
                self._visit(region, node, writes.get(node, []), is_stable, autocast, enabled)
            self._leave_out(node)
        return self._results(region.gm.graph.output_node())

    def _leave_out(self, node: Node) -> None:
        """Clear the flags of the tensors `without`; a checkpoint may return some of them among its results."""
        asked = [id(leaf) in self.without for leaf in pytree.tree_leaves(node.meta.get("example_value"))]
        if any(asked):
            flags = self.flags[node] if len(self.flags[node]) == len(asked) else (False,) * len(asked)
            self.flags[node] = tuple(flag and not left_out for flag, left_out in zip(flags, asked, strict=True))

    def _requests(self, body: Region) -> bool:
        """Whether the body of a checkpoint has tensors of `without`."""
        tensors = (leaf for node in body.gm.graph.nodes for leaf in _tensors(node))
        return any(id(leaf) in self.without for leaf in tensors) or any(map(self._requests, body.bodies.values()))

    def _results(self, output: Node) -> Flags:
        found: list[bool] = []
        for leaf in leaves(output.args):
            found += self.flags[leaf] if isinstance(leaf, Node) else [False]
        return tuple(found)

    def _of_placeholder(self, region: Region, node: Node, changes: bool) -> Flags:
        if region.parent is not None:
            operand = region.operands[node]
            return self.flags[operand] if isinstance(operand, Node) else (False,)
        return (False,) * len(_flags_of(node)) if changes else _flags_of(node)

    def _visit(
        self, region: Region, node: Node, written: list[Node], is_stable: bool, autocast: tuple[Any, ...], enabled: bool
    ) -> None:
        required = _flags_of(node)
        operands = [operand for operand in node.all_input_nodes if operand in self.flags]
        none = (False,) * len(required)
        is_kept = all(self.flags[o] == _flags_of(o) for o in operands)
        if node.target is CHECKPOINT and is_kept and any(required):
            is_kept = not self._requests(region.bodies[node])
        if is_stable and (not any(required) or is_kept):
            self.flags[node] = required
        elif node.target is CHECKPOINT:
            found = self.region(region.bodies[node], autocast, enabled) if is_stable else none
            self.flags[node] = found if len(found) == len(required) else none
        elif isinstance(node.target, torch._ops.HigherOrderOperator) or node.op == "call_module":
            if operator_of(node) not in _FUNCTIONS:
                raise Refused(Reason.HIGHER_ORDER, f"`{node.name}` may depend on whether its operands have gradients")
            self.flags[node] = none
        elif (picked := self._picked(node)) is not None:
            self.flags[node] = picked
        else:
            if not isinstance(node.target, torch._ops.OpOverload):
                effects.check_target(node)
            self.flags[node] = none
            if any(flag for operand in operands for flag in self.flags[operand]):
                self._run(node, written, autocast, enabled)

    def _picked(self, node: Node) -> Flags | None:
        """The flag of one item of a tuple, such as the results of a checkpoint."""
        if operator_of(node) != "getitem" or not isinstance(node.args[1], int):
            return None
        source = node.args[0]
        example = source.meta.get("example_value") if isinstance(source, Node) else None
        if not isinstance(source, Node) or not isinstance(example, (tuple, list)):
            return None
        flags = self.flags[source]
        return (flags[node.args[1]],) if len(flags) == len(example) else (False,) * len(_flags_of(node))

    def _run(self, node: Node, written: list[Node], autocast: tuple[Any, ...], enabled: bool) -> None:
        """Run a node on operands with gradients as known, and note those of its result and of the tensors it writes."""
        copies: dict[Node, Any] = {}

        def copied(operand: Node) -> Any:
            if operand not in copies:
                copies[operand] = self._copy(operand)
            return copies[operand]

        try:
            with effects.quiet(self.fake_mode), torch.set_grad_enabled(enabled), effects.regions(autocast):
                args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), copied)
                found = _flags(effects.call(node, args, kwargs))
        except Exception:  # unknown, so no gradient is assumed
            found = ()
        if len(found) == len(self.flags[node]):
            self.flags[node] = found
        for operand in written:
            self.flags[operand] = _flags(copies[operand]) if found else (False,) * len(self.flags[operand])

    def _copy(self, operand: Node) -> Any:
        """Copies of a node's examples with gradients as known; none of them is a leaf."""
        flags = iter(self.flags[operand])

        def copy(leaf: Any) -> Any:
            requires_grad = next(flags)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.detach().requires_grad_(requires_grad).clone()

        with torch.enable_grad():
            return pytree.tree_map(copy, operand.meta.get("example_value"))


def _tensors(node: Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("example_value")) if isinstance(leaf, torch.Tensor)]


def _flags(value: Any) -> Flags:
    return tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value))


def _flags_of(node: Node) -> Flags:
    return _flags(node.meta.get("example_value"))


def _result_flags(output: Node) -> Flags:
    found: list[bool] = []
    for leaf in leaves(output.args):
        found += _flags_of(leaf) if isinstance(leaf, Node) else [False]
    return tuple(found)
