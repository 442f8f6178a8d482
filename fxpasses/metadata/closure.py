"""The metadata closure: the nodes computed from integer inputs and sizes alone, and their uses by other nodes.

*Roots* are inputs of integer or bool dtype that require no gradient and are not written. A node is in the closure if
all its operands are, and its effects are known: it is pure, or writes only memory that the closure allocated.
Checkpoint bodies are analysed in place, with their placeholders bound to the operands. A *use* is a read of a closure
value by a node outside the closure.

    lengths: i64[3]                       root
    longest = lengths.max().item()        closure
    mask = torch.full((t, t), -inf)       closure (sizes alone)
    mask[:longest] = 0                    closure: writes memory of its own
    scores + mask                         a use of `mask`, at the version after the write
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fxpasses.graph.regions import Region
from fxpasses.metadata.analysis import Closure, Walk
from fxpasses.report import Refusal

_MOST_ROUNDS = 20


def find_closure(main: Region, fake_mode: Any, banned: dict[Node, Refusal]) -> Closure:
    """Analyse a graph and its checkpoint bodies; the nodes in `banned` stay outside.

    If a value turns out to be written, returned or read too early, the node that allocated it is excluded from the
    closure, and the analysis starts again; it is linear in the size of the graph.
    """
    banned = dict(banned)
    private: set[Node] = set()
    rounds = 0
    while True:
        walk = Walk(main, fake_mode, banned, nothing=rounds > _MOST_ROUNDS)
        closure = walk.run()
        if not walk.violations:
            closure.refusals |= {node: refusal for node, refusal in banned.items() if node not in private}
            return closure
        banned |= walk.violations
        private |= walk.private
        rounds += 1
