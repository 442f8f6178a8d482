"""Compares two records: pairs their graphs, and shows the differences of each pair on a terminal."""

from __future__ import annotations

import textwrap

from tabulate import tabulate

from fxpasses.base.units import duration, size
from fxpasses.inspect.figures import figures, saved_and_moved
from fxpasses.inspect.model import Graph, Run, Stage
from fxpasses.inspect.text import Style, changes, figure_rows, name
from fxpasses.inspect.whynot import near_misses


def comparison(before: Run, after: Run, stage: str, style: Style) -> tuple[str, bool]:
    """The differences between graphs with equal compile ids, at the stage named `stage` or at the last one for "".

    Also returns whether a graph differs; another version, option or compile time alone is no difference.
    """
    earlier, later = _by_key(before), _by_key(after)
    parts, same = [_run_differences(before, after)], 0
    for key in dict.fromkeys([*earlier, *later]):
        first, second = earlier.get(key), later.get(key)
        if first is None or second is None:
            other = "the second" if first is None else "the first"
            parts.append(f"{_title(first or second, style)}  only in {other} record")
        elif different := _differences(first, second, stage, style):
            parts.append("\n".join([_title(first, style), *_figures(first, second, stage), *different]))
        else:
            same += 1
    if same:
        parts.append(f"{same} graph{'s are' if same > 1 else ' is'} the same in both")
    text = "\n\n".join(part for part in parts if part)
    return text or "neither record holds a graph", same < len({*earlier, *later})


def _by_key(run: Run) -> dict[str, Graph]:
    """The graphs by compile id; of several attempts at one compilation, the last."""
    return {graph.compile_id or f"#{number}": graph for number, graph in enumerate(run.graphs)}


def _run_differences(before: Run, after: Run) -> str:
    """Versions and options that differ, one per line."""
    pairs = [(before.versions, after.versions)]
    pairs += [(one.options, two.options) for one, two in zip(before.graphs[:1], after.graphs[:1], strict=False)]
    rows = [(key, old.get(key, "–"), new.get(key, "–")) for old, new in pairs for key in dict.fromkeys([*old, *new])]
    return "\n".join(f"{key}: {old} → {new}" for key, old, new in rows if old != new)


def _title(graph: Graph | None, style: Style) -> str:
    assert graph is not None
    return style.bold(f"graph {name(graph)}") + f"  {graph.function}"


def _differences(before: Graph, after: Graph, stage: str, style: Style) -> list[str]:
    """The changes, and the reasons that only one record has."""
    parts = [changes(_stage(before, stage), _stage(after, stage), "", style)]
    old, new = _reasons(before), _reasons(after)
    for heading, reasons in (
        ("no longer left alone", [reason for reason in old if reason not in new]),
        ("newly left alone", [reason for reason in new if reason not in old]),
    ):
        if reasons:
            parts.append("\n".join([style.bold(heading), *(f"  · {reason}" for reason in reasons)]))
    return [part for part in parts if part]


def _figures(before: Graph, after: Graph, stage: str) -> list[str]:
    """A table of the figures that differ; none if there are none."""
    rows = [row[:3] for row in figure_rows(figures(_stage(before, stage)), figures(_stage(after, stage)))]
    rows = [row for row in rows if row[1] != row[2]]
    saved = [saved_and_moved(graph)[0] for graph in (before, after)]
    if before.partition is not None and after.partition is not None and saved[0] != saved[1]:
        rows.append(["saved for backward", size(saved[0]), size(saved[1])])
    times = (before.compile_seconds, after.compile_seconds)
    if any(times):
        rows.append(["compile time", duration(times[0]), duration(times[1])])
    table = tabulate(rows, ["", "A", "B"], colalign=("left", "right", "right")) if rows else ""
    return [textwrap.indent(table, "  ")] if rows else []


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
