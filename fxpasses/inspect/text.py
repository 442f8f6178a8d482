"""Shows a record on a terminal: the changes, the refusals with their reasons, and the figures, in 80 columns."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import TextIO

from tabulate import tabulate

from fxpasses.base.units import amount, duration, many, size
from fxpasses.inspect.changes import MARKS, Kind, diff
from fxpasses.inspect.collapse import Line, collapse
from fxpasses.inspect.figures import Figures, before_and_after, saved_and_moved
from fxpasses.inspect.ledger import ledger
from fxpasses.inspect.model import Graph, Run, Stage
from fxpasses.inspect.verdict import said
from fxpasses.inspect.whynot import NearMiss, near_misses
from fxpasses.report import Report

_COLORS = {
    Kind.REMOVED: "31", Kind.PROLOGUE: "36", Kind.ADDED: "32",
    Kind.REWIRED: "33", Kind.MOVED: "35", Kind.METADATA: "34",
}  # fmt: skip
_OUTCOMES = {
    "rewritten": "rewritten",
    "captured": "compiled as captured",
    "uncompiled": "not compiled",
    "retraced": "given up, and traced again",
}
_MOST_ROWS = 8  # of one section; --all shows the rest


@dataclass(frozen=True)
class Style:
    """The style of a report: with colours or without, its width, and whether to omit nothing."""

    color: bool = False
    width: int = 80
    everything: bool = False

    @classmethod
    def of(cls, stream: TextIO, everything: bool = False) -> Style:
        """Colours on a terminal only, unless NO_COLOR is set; 80 columns without colours in a file or a pipe."""
        terminal = stream.isatty()
        color = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        width = min(shutil.get_terminal_size().columns, 120) if terminal else 80
        return cls(color, max(width, 60), everything)

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.color and text else text

    def bold(self, text: str) -> str:
        return self.paint(text, "1")

    def faint(self, text: str) -> str:
        return self.paint(text, "2")


def report(run: Run, style: Style | None = None) -> str:
    """The report on a record, graph by graph."""
    style = style or Style.of(sys.stdout)
    parts = [_heading(run, style)]
    graphs = list(run.graphs)
    if len(graphs) > 1:
        parts.append(_overview(graphs, style))
    parts += [graph_report(graph, style) for graph in graphs]
    return "\n\n".join(part for part in parts if part)


def _heading(run: Run, style: Style) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    rank = f", rank {run.rank}" if run.rank is not None else ""
    if not run.graphs:
        return "no graph was compiled with the backend fastpack"
    count = many(len(run.graphs), "graph")
    heading = f"{style.bold(count)}{rank}" + style.faint(f"  {versions}" if versions else "")
    return "\n".join(filter(None, [heading, *said(run)]))


def _overview(graphs: list[Graph], style: Style) -> str:
    rows = []
    for number, graph in enumerate(graphs):
        before, after = before_and_after(graph)
        rows.append(
            [
                name(graph, number),
                graph.function,
                f"{before.operators} → {after.operators}",
                f"{before.host_reads} → {after.host_reads}",
                after.prologue_reads or "",
                sum(miss.count for miss in near_misses(graph)) or "",
            ]
        )
    headers = ["graph", "from", "operators", "host reads", "once a batch", "left alone"]
    return tabulate(rows, headers, maxcolwidths=[None, style.width - 62, None, None, None, None], disable_numparse=True)


def name(graph: Graph, number: int = 0) -> str:
    return graph.compile_id or str(number)


def title(graph: Graph, style: Style) -> str:
    recompiled = f", recompilation {graph.recompile}" if graph.recompile else ""
    return style.bold(f"graph {name(graph)}") + f"  {graph.function}{recompiled}"


def graph_report(graph: Graph, style: Style) -> str:
    """One graph: the passes' summaries, the figures, the changes, the refusals, and the symbols."""
    heading = f"{title(graph, style)}  {style.faint(_OUTCOMES.get(graph.outcome, ''))}".rstrip()
    parts = [f"{heading}\n{passes(graph, style)}", _figures(graph, style), cuda_graphs(graph, style)]
    for before, after in graph.steps():
        parts.append(changes(before, after, f"what {after.name} changed", style))
    parts += [why_not(near_misses(graph), style), _symbols(graph, style)]
    return "\n\n".join(part for part in parts if part)


def passes(graph: Graph, style: Style) -> str:
    """A line for each pass: its summary, or why it was dropped."""
    lines = []
    for stage in graph.stages[1:]:
        summary = stage.report.summary if stage.report else ""
        text = summary or "changed nothing"
        if stage.failure:
            text = style.paint(f"failed and was dropped: {stage.failure.splitlines()[0]}", "31")
        elif summary:
            text = style.paint(summary, "32")
        lines += _wrapped(f"{stage.name}: ", f"{text} {style.faint(f'({duration(stage.seconds)})')}", style)
    misses = near_misses(graph)
    if misses:
        lines += _wrapped("left alone: ", style.paint(left_alone(misses), "33"), style)
    return "\n".join(lines)


def left_alone(misses: list[NearMiss]) -> str:
    """One line; a host read that two passes refuse counts once."""
    what = many(sum(miss.count for miss in misses), "candidate")
    by_pass: Counter[str] = Counter()
    for miss in misses:
        by_pass[miss.pass_name] += miss.host_reads
    reads = max(by_pass.values())
    return f"{what}; {many(reads, 'host read')} a step stay" if reads else what


def taken(report: Report) -> list[str]:
    """The changes in a pass's report, with identical lines of several layers once."""
    times = Counter(report.changes)
    return [f"{change} (×{count})" if count > 1 else change for change, count in times.items()]


# Figures

_STEP_ROWS = {
    "flops": "FLOPs",
    "bytes_moved": "bytes moved",
    "peak_bytes": "peak memory, besides inputs",
    "saved_bytes": "saved for backward",
}
_ROWS: dict[str, tuple[str, str]] = {
    "host_reads": ("host reads", "prologue_reads"),
    "operators": ("operators", "prologue_nodes"),
    "nodes": ("nodes", ""),
    "data_dependent": ("tensors of data-dependent size", ""),
    "assertions": ("assertions", ""),
    "inputs_from_prologue": ("inputs from the prologue", ""),
    "flops": ("FLOPs, forward", ""),
    "bytes_moved": ("bytes moved, forward", ""),
    "peak_bytes": ("peak memory, forward", ""),
}


def _figures(graph: Graph, style: Style) -> str:
    before, after = before_and_after(graph)
    rows = figure_rows(before, after, len(graph.final.checks), step_rows(graph))
    table = tabulate(rows, ["each step", "before", "after", "once a batch"], colalign=("left", *["right"] * 3))
    times = f"compile time {duration(graph.compile_seconds)}" if graph.compile_seconds else ""
    return textwrap.indent("\n".join(part for part in (table, style.faint(times)) if part), "  ")


def figure_rows(
    before: Figures, after: Figures, checks: int = 0, of_step: list[list[str]] | None = None
) -> list[list[str]]:
    """Rows (what, before, after, once a batch) for all figures that are not 0 throughout.

    of_step: rows that stand in the place of those of forward alone.
    """
    rows = []
    for field, (label, prologue) in _ROWS.items():
        if of_step and field in _STEP_ROWS:
            continue
        values = [getattr(before, field), getattr(after, field)]
        batch = getattr(after, prologue) if prologue else checks if field == "assertions" else 0
        if any(values) or batch:
            show = size if "bytes" in field else amount
            rows.append([label, show(values[0]), show(values[1]), amount(batch) if batch else ""])
    return rows + (of_step or [])


def step_rows(graph: Graph) -> list[list[str]]:
    """Rows for forward and backward together; only what of it is known, so none for a graph that was never run."""
    rows = []
    if graph.before is not None and graph.after is not None:
        for field, label in _STEP_ROWS.items():
            values = getattr(graph.before, field), getattr(graph.after, field)
            show = size if "bytes" in field else amount
            rows += [[label, *map(show, values), ""]] if any(values) else []
    staying, moved = saved_and_moved(graph)
    if moved:
        rows += [["saved for backward, on the device", size(staying + moved), size(staying), ""]]
        rows += [["moved off the device and back", size(0), size(moved), ""]]
    elif staying and not rows:
        rows += [["saved for backward, on the device", "not known", size(staying), ""]]
    return rows


def cuda_graphs(graph: Graph, style: Style) -> str:
    """Whether a CUDA graph can record each graph whole, a line for each; "" if unknown."""
    lines = []
    for name, found in graph.cuda_graphs.items():
        lines += _wrapped(f"  {name}: ", str(found), style)
    return "\n".join([style.bold("CUDA graphs, after the passes"), *lines]) if lines else ""


# Changes


def changes(before: Stage, after: Stage, heading: str, style: Style) -> str:
    """The changes between two stages in sections of identical layers, a row for each kind and source line."""
    sections = collapse(diff(before, after), before, after)
    if not sections:
        return ""
    lines = [style.bold(heading)] if heading else []
    for section in sections:
        lines.append(f"  {section.title}")
        rows = section.lines
        shown = rows if style.everything or len(rows) <= _MOST_ROWS + 2 else rows[:_MOST_ROWS]
        width = max(len(row.source) for row in rows) if rows else 0
        module = ""
        for row in shown:
            if row.module != module:
                module = row.module
                lines.append(style.faint(f"    in {module}" if module else "    in no module"))
            lines += _row(row, min(width, 28), style)
        if len(shown) < len(rows):
            lines.append(style.faint(f"    … and {len(rows) - len(shown)} more; --all shows them"))
    return "\n".join(lines)


def _row(row: Line, width: int, style: Style) -> list[str]:
    """`    ~ rewired    quickstart.py:14    matmul: argument 0: where → packed_0`, wrapped."""
    mark = f"    {MARKS[row.kind]} {row.kind.value.removeprefix('moved '):16} "
    first = f"{row.source:{width}}  " if width else ""
    lines = textwrap.wrap(row.what, style.width - len(mark) - len(first)) or [""]
    indent = " " * (len(mark) + len(first))
    return [
        style.paint(mark, _COLORS[row.kind]) + style.faint(first) + lines[0],
        *(indent + line for line in lines[1:]),
    ]


# Why not


def why_not(misses: list[NearMiss], style: Style) -> str:
    """The refusals, with their reasons and costs; "" if there are none."""
    if not misses:
        return ""
    lines = [style.bold("left alone, and why")]
    for miss in misses:
        cost = [many(miss.host_reads, "host read")] if miss.host_reads else []
        cost += [size(miss.bytes)] if miss.bytes else []
        times = f" ×{miss.count}" if miss.count > 1 else ""
        detail = f": {miss.text}" if miss.text else ""
        place = f"{miss.where or '?'}{f' in {miss.module}' if miss.module else ''}"
        lines += _wrapped("  · ", f"{miss.target}{times} at {place}: {miss.reason}{detail}", style)
        if miss.code:
            room = style.width - 6
            lines.append(style.faint(f"      {miss.code if len(miss.code) <= room else miss.code[: room - 1] + '…'}"))
        lines += [f"      costs {', '.join(cost)} a step"] if cost else []
    return "\n".join(lines)


def _symbols(graph: Graph, style: Style) -> str:
    """Orphaned symbols; with `everything`, the whole ledger of the last stage."""
    accounts = ledger(graph.final)
    shown = accounts if style.everything else [account for account in accounts if account.problem.startswith("orphan")]
    if not shown:
        return ""
    rows = [[a.symbol, _few(a.binders), _few(a.users), _few(a.assertions), a.tensors or "", a.problem] for a in shown]
    headers = ["symbol", "bound by", "used by", "asserted by", "in sizes", ""]
    widths = [None, *[(style.width - 36) // 3] * 3, None, 14]
    return (
        style.bold("unbacked symbols after the passes")
        + "\n"
        + textwrap.indent(tabulate(rows, headers, maxcolwidths=widths, disable_numparse=True), "  ")
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _wrapped(first: str, text: str, style: Style) -> list[str]:
    return textwrap.wrap(text, style.width, initial_indent=first, subsequent_indent=" " * min(len(first), 6))
