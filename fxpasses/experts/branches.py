"""Branches that run only for experts with tokens, captured as if every expert had some.

    if tok.numel() == 0: continue        if mask.any(): ...        for e in hit: ...

The trace takes the branch (`experts/capture/speculation.py`), and a `SpeculatedBranch` records the obligation: without
tokens, the branch must have no effect. A pass that proves it returns the branch's number
(`pipeline.Context.discharged`). If no pass does, the frame is traced again without the branch. Nodes of the graph refer
to branches by number, in their `meta`, which copies of a graph keep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpasses.graph.aliases import written_operands
from fxpasses.graph.traits import is_integer

BRANCHES = "fxpasses_branches"  # in a node's meta: (number, role) of each
INSIDE = "inside"  # made by the branch
CONDITION = "condition"  # the tensor that the branch's condition reads
PART = "part"  # the tensor that the branch appended to a list, which is concatenated later
READ = "read"  # a number that was read from an array
BEFORE, AFTER = "before", "after"  # a live-out's value before and after the branch; the live-out's index follows


@dataclass(eq=False)
class SpeculatedBranch:
    """number: the number by which nodes refer to the branch. where: `file.py:12`.

    The program skips the branch if the condition does not hold. kind says what the condition is:

    - "count": the node marked CONDITION has a nonzero element; `symbol` is the number of these, or the element.
    - "end": element `index` of the node marked CONDITION, `symbol`, differs from the element before it, `empty`.
    - "tensor": the truth value of the node marked CONDITION is `truth`.
    - "hit": `index` is among the experts that the node marked CONDITION lists.
    - "numbers": no condition, and no branch: NumPy's integers were treated as Python's
      (`experts/capture/numpy_counts.py`). The obligation is discharged when the graph no longer contains a node
      marked READ.

    live_outs: the number of live variables that hold another tensor after the branch. parts: the number of tensors that
    the branch appended to lists. Each list is concatenated once, and otherwise only tested for emptiness, with the
    assumed answer that it is not empty; so some expert must have tokens. ended: whether the trace reached the branch's
    post-dominator with the rest of Python's state unchanged; else the branch cannot be proved. function: file and first
    line of the function that branches; None for a refused use.
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
    function: tuple[str, int] | None = None


def mark(node: Node, branch: SpeculatedBranch, role: str) -> None:
    node.meta.setdefault(BRANCHES, []).append((branch.number, role))


def marks(node: Node) -> list[tuple[int, str]]:
    return node.meta.get(BRANCHES, [])


def set_marks(node: Node, found: list[tuple[int, str]]) -> None:
    """Replace the marks of a node, which may be a copy with another's."""
    node.meta.pop(BRANCHES, None)
    if found:
        node.meta[BRANCHES] = found


def sets_gradients(node: Node) -> bool:
    """Whether a node begins or ends `with torch.no_grad():`, as Dynamo writes it."""
    return node.op == "call_function" and node.target is torch._C._set_grad_enabled and len(node.args) == 1


class Marked:
    """The nodes of a graph that have a role in a branch, that write integers, or that switch gradients on or off.

    branches: by number. gradients: whether gradients are on where the graph begins; None if not known.
    """

    def __init__(self, graph: Graph, branches: Mapping[int, SpeculatedBranch], gradients: bool | None) -> None:
        self.branches, self.gradients = branches, gradients
        self._graph = graph
        self._seen: dict[Node, bool] = {}  # whether a node is of one of the two kinds
        self._nodes: defaultdict[tuple[int, str], list[Node]] = defaultdict(list)
        self.refresh()

    def refresh(self) -> None:
        """To be called after a change of the graph."""
        self.position = {node: position for position, node in enumerate(self._graph.nodes)}
        for node in self.position:
            if node in self._seen:
                continue
            self._seen[node] = sets_gradients(node) or any(map(is_integer, written_operands(node)))
            for key in marks(node):
                self._nodes[key].append(node)
        special = [node for node in self.position if self._seen[node]]
        self.setting_gradients = [node for node in special if sets_gradients(node)]
        self.writing_integers = [node for node in special if not sets_gradients(node)]

    def all(self, number: int, role: str) -> list[Node]:
        return [node for node in self._nodes.get((number, role), ()) if node in self.position]

    def first(self, number: int, role: str) -> Node | None:
        return min(self.all(number, role), key=self.position.__getitem__, default=None)
