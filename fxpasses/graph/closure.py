"""The metadata closure: what a graph computes from integer inputs and sizes alone, and where the rest looks at it.

*Roots* are inputs of integer or bool dtype that need no gradient and are not written. A node is in the closure if all
its operands are, and its effects are known: it is pure, or writes only memory that the closure allocated. Checkpoint
bodies are walked in place, their placeholders standing for the operands. A *use* is a look at a closure value from
outside the closure.

    lengths: i64[3]                       root
    longest = lengths.max().item()        closure
    mask = torch.full((t, t), -inf)       closure (sizes alone)
    mask[:longest] = 0                    closure: writes memory of its own
    scores + mask                         a use of `mask`, at the version after the write
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from fxpasses.graph.metadata_analysis import Closure, Walk
from fxpasses.graph.regions import Region
from fxpasses.report import Refusal

_MOST_ROUNDS = 20


def find_closure(main: Region, fake_mode: Any, banned: dict[Node, Refusal]) -> Closure:
    """Analyse a graph and its checkpoint bodies; the nodes in `banned` stay outside.

    Where a value turns out to be written, returned or read at the wrong time, the node that allocated it is taken out
    of the closure, and the analysis starts anew: it is linear in the graph, and the table's work is kept in its keys.
    """
    banned = dict(banned)
    scratch: set[Node] = set()
    rounds = 0
    while True:
        walk = Walk(main, fake_mode, banned, nothing=rounds > _MOST_ROUNDS)
        closure = walk.run()
        if not walk.violations:
            closure.refusals |= {node: refusal for node, refusal in banned.items() if node not in scratch}
            return closure
        banned |= walk.violations
        scratch |= walk.scratch
        rounds += 1
