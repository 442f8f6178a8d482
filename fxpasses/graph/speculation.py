"""Branches that run only for experts with tokens, captured as though every expert had some.

    if tok.numel() == 0: continue        if mask.any(): ...        for e in hit: ...

The trace goes through the branch (`capture/speculation.py`), and a `SpeculatedBranch` notes what that assumed. It holds
if the branch does nothing without tokens; a pass that proves it returns the branch's number
(`pipeline.Context.discharged`). A branch that no pass proved is taken back: the frame is traced again without it. Nodes
of the graph refer to branches by number, in their `meta`, which copies of a graph keep.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from fxpasses.graph.aliases import written_operands
from fxpasses.graph.routing_facts import is_integer

BRANCHES = "fxpasses_branches"  # in a graph module's meta: its speculated branches; in a node's: (number, role) of each
INSIDE = "inside"  # made by the branch
CONDITION = "condition"  # the tensor that the program asks
PART = "part"  # the tensor that the branch appended to a list, which is joined later
READ = "read"  # the numbers that were read from an array
BEFORE, AFTER = "before", "after"  # with the place among the live-outs: a variable's value before the branch, and after


@dataclass(eq=False)
class SpeculatedBranch:
    """number: what nodes refer to it by. where: `file.py:12`.

    The branch is passed over where the condition does not hold. kind says what the condition is:

    - "count": the node marked CONDITION has an element that is not zero; `symbol` is how many it has, or the element.
    - "end": element `index` of the node marked CONDITION, `symbol`, is another number than the one before it, `empty`.
    - "tensor": the node marked CONDITION has the truth `truth`.
    - "hit": `index` is among the experts that the node marked CONDITION lists.
    - "numbers": no condition, and no branch: NumPy's integers were taken for Python's (`capture/numpy_counts.py`). It
      is proved when the graph reads none of the nodes marked READ any more.

    live_outs: how many variables that are read later hold another tensor if the branch ran. parts: how many tensors the
    branch appended to lists, each of which is joined by one `torch.cat`, and asked for no more than whether it is
    empty. It is taken not to be, so some expert must have tokens. ended: the trace came to the branch's post-dominator,
    with the rest of Python's state as it was; else the branch cannot be proved.
    """

    number: int
    kind: str
    where: str
    symbol: Any = None
    empty: Any = 0
    truth: bool = True
    index: int = 0
    live_outs: int = 0
    parts: int = 0
    ended: bool = False


def mark(node: Node, branch: SpeculatedBranch, role: str) -> None:
    node.meta.setdefault(BRANCHES, []).append((branch.number, role))


def marks(node: Node) -> list[tuple[int, str]]:
    return node.meta.get(BRANCHES, [])


class Marked:
    """The nodes of a graph that have a role in a branch, and those that write integers."""

    def __init__(self, graph: Graph) -> None:
        self.position = {node: position for position, node in enumerate(graph.nodes)}
        self.writing_integers = [node for node in graph.nodes if any(map(is_integer, written_operands(node)))]
        self._nodes: defaultdict[tuple[int, str], list[Node]] = defaultdict(list)
        for node in graph.nodes:
            for key in marks(node):
                self._nodes[key].append(node)

    def all(self, number: int, role: str) -> list[Node]:
        return self._nodes.get((number, role), [])

    def first(self, number: int, role: str) -> Node | None:
        return next(iter(self.all(number, role)), None)


def branches_of(gm: GraphModule) -> dict[int, SpeculatedBranch]:
    return {branch.number: branch for branch in gm.meta.get(BRANCHES, [])}
