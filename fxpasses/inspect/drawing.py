"""Draws a part of a graph: as DOT, and as SVG if Graphviz is installed.

A drawing has a node and its neighbourhood within a few steps, as drawings of a model's whole graph are unreadable.
"""

from __future__ import annotations

import re
import shutil
import subprocess

from fxpasses.inspect.changes import Kind, diff
from fxpasses.inspect.dataflow import Dataflow
from fxpasses.inspect.failure import Failure
from fxpasses.inspect.model import Stage
from fxpasses.inspect.readable import type_text

_COLORS = {
    Kind.REMOVED: "#b3261e", Kind.PROLOGUE: "#00696f", Kind.ADDED: "#1a6b2d", Kind.REWIRED: "#8a5200",
    Kind.MOVED: "#7a2a8c", Kind.METADATA: "#2c4bb8",
}  # fmt: skip
_SECONDS = 30  # on some graphs Graphviz does not terminate in practice


def dot(stage: Stage, around: str, steps: int = 2, before: Stage | None = None) -> str:
    """The nodes within `steps` edges of the node called `around`, in DOT; changes since `before` are coloured.

    Raises `Failure` if there is no such node.
    """
    graph = Dataflow(stage)
    centre = [number for number, node in enumerate(graph.nodes) if node.name == around]
    if not centre:
        raise Failure(f"the stage {stage.name!r} has no node {around!r}")
    chosen = set(centre)
    for _ in range(steps):
        edge = {near for number in chosen for near in (*graph.inputs[number], *graph.users[number])}
        chosen |= edge
    kinds = {}
    if before is not None:
        kinds = {change.after: change.kind for change in diff(before, stage).changes if change.after}
    lines = ["digraph graph_region {", '  node [shape=box, style=rounded, fontname="monospace", fontsize=10]']
    regions = dict.fromkeys(graph.region[number] for number in sorted(chosen))
    for position, region in enumerate(regions):
        lines += [f"  subgraph cluster_{position} {{", f"    label={_quoted(region)}"]
        for number in sorted(chosen):
            if graph.region[number] == region:
                lines.append(f"    n{number} [{_attributes(graph, number, kinds.get(graph.key(number)), centre)}]")
        lines.append("  }")
    for number in sorted(chosen):
        lines += [f"  n{taken} -> n{number}" for taken in graph.inputs[number] if taken in chosen]
    return "\n".join([*lines, "}", ""])


def svg(text: str) -> str:
    """The drawing of a DOT text; raises `Failure` without Graphviz."""
    if shutil.which("dot") is None:
        raise Failure("Graphviz is not installed (the command `dot`); DOT files need none")
    try:
        done = subprocess.run(
            ["dot", "-Tsvg"], input=text, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise Failure(f"Graphviz failed: {error}") from error
    return done.stdout


def _attributes(graph: Dataflow, number: int, kind: Kind | None, centre: list[int]) -> str:
    node = graph.nodes[number]
    lines = [node.name, node.short_target if node.op.startswith("call") else node.op]
    lines += [type_text(value) for value in node.values[:1]] + ([str(node.source)] if node.source else [])
    found = f"label={_quoted(chr(10).join(lines))}"
    if kind is not None:
        found += f', color="{_COLORS[kind]}", fontcolor="{_COLORS[kind]}", tooltip={_quoted(kind.value)}'
    return found + (", penwidth=3" if number in centre else "")


def _quoted(text: str) -> str:
    """A DOT string, in which a record's names cannot be syntax."""
    clean = re.sub(r"[\x00-\x09\x0b-\x1f]", " ", text).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + clean.replace("\n", "\\n") + '"'
