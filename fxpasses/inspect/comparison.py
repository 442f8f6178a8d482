"""Compares two records: matches their graphs, and finds the differences of each pair."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpasses.inspect.changes import diff
from fxpasses.inspect.collapse import Section, collapse
from fxpasses.inspect.figures import Figures, figures
from fxpasses.inspect.model import Graph, Run, Stage
from fxpasses.inspect.whynot import near_misses


@dataclass
class GraphComparison:
    """One graph in both records, or in one. reasons_gone, reasons_new: near misses that only one record has."""

    before: Graph | None
    after: Graph | None
    figures: tuple[Figures, Figures]
    sections: list[Section] = field(default_factory=list)
    reasons_gone: list[str] = field(default_factory=list)
    reasons_new: list[str] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        one_sided = self.before is None or self.after is None
        return one_sided or bool(self.sections or self.reasons_gone or self.reasons_new)


def compare(before: Run, after: Run, stage: str = "") -> list[GraphComparison]:
    """Compare the graphs with equal compile ids, at the stage named `stage`, or at the last one."""
    earlier, later = _by_key(before), _by_key(after)
    return [_compare(earlier.get(key), later.get(key), stage) for key in dict.fromkeys([*earlier, *later])]


def _by_key(run: Run) -> dict[str, Graph]:
    """The graphs by compile id; of several attempts at one compilation, the last."""
    return {graph.compile_id or f"#{number}": graph for number, graph in enumerate(run.graphs)}


def _compare(before: Graph | None, after: Graph | None, stage: str) -> GraphComparison:
    stages = [_stage(graph, stage) if graph is not None else None for graph in (before, after)]
    sides = (figures(stages[0]) if stages[0] else Figures(), figures(stages[1]) if stages[1] else Figures())
    found = GraphComparison(before, after, sides)
    if before is not None and after is not None and stages[0] and stages[1]:
        found.sections = collapse(diff(stages[0], stages[1]), stages[0], stages[1])
        old, new = _reasons(before), _reasons(after)
        found.reasons_gone = [reason for reason in old if reason not in new]
        found.reasons_new = [reason for reason in new if reason not in old]
    return found


def _stage(graph: Graph, name: str) -> Stage:
    """The graph at the stage `name`, which may be an earlier stage's if that changed nothing; the last one for ""."""
    found = graph.captured
    for stage in graph.stages:
        found = stage if stage.regions is not None else found
        if stage.name == name:
            break
    return found


def _reasons(graph: Graph) -> list[str]:
    return [
        f"{miss.target} at {miss.where}: {miss.reason}" + (f" ×{miss.count}" if miss.count > 1 else "")
        for miss in near_misses(graph)
    ]
