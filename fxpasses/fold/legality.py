"""Whether segments of a graph may be compiled by themselves.

Autograd calls each piece as a separate function. So a graph is left alone if its pieces do more than pass tensors on:
if one writes to another's memory, if a mode begins in one and ends in another, or if one determines a size that another
has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxpasses.fold.repetition import Kind, calls
from fxpasses.fold.segments import Segment, is_reference, requires_grad
from fxpasses.graph.aliases import AliasAnalysis
from fxpasses.graph.effects import leaves
from fxpasses.graph.modes import Mode, enters_autocast, modes
from fxpasses.graph.refusals import Refused
from fxpasses.graph.symbols import unbacked_symbols
from fxpasses.passes.pipeline import Context
from fxpasses.report import Reason, Report


class Legality:
    """Whether kinds of segments may be outlined from a graph."""

    def __init__(self, gm: GraphModule, context: Context) -> None:
        self.gm = gm
        self.modes = modes(gm.graph)
        self.memory: AliasAnalysis = context.aliases(gm.graph)
        self.exact = context.options.lowering != "inductor"

    def legal(self, kind: Kind, report: Report) -> Kind:
        """The segments of a kind that may be outlined; raises `Refused` if something excludes all of them.

        report: gets the reasons against the others.
        """
        left: Kind = []
        for segment in kind:
            try:
                self._check_modes(segment)
                self._check_values(segment)
                if self.exact:
                    self._check_sums(set(segment.nodes), segment.operands)
                left.append(segment)
            except Refused as refused:
                report.refusals.append(refused.of(segment.first))
        if len({self.modes[segment.first].arguments for segment in left}) > 1:
            raise Refused(Reason.CHANGES_MODE, "the layers run under different autocast", kind[0].first)
        if left:
            self._check_writes(left)
        return left

    def _check_modes(self, segment: Segment) -> None:
        before, after = self.modes[segment.first], self._mode_after(segment)
        if before.changed or before != after:
            raise Refused(Reason.CHANGES_MODE, "a mode of autograd or autocast begins or ends inside", segment.first)

    def _mode_after(self, segment: Segment) -> Mode:
        node = segment.nodes[-1].next
        while node not in self.modes and node.op != "output":
            node = node.next
        return self.modes.get(node, Mode())

    def _check_values(self, segment: Segment) -> None:
        bound = {symbol for node in segment.nodes for symbol in node.meta.get("unbacked_bindings") or ()}
        for node in (*segment.operands, *segment.live_outs):
            _check_crosses(node)
            for value in pytree.tree_leaves(node.meta.get("example_value")):
                if type(value).__module__.startswith("torch.distributed"):
                    raise Refused(Reason.COLLECTIVE, f"`{node.name}` is a {type(value).__name__}", node)
        for node in segment.live_outs:
            if bound & unbacked_symbols(node.meta.get("example_value")):
                raise Refused(Reason.UNKNOWN_SIZE, f"`{node.name}` leaves it", node)

    def _check_sums(self, nodes: Collection[Node], operands: Iterable[Node]) -> None:
        """Raise `Refused` if a piece uses a value several times, and it is used elsewhere too.

        The piece returns one gradient for the value, the sum over its uses there; eager mode adds in another order.
        """
        for operand in operands:
            value = operand.meta.get("example_value")
            if isinstance(value, torch.Tensor) and value.requires_grad and any(u not in nodes for u in operand.users):
                if sum(_uses(self.gm, user, operand) for user in operand.users if user in nodes) > 1:
                    text = f"`{operand.name}` is used several times in it, and outside"
                    raise Refused(Reason.SUMS_REORDERED, text, operand)

    def _check_writes(self, kind: Kind) -> None:
        """Check the writes of a kind. Segments of one form have the same effects, so only one is examined."""
        first = kind[0]
        own = set(first.nodes)
        for node in first.nodes:
            for number in self.memory.written_by(node):
                outside = [owner for owner in self.memory.sets.owners[number] if owner not in own]
                if not outside:
                    continue
                places = [place for place, operand in enumerate(first.operands) if operand in outside]
                if len(outside) != 1 or len(places) != 1:
                    raise Refused(Reason.WRITTEN_ACROSS, f"`{node.name}` writes to it", node)
                for segment in kind:
                    self._check_written(segment.operands[places[0]], segment.nodes, node)

    def _check_written(self, operand: Node, inside: Iterable[Node], writer: Node) -> None:
        """Raise `Refused` unless a written operand is an input without gradient that nothing else uses: a buffer."""
        example = operand.meta.get("example_value")
        allowed = operand.op == "placeholder" and isinstance(example, torch.Tensor) and not example.requires_grad
        owners = {owner for number in self.memory.sets.of(operand) for owner in self.memory.sets.owners[number]}
        users = {user for owner in owners for user in owner.users}  # such as another checkpoint, which owns nothing
        if not allowed or not owners | users <= {operand, *inside}:
            raise Refused(Reason.WRITTEN_ACROSS, f"`{writer.name}` writes to `{operand.name}`", writer)

    def check_rest(self, folded: Iterable[Kind]) -> None:
        """Raise `Refused` if the nodes between the segments write to another piece's memory, determine its sizes, or
        contribute to its gradients."""
        pieces = self._pieces(folded)
        members: dict[int, set[Node]] = {}
        for node, piece in pieces.items():
            members.setdefault(piece, set()).add(node)
        reached = self._reached_by_gradients()
        for piece, nodes in members.items() if self.exact else ():
            if piece < 0:
                self._check_sums(nodes, {o: None for node in nodes for o in node.all_input_nodes if o not in nodes})
        for node, piece in pieces.items():
            if any(user not in members[piece] for user in node.users):
                if piece < 0 and not enters_autocast(node):
                    _check_crosses(node)
                if requires_grad(node) and node not in reached:
                    raise Refused(Reason.NO_GRADIENT, f"`{node.name}` has no gradient, and crosses a border", node)
        bound = {symbol: piece for node, piece in pieces.items() for symbol in node.meta.get("unbacked_bindings") or ()}
        for node, piece in pieces.items():
            if bound and any(bound.get(s, piece) != piece for s in unbacked_symbols(node.meta.get("example_value"))):
                raise Refused(Reason.UNKNOWN_SIZE, f"`{node.name}` has a size that another piece determines", node)
            for number in self.memory.written_by(node) if piece < 0 else ():
                for owner in set(self.memory.sets.owners[number]) - members[piece]:
                    self._check_written(owner, members[piece], node)

    def _reached_by_gradients(self) -> set[Node]:
        """The nodes whose values have gradients; a superset if a value is written."""
        reached: set[Node] = set()
        for node in reversed(self.gm.graph.nodes):
            if node.op == "output" or node in reached or self.memory.written_by(node):
                reached.update(filter(requires_grad, node.all_input_nodes))
        return reached

    def _pieces(self, folded: Iterable[Kind]) -> dict[Node, int]:
        """The piece of each call: a positive number for a segment, a negative one for the nodes between segments."""
        segments = (segment for kind in folded for segment in kind)
        pieces = {node: number for number, segment in enumerate(segments, 1) for node in segment.nodes}
        rest, in_rest = 0, False
        for node in calls(self.gm):
            if node not in pieces:
                rest -= not in_rest
                pieces[node] = rest
            in_rest = pieces[node] < 0
        return pieces


def _check_crosses(node: Node) -> None:
    """Raise `Refused` for a value that a compiled graph neither takes nor returns."""
    value = node.meta.get("example_value")
    if isinstance(value, (tuple, list, dict)):
        raise Refused(Reason.UNSUPPORTED_VALUE, f"`{node.name}` holds several values", node)
    if isinstance(value, torch.Tensor) and value.layout is torch.jagged:
        raise Refused(Reason.UNSUPPORTED_VALUE, f"`{node.name}` is ragged", node)
    if isinstance(value, (float, torch.SymFloat, torch.SymBool)):
        raise Refused(Reason.UNSUPPORTED_VALUE, f"`{node.name}` is a number that crosses a border", node)


def _uses(gm: GraphModule, user: Node, operand: Node) -> int:
    """How often a call uses an operand, including uses in its bodies."""
    bodies = [getattr(gm, str(node.target)) for node in user.all_input_nodes if is_reference(gm, node)]
    if not bodies:
        return sum(leaf is operand for leaf in leaves((user.args, user.kwargs)))
    places = [place for place, argument in enumerate(user.args[1:]) if argument is operand]
    inner = [body.graph.find_nodes(op="placeholder")[place] for body in bodies for place in places]
    return sum(len(placeholder.users) for placeholder in inner)
