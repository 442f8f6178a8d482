"""`fxpasses bisect`: which pass, and which graph, makes a check fail."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxpasses.inspect.model import Graph

NAME = "bisect"
HELP = "find the pass and the graph that make a check fail, and write a program that reproduces it"
EPILOG = """\
SCRIPT fails if its exit code is not 0, as with a failed assertion. It is run several times, each time in a new process
with FXPASSES_PASSES (the passes to run) and FXPASSES_GRAPHS (on how many graphs) in the environment.

examples:
  fxpasses bisect check.py
  fxpasses bisect --output repro.py --timeout 600 -- check.py --layers 2

exit codes: 0 the pass was found; 1 there is none to find: SCRIPT does not fail, or fails without passes as well;
2 wrong arguments.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", default="fxpasses-reproduction.py", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="of one run; a run that takes longer fails")
    parser.add_argument("--verbose", action="store_true", help="show what the script prints")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that exits with 0 if all is well")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own")


def run(given: argparse.Namespace) -> int:
    from fxpasses.inspect.cli.main import Failure

    if not Path(given.script).is_file():
        raise Failure(f"{given.script}: there is no such file")
    with tempfile.TemporaryDirectory(prefix="fxpasses-bisect-") as folder:
        return _bisect(_Check(given, Path(folder)), given)


@dataclass
class _Check:
    """The script, to be run under other passes. Every run that is asked for a record writes it to a fresh folder."""

    given: argparse.Namespace
    folder: Path
    runs: int = 0

    def fails(self, what: str, environment: Mapping[str, str]) -> bool:
        self.runs += 1
        records = self.folder / str(self.runs)
        extra = {**environment, "FXPASSES_RECORD": str(records), "FXPASSES_RECORD_VALUES": "1"}
        command = [sys.executable, self.given.script, *self.given.arguments]
        output = None if self.given.verbose else subprocess.DEVNULL
        try:
            code = subprocess.run(
                command, env={**os.environ, **extra}, stdout=output, stderr=output, timeout=self.given.timeout
            ).returncode
            result = f"exit code {code}"
        except subprocess.TimeoutExpired:
            code, result = 1, f"no end after {self.given.timeout:g} s"
        print(f"{what}: {'fails' if code else 'passes'} ({result})", flush=True)
        return code != 0

    def graphs(self) -> list[Graph]:
        """What the last run compiled, in all its processes."""
        from fxpasses.inspect.cli.records import load_all

        records = self.folder / str(self.runs)
        return [graph for record in load_all(str(records)) for graph in record.graphs] if records.exists() else []


def _bisect(check: _Check, given: argparse.Namespace) -> int:
    from fxpasses.overrides import GRAPHS, PASSES

    if not check.fails("with all passes", {}):
        print("there is nothing to find: the script does not fail")
        return 1
    graphs = check.graphs()
    passes = list(dict.fromkeys(stage.name for graph in graphs for stage in graph.stages[1:]))
    if check.fails("without passes", {PASSES: ""}):
        print("it fails without any pass as well: the passes are not the cause")
        return 1
    if not passes:
        print("no pass ran in a graph that was compiled to the end: try options={'fastpack.strict': True}")
        return 1
    culprit = passes[-1]
    for number in range(1, len(passes)):
        if check.fails(f"with {', '.join(passes[:number])}", {PASSES: ",".join(passes[:number])}):
            culprit = passes[number - 1]
            break
    before = passes[: passes.index(culprit)]
    chosen = [culprit]
    if before and not check.fails(f"with {culprit} alone", {PASSES: culprit}):
        chosen = [*before, culprit]
    environment = {PASSES: ",".join(chosen)}
    limit = _smallest_limit(check, environment, max(len(graphs), 1))
    if limit is None:
        print(f"found: the pass {culprit}; no single graph could be told")
        return 0
    environment[GRAPHS] = str(limit)
    check.fails("once more, for the record", environment)
    changed = [g for g in check.graphs() if any(s.name == culprit and s.regions is not None for s in g.stages)]
    _tell(culprit, chosen, environment, changed[-1] if changed else None, given)
    return 0


def _smallest_limit(check: _Check, environment: Mapping[str, str], graphs: int) -> int | None:
    """The number of graphs that must be rewritten for the check to fail; the last of them is the culprit."""
    from fxpasses.overrides import GRAPHS

    def fails(limit: int) -> bool:
        what = f"with passes on the first {limit} graphs" if limit != 1 else "with passes on the first graph"
        return check.fails(what, {**environment, GRAPHS: str(limit)})

    high = graphs
    if graphs > 1 and not fails(high):  # another number of graphs in each run: nothing can be told
        return None
    low = 0  # without passes it does not fail
    while high - low > 1:
        middle = (low + high) // 2
        if fails(middle):
            high = middle
        else:
            low = middle
    return high


def _tell(
    culprit: str,
    passes: list[str],
    environment: Mapping[str, str],
    graph: Graph | None,
    given: argparse.Namespace,
) -> None:
    from fxpasses.inspect.text import Style, changes

    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    command = f"{variables} python {shlex.join([given.script, *given.arguments])}"
    print(f"\nfound: the pass {culprit}" + (f", after {', '.join(passes[:-1])}" if len(passes) > 1 else ""))
    print(f"again: {command}")
    if graph is None:
        return
    print(f"graph: {graph.compile_id or '?'}, {graph.function}")
    steps = [(before, after) for before, after in graph.steps() if after.name == culprit]
    for before, after in steps:
        print(changes(before, after, f"what {culprit} changed in it", Style.of(sys.stdout)))
    _write_reproduction(graph, passes, given)


def _write_reproduction(graph: Graph, passes: list[str], given: argparse.Namespace) -> None:
    from fxpasses.inspect.reproduction import CannotReproduce, reproduction

    try:
        text = reproduction(graph, passes, Path(given.output).name)
    except CannotReproduce as error:
        print(f"no reproduction was written: it cannot hold {error}")
        return
    Path(given.output).write_text(text, encoding="utf-8")
    print(f"wrote {given.output}, which {_try(given)}")


def _try(given: argparse.Namespace) -> str:
    """Whether the reproduction shows the failure, in words."""
    from fxpasses.inspect.reproduction import AGREE, DISAGREE

    try:
        done = subprocess.run(
            [sys.executable, given.output], capture_output=True, text=True, errors="replace", timeout=given.timeout
        )
    except subprocess.TimeoutExpired:
        return "does not end in time"
    if DISAGREE in done.stdout:
        return "fails as well"
    if AGREE in done.stdout:
        return "does not fail by itself: what goes wrong needs more of the program"
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"stops with an error, perhaps another: {last}"
