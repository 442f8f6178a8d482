"""`fxpasses explain`: shows what each pass changed, what it left alone, and why."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxpasses.inspect.model import Graph
    from fxpasses.inspect.text import Style

NAME = "explain"
HELP = "show why each candidate in a record was rewritten or left alone"
EPILOG = """\
examples:
  fxpasses explain run.jsonl
  fxpasses explain records/          a folder that FXPASSES_RECORD filled

exit codes: 0 success; 2 a file cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", metavar="RECORD", help="a record, or a folder of records")


def run(given: argparse.Namespace) -> int:
    from fxpasses.inspect.cli.records import load_all
    from fxpasses.inspect.text import Style

    graphs = [graph for record in load_all(given.record) for graph in record.graphs]
    print("\n\n".join(_explain_all(graphs, Style.of(sys.stdout))) or "the record holds no graph")
    return 0


def _explain_all(graphs: list[Graph], style: Style) -> Iterator[str]:
    """Each graph; a recompilation or another rank with an identical explanation only refers to the first."""
    from fxpasses.inspect.text import name, passes, title

    explained: dict[tuple[str, str], str] = {}
    for graph in graphs:
        rank = f", rank {graph.rank}" if graph.rank is not None else ""
        own, text = f"graph {name(graph)}{rank}", _explain(graph, style)
        first = explained.setdefault((graph.function, text), own)
        rest = f"the same as {first}" if first != own else f"{passes(graph, style)}\n{text}"
        yield f"{title(graph, style)}{rank}\n{rest}"


def _explain(graph: Graph, style: Style) -> str:
    from fxpasses.inspect.text import taken, why_not
    from fxpasses.inspect.whynot import near_misses

    parts = []
    for report in graph.reports:
        if report.changes:
            parts.append(style.bold(f"taken by {report.pass_name}"))
            parts += [
                line
                for change in taken(report)
                for line in textwrap.wrap(
                    change, style.width, initial_indent="  · ", subsequent_indent="    ", break_on_hyphens=False
                )
            ]
    misses = near_misses(graph)
    parts.append(why_not(misses, style) if misses else "nothing that a pass looked for was left alone")
    return "\n".join(parts)
