"""`fxpasses diff`: shows the differences between two records."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxpasses.inspect.comparison import GraphComparison
    from fxpasses.inspect.model import Run
    from fxpasses.inspect.text import Style

NAME = "diff"
HELP = "compare two records: two versions of torch, two options, two commits"
EPILOG = """\
examples:
  fxpasses inspect --save a.jsonl train.py
  fxpasses inspect --save b.jsonl train.py --other-option
  fxpasses diff a.jsonl b.jsonl
  fxpasses diff --stage captured a.jsonl b.jsonl    what reached the passes, not their results

Names, numbers and the order of nodes make no difference.
exit codes: 0 the graphs are the same; 1 they differ; 2 a file cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stage", default="", metavar="NAME", help="captured, or the name of a pass (default: the last stage)"
    )
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    parser.add_argument("--all", action="store_true", help="print all differences in full")
    parser.add_argument("before", metavar="A", help="a record, or a folder of records")
    parser.add_argument("after", metavar="B", help="another record or folder")


def run(given: argparse.Namespace) -> int:
    from fxpasses.inspect.cli.records import load_one
    from fxpasses.inspect.comparison import compare
    from fxpasses.inspect.text import Style

    before, after = load_one(given.before), load_one(given.after)
    found = compare(before, after, given.stage)
    differs = any(graph.differs for graph in found)
    if given.json:
        print(json.dumps(_json(found), ensure_ascii=False, indent=1))
    else:
        print("\n\n".join(_text(before, after, found, Style.of(sys.stdout, given.all))))
    return int(differs)


def _text(before: Run, after: Run, found: list[GraphComparison], style: Style) -> list[str]:
    from fxpasses.inspect.comparison_text import comparison_report, run_differences

    heading = run_differences(before, after)
    parts = [heading] if heading else []
    same = sum(not graph.differs for graph in found)
    parts += [comparison_report(graph, style) for graph in found if graph.differs]
    if same:
        parts.append(f"{same} graph{'s are' if same > 1 else ' is'} the same in both")
    return parts or ["neither record holds a graph"]


def _json(found: list[GraphComparison]) -> list[dict[str, object]]:
    from fxpasses.inspect.summary import section_json

    return [
        {
            "compile_id": (graph.before or graph.after).compile_id,  # type: ignore[union-attr]
            "in": [name for name, side in (("before", graph.before), ("after", graph.after)) if side is not None],
            "figures": {"before": asdict(graph.figures[0]), "after": asdict(graph.figures[1])},
            "changes": [section_json(section) for section in graph.sections],
            "reasons_gone": graph.reasons_gone,
            "reasons_new": graph.reasons_new,
        }
        for graph in found
    ]
