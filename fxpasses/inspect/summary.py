"""A record's contents as JSON values, for all reports: figures, changes in sections, reasons, symbols."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from fxpasses.inspect.changes import diff
from fxpasses.inspect.codec import to_json
from fxpasses.inspect.collapse import Section, collapse
from fxpasses.inspect.dataflow import Dataflow
from fxpasses.inspect.figures import Figures, figures, saved_before_and_after
from fxpasses.inspect.ledger import ledger
from fxpasses.inspect.model import Graph, Run, Stage
from fxpasses.inspect.whynot import near_misses
from fxpasses.report import Report


def summary(run: Run) -> dict[str, Any]:
    """The whole record; docs/inspect.md names the fields."""
    return {
        **header(run),
        "attention": run.attention,
        "rows": run.rows,
        "graphs": [_graph(graph) for graph in run.graphs],
    }


def header(run: Run) -> dict[str, Any]:
    return {"started": run.started, "program": run.program, "versions": run.versions, "rank": run.rank}


def _graph(graph: Graph) -> dict[str, Any]:
    return {
        **facts(graph, figures(graph.captured), figures(graph.final), Dataflow(graph.final)),
        "changes": {after.name: _changes(before, after) for before, after in graph.steps()},
    }


def facts(graph: Graph, before: Figures, after: Figures, final: Dataflow) -> dict[str, Any]:
    """Everything except the changes. before, after: the graph's figures; final: the dataflow of its last stage."""
    return {
        "compile_id": graph.compile_id,
        "function": graph.function,
        "outcome": graph.outcome,
        "compile_seconds": graph.compile_seconds,
        "figures": {"before": asdict(before), "after": asdict(after)},
        "saved_for_backward": dict(zip(("before", "after"), saved_before_and_after(graph), strict=True)),
        "cuda_graphs": {name: {"whole": found.whole, **to_json(found)} for name, found in graph.cuda_graphs.items()},
        "transfers": [asdict(transfer) for report in graph.reports for transfer in report.transfers],
        "passes": [_pass(stage) for stage in graph.stages[1:]],
        "left_alone": [asdict(miss) for miss in near_misses(graph)],
        "symbols": [{**asdict(account), "problem": account.problem} for account in ledger(graph.final, final)],
        "checks": graph.final.checks,
    }


def _changes(before: Stage, after: Stage) -> list[dict[str, Any]]:
    return [section_json(section) for section in collapse(diff(before, after), before, after)]


def _pass(stage: Stage) -> dict[str, Any]:
    report = stage.report
    return {
        "name": stage.name,
        "seconds": stage.seconds,
        "changed": stage.regions is not None,
        "failure": stage.failure,
        "summary": report.summary if report else "",
        "figures": report.figures if report else {},
        "taken": taken(report) if report else [],
    }


def section_json(section: Section) -> dict[str, Any]:
    return {
        "layers": section.layers,
        "changes": [
            {
                "kind": group.kind.name.lower(),
                "target": group.target,
                "source": group.source,
                "code": group.code,
                "module": group.module,
                "detail": group.detail,
                "count": len(group.changes),
                "once_a_batch": group.results,
                "nodes": [list(change.before or change.after or ()) for change in group.changes],
            }
            for group in section.groups
        ],
    }


def taken(report: Report) -> list[str]:
    """The changes in a pass's report, with identical lines of several layers once."""
    times = Counter(report.changes)
    return [f"{change} (×{count})" if count > 1 else change for change, count in times.items()]
