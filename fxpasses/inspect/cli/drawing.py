"""`fxpasses draw`: draws a part of a recorded graph as DOT or SVG."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fxpasses.inspect.failure import Failure, check_folder

NAME = "draw"
HELP = "draw the neighbourhood of a node of a recorded graph, as DOT or SVG"
EPILOG = """\
examples:
  fxpasses draw run.jsonl matmul                        DOT, after the last pass
  fxpasses draw --output near.svg --steps 3 run.jsonl matmul
  fxpasses draw --stage captured --graph 1/0 run.jsonl item

exit codes: 0 success; 2 a file cannot be read, the node does not exist, or Graphviz is missing for SVG.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--graph", default="", metavar="ID", help="compile id of the graph; default: the first graph that has the node"
    )
    parser.add_argument(
        "--stage", default="", metavar="NAME", help="captured, or the name of a pass; default: the last stage"
    )
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="edges away from the node; default: 2")
    parser.add_argument("--output", metavar="FILE", help="a .dot or .svg file; default: DOT on standard output")
    parser.add_argument("record", metavar="RECORD", help="a record, or a folder of records")
    parser.add_argument("node", metavar="NODE", help="the name of a node, as reports show it")


def run(given: argparse.Namespace) -> int:
    from fxpasses.inspect.cli.records import load_one
    from fxpasses.inspect.drawing import dot, svg

    check_folder(given.output)
    graphs = [graph for graph in load_one(given.record).graphs if given.graph in ("", graph.compile_id)]
    if not graphs:
        raise Failure(f"{given.record}: holds no graph {given.graph}".rstrip())
    for graph in graphs:
        stages = [stage for stage in graph.stages if stage.regions is not None]
        named = [i for i, stage in enumerate(stages) if given.stage in ("", stage.name)]
        if not named:
            raise Failure(f"there is no stage {given.stage!r}; there are {', '.join(s.name for s in stages)}")
        number = named[-1]
        names = {node.name for region in stages[number].regions or () for node in region.nodes}
        if given.node in names or graph is graphs[-1]:
            break
    text = dot(stages[number], given.node, given.steps, stages[number - 1] if number else None)
    if given.output is None:
        sys.stdout.write(text)
    else:
        Path(given.output).write_text(svg(text) if given.output.endswith(".svg") else text, encoding="utf-8")
    return 0
