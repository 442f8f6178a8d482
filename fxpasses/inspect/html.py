"""A record as one HTML page that opens from disk without a network.

The page combines the files of `assets/` with the data as JSON. Its script builds everything as text, so that a name in
a record is never markup, and a content security policy forbids every request. `page_data` is the script's input;
docs/inspect.md names the fields.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import files
from typing import Any

from fxpasses.inspect.changes import MARKS, Kind, diff
from fxpasses.inspect.codec import dumps
from fxpasses.inspect.collapse import collapse, layer_of, layers_of
from fxpasses.inspect.dataflow import Dataflow
from fxpasses.inspect.figures import figures
from fxpasses.inspect.ledger import ledger
from fxpasses.inspect.memory import timeline
from fxpasses.inspect.model import Graph, Run, Stage
from fxpasses.inspect.readable import call_text, type_text
from fxpasses.inspect.text import figure_rows, left_alone, step_rows, taken
from fxpasses.inspect.verdict import said
from fxpasses.inspect.whynot import near_misses

_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}  # for JSON inside a <script> element


def page(run: Run) -> str:
    """The page's text, UTF-8; some megabytes for a graph of 20,000 nodes."""
    parts = {name: (files("fxpasses.inspect") / "assets" / name).read_text("utf-8") for name in _FILES}
    text = parts["page.html"]
    for name in _FILES[1:]:
        text = text.replace(f"/*{name}*/", parts[name], 1)
    return text.replace("/*record*/", dumps(page_data(run)).translate(_ESCAPES), 1)


_FILES = ("page.html", "page.css", "table.js", "pictures.js", "views.js", "memory.js", "page.js")


def page_data(run: Run) -> dict[str, Any]:
    """The page's data, with every node once."""
    return {
        "started": run.started,
        "program": run.program,
        "versions": run.versions,
        "rank": run.rank,
        "said": said(run),
        "sample": asdict(run.sample),
        "kinds": [{"key": kind.name.lower(), "name": kind.value, "mark": MARKS[kind]} for kind in Kind],
        "graphs": [_graph(graph) for graph in run.graphs],
    }


def _graph(graph: Graph) -> dict[str, Any]:
    stages = [stage for stage in graph.stages if stage.regions is not None]
    flows = [Dataflow(stage) for stage in stages]
    tables = [_Table(flow, stage) for flow, stage in zip(flows, stages, strict=True)]
    before = figures(stages[0], flows[0])
    after = figures(stages[-1], flows[-1]) if len(stages) > 1 else before
    misses = near_misses(graph)
    return {
        "compile_id": graph.compile_id,
        "function": graph.function,
        "outcome": graph.outcome,
        "compile_seconds": graph.compile_seconds,
        "figures": {"before": asdict(before), "after": asdict(after)},
        "transfers": [asdict(transfer) for report in graph.reports for transfer in report.transfers],
        "plan": next((asdict(report.plan) for report in graph.reports if report.plan is not None), None),
        "passes": [_pass(stage) for stage in graph.stages[1:]],
        "left_alone": [asdict(miss) for miss in misses],
        "left_alone_line": left_alone(misses) if misses else "",
        "symbols": [{**asdict(one), "problem": one.problem} for one in ledger(graph.final, flows[-1])],
        "checks": graph.final.checks,
        "rows": figure_rows(before, after, len(graph.final.checks), step_rows(graph)),
        "step": {"before": asdict(graph.before), "after": asdict(graph.after)}
        if graph.before and graph.after
        else None,
        "partition": asdict(graph.partition) if graph.partition is not None else None,
        "stages": [table.json(stage) for table, stage in zip(tables, stages, strict=True)],
        "steps": [_step(stages, tables, number) for number in range(1, len(stages))],
    }


def _pass(stage: Stage) -> dict[str, Any]:
    report = stage.report
    return {
        "name": stage.name,
        "seconds": stage.seconds,
        "failure": stage.failure,
        "summary": report.summary if report else "",
        "taken": taken(report) if report else [],
    }


class _Table:
    """The nodes of a stage in program order, a call before the nodes of its body."""

    def __init__(self, flow: Dataflow, stage: Stage) -> None:
        self.flow = flow
        self.order = flow.outside_in
        self.row = {flow.key(number): row for row, number in enumerate(self.order)}
        self.layers = layers_of(stage)
        self.bytes = {point.key: point.bytes for point in timeline(flow)}

    def json(self, stage: Stage) -> dict[str, Any]:
        return {"name": stage.name, "nodes": [self._node(number) for number in self.order]}

    def _node(self, number: int) -> dict[str, Any]:
        flow, node = self.flow, self.flow.nodes[number]
        region = flow.region[number]
        found = {
            "region": region,
            "name": node.name,
            "target": node.target,
            "call": call_text(node),
            "type": ", ".join(map(type_text, node.values)) or node.scalar,
            "module": node.module,
            "class": node.module_class,
            "layer": layer_of(node.module, region, self.layers),
            "source": str(node.source or ""),
            "file": node.source.file if node.source else "",
            "code": node.source.code if node.source else "",
            "binds": ", ".join(node.binds),
            "read": node.host_read,
            "flops": node.flops,
            "live": self.bytes.get(flow.key(number)),
            "inputs": [self.row[flow.key(i)] for i in dict.fromkeys(flow.inputs[number])],
            "users": [self.row[flow.key(i)] for i in dict.fromkeys(flow.users[number])],
        }
        return {key: value for key, value in found.items() if value not in ("", None, False, [])}


def _step(stages: list[Stage], tables: list[_Table], number: int) -> dict[str, Any]:
    """One pass: the pairs of rows, the changes of rows, and the changes in sections of identical layers."""
    before, after = stages[number - 1], stages[number]
    old, new = tables[number - 1].row, tables[number].row
    found = diff(before, after, (tables[number - 1].flow, tables[number].flow))
    changes = [
        {
            "kind": change.kind.name.lower(),
            "before": old[change.before] if change.before else None,
            "after": new[change.after] if change.after else None,
            "detail": change.detail,
        }
        for change in found.changes
    ]
    position = {id(change): index for index, change in enumerate(found.changes)}
    sections = [
        {
            "title": section.title,
            "lines": [
                {
                    "kind": line.kind.name.lower(),
                    "source": line.source,
                    "code": line.code,
                    "module": line.module,
                    "what": line.what,
                    "changes": [position[id(change)] for change in line.changes],
                }
                for line in section.lines
            ],
        }
        for section in collapse(found, before, after)
    ]
    return {
        "name": after.name,
        "before": number - 1,
        "after": number,
        "pairs": [[old[key], new[other]] for key, other in found.matches.items()],
        "prologue": [[old[key], new[other]] for key, other in found.to_prologue.items() if other is not None],
        "changes": changes,
        "sections": sections,
    }
