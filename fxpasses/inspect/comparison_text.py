"""Shows a comparison of two records on a terminal."""

from __future__ import annotations

import textwrap

from tabulate import tabulate

from fxpasses.base.units import duration, size
from fxpasses.inspect.comparison import GraphComparison
from fxpasses.inspect.figures import saved_before_and_after
from fxpasses.inspect.model import Run
from fxpasses.inspect.text import Style, figure_rows, name, section_lines


def run_differences(before: Run, after: Run) -> str:
    """Versions and options that differ, one per line."""
    rows = [
        (key, before.versions.get(key, "–"), after.versions.get(key, "–"))
        for key in dict.fromkeys([*before.versions, *after.versions])
    ]
    for graph, other in zip(before.graphs[:1], after.graphs[:1], strict=False):
        options = dict.fromkeys([*graph.options, *other.options])
        rows += [(key, str(graph.options.get(key, "–")), str(other.options.get(key, "–"))) for key in options]
    return "\n".join(f"{key}: {old} → {new}" for key, old, new in rows if old != new)


def comparison_report(found: GraphComparison, style: Style) -> str:
    """One graph: its figures in both records, the changes, and the reasons that only one record has."""
    graph = found.before or found.after
    assert graph is not None
    title = style.bold(f"graph {name(graph)}") + f"  {graph.function}"
    if found.before is None or found.after is None:
        return f"{title}  only in {'the second' if found.before is None else 'the first'} record"
    rows = [row[:3] for row in figure_rows(*found.figures)]
    rows = [row for row in rows if row[1] != row[2]]
    saved = [saved_before_and_after(graph)[1] for graph in (found.before, found.after)]
    if saved[0] is not None and saved[1] is not None and saved[0] != saved[1]:
        rows.append(["saved for backward", size(saved[0]), size(saved[1])])
    times = (found.before.compile_seconds, found.after.compile_seconds)
    if any(times):
        rows.append(["compile time", duration(times[0]), duration(times[1])])
    parts = [title]
    if rows:
        parts.append(textwrap.indent(tabulate(rows, ["", "A", "B"], colalign=("left", "right", "right")), "  "))
    if found.sections:
        parts.append(section_lines(found.sections, style))
    for heading, reasons in (("no longer left alone", found.reasons_gone), ("newly left alone", found.reasons_new)):
        if reasons:
            parts.append("\n".join([style.bold(heading), *(f"  · {reason}" for reason in reasons)]))
    return "\n".join(parts)
