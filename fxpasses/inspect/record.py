"""A record of the graphs compiled while it is open.

with fxpasses.inspect.record() as record:
    step()
print(record)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule

from fxpasses.report import Report


@dataclass
class GraphRecord:
    """One compiled graph: its number of nodes as captured, and each pass's report."""

    nodes: int
    reports: list[Report]


@dataclass
class Record:
    """All graphs compiled while the record was open, in order."""

    graphs: list[GraphRecord] = field(default_factory=list)

    def figures(self, pass_name: str) -> dict[str, int]:
        """A pass's figures, summed over the graphs."""
        total: dict[str, int] = {}
        for graph in self.graphs:
            for report in graph.reports:
                if report.pass_name == pass_name:
                    for name, value in report.figures.items():
                        total[name] = total.get(name, 0) + value
        return total

    def __str__(self) -> str:
        lines = []
        for number, graph in enumerate(self.graphs):
            lines.append(f"graph {number}: {graph.nodes} nodes")
            lines += [f"  {line}" for report in graph.reports for line in str(report).splitlines()]
        return "\n".join(lines) or "no graph was compiled"


# Open records; Dynamo calls the backend from inside the user's step, so there is no argument to hand one down.
_open: list[Record] = []


@contextlib.contextmanager
def record() -> Iterator[Record]:
    """Collect a `Record` of every graph that the backend compiles inside the `with` block."""
    opened = Record()
    _open.append(opened)
    try:
        yield opened
    finally:
        _open.remove(opened)


def note_graph(gm: GraphModule, reports: Sequence[Report]) -> None:
    """Add a compiled graph to every open record."""
    for opened in _open:
        opened.graphs.append(GraphRecord(len(gm.graph.nodes), list(reports)))
