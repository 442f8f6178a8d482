"""What the faces show of a record, as JSON values: figures, changes in sections, reasons, symbols."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fxpasses.inspect.changes import diff
from fxpasses.inspect.collapse import Section, collapse
from fxpasses.inspect.figures import before_and_after
from fxpasses.inspect.ledger import ledger
from fxpasses.inspect.model import Graph, Run, Stage
from fxpasses.inspect.whynot import near_misses


def summary(run: Run) -> dict[str, Any]:
    """The whole record; docs/inspect.md names the fields."""
    return {
        "started": run.started,
        "program": run.program,
        "versions": run.versions,
        "rank": run.rank,
        "graphs": [graph_summary(graph) for graph in run.graphs],
    }


def graph_summary(graph: Graph) -> dict[str, Any]:
    before, after = before_and_after(graph)
    return {
        "compile_id": graph.compile_id,
        "function": graph.function,
        "outcome": graph.outcome,
        "compile_seconds": graph.compile_seconds,
        "figures": {"before": asdict(before), "after": asdict(after)},
        "saved_for_backward": graph.partition.saved_bytes if graph.partition is not None else None,
        "transfers": [asdict(transfer) for report in graph.reports for transfer in report.transfers],
        "passes": [_pass(stage) for stage in graph.stages[1:]],
        "changes": {after.name: changes(before, after) for before, after in graph.steps()},
        "left_alone": [asdict(miss) for miss in near_misses(graph)],
        "symbols": [{**asdict(account), "problem": account.problem} for account in ledger(graph.final)],
        "checks": graph.final.checks,
    }


def changes(before: Stage, after: Stage) -> list[dict[str, Any]]:
    """The sections of equal layers between two stages."""
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
