"""Several small layers in one body, so that a call costs little compared with the body's work.

Before:                        After unrolling by 2:

    h_1 = layer(h_0, w_0)          h_2 = pair(h_0, w_0, w_1)
    h_2 = layer(h_1, w_1)          h_4 = pair(h_2, w_2, w_3)
    h_3 = layer(h_2, w_2)
    h_4 = layer(h_3, w_3)

Nodes between two layers of a body belong to the body. Layers that are left over are compiled with the nodes between the
calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from torch.fx import GraphModule, Node

from fxpasses.fold.repetition import Kind, calls
from fxpasses.fold.segments import segment

Run = list[tuple[int, int]]  # the first position of each layer, and the one after its last


def unrolled(gm: GraphModule, kind: Kind, factor: int, least: int, others: Collection[Node]) -> tuple[Kind, int]:
    """A kind of segments of `factor` layers or more, and how many layers; [] if there are fewer than `least` of them.

    others: nodes that no segment may contain, those of other kinds. Among the factors from the given one up to twice
    that, the one that leaves least to compile is taken, and the largest of these.
    """
    nodes = calls(gm)
    runs = list(_runs(nodes, kind, others))
    largest = min(2 * factor - 1, len(kind) // least)
    possible = [n for n in range(factor, largest + 1) if sum(len(run) // n for run in runs) >= least]
    if not possible:
        return [], factor
    chosen = min(possible, key=lambda n: (n + sum(len(run) % n for run in runs), -n))
    forms: dict[object, Kind] = defaultdict(list)
    for run in runs:
        for first in range(0, len(run) - chosen + 1, chosen):
            found = segment(gm, nodes[run[first][0] : run[first + chosen - 1][1]])
            forms[found.form].append(found)
    most = max(forms.values(), key=len)
    return (most if len(most) >= least else []), chosen


def _runs(nodes: list[Node], kind: Kind, others: Collection[Node]) -> Iterator[Run]:
    """The layers of a kind, cut wherever nodes of another kind lie between them."""
    positions = {node: position for position, node in enumerate(nodes)}
    run: Run = []
    for layer in kind:
        begin, end = positions[layer.nodes[0]], positions[layer.nodes[-1]] + 1
        if run and any(node in others for node in nodes[run[-1][1] : begin]):
            yield run
            run = []
        run.append((begin, end))
    yield run
