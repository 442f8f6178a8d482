"""`fxpasses bisect`: finds the pass, the graph and the change that make a check fail."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fxpasses.inspect.cli.reproducing import Reproduction
from fxpasses.inspect.failure import Failure, check_folder

if TYPE_CHECKING:
    from fxpasses.inspect.model import Graph
    from fxpasses.report import Report

NAME = "bisect"
HELP = "find the pass, graph and change that make a check fail, and write a program that reproduces it"
EPILOG = """\
SCRIPT fails if its exit code is not 0, as with a failed assertion. It is run several times, each time in a new process
with FXPASSES_PASSES (the passes to run), FXPASSES_GRAPHS (on how many graphs) and FXPASSES_CHANGES (how many changes of
a pass) in the environment. Then the graph is written as a program of its own, and reduced while it still fails.

examples:
  fxpasses bisect check.py
  fxpasses bisect --output repro.py --timeout 600 -- check.py --layers 2

exit codes: 0 the pass was found; 1 no pass is at fault: SCRIPT does not fail, or fails without passes as well;
2 wrong arguments.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", default="fxpasses-reproduction.py", metavar="FILE", help="default: %(default)s")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="limit for one run; a longer run fails")
    parser.add_argument(
        "--minimise", type=float, default=120, metavar="SECONDS",
        help="how long to reduce the reproduction; 0 keeps the whole graph (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="show what the script prints")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that exits with 0 if all is well")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script")


def run(given: argparse.Namespace) -> int:
    check_folder(given.output)
    if not Path(given.script).is_file():
        raise Failure(f"{given.script}: there is no such file")
    with tempfile.TemporaryDirectory(prefix="fxpasses-bisect-") as folder:
        return _bisect(_Check(given, Path(folder)), given)


@dataclass
class _Check:
    """Runs the script under given limits. Every run writes its record to a folder of its own."""

    given: argparse.Namespace
    folder: Path
    last: int = 0  # the number of the run that `graphs` reads
    done: dict[str, tuple[bool, int]] = field(default_factory=dict)  # by environment: whether it failed, and the run

    def fails(self, what: str, environment: Mapping[str, str]) -> bool:
        """Run the script, or use the result of an earlier run in the same environment."""
        key = repr(sorted(environment.items()))
        if key not in self.done:
            self.last = len(self.done) + 1
            self.done[key] = self._run(what, environment), self.last
        failed, self.last = self.done[key]
        return failed

    def _run(self, what: str, environment: Mapping[str, str]) -> bool:
        records = self.folder / str(self.last)
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
        """The graphs that the last run compiled, in all its processes."""
        return [graph for process in self.processes() for graph in process]

    def processes(self) -> list[list[Graph]]:
        from fxpasses.inspect.cli.records import load_all

        records = self.folder / str(self.last)
        return [list(record.graphs) for record in load_all(str(records))] if records.exists() else []

    def last_changed(self, culprit: str) -> tuple[Graph | None, int]:
        """The last graph that a pass changed in the last run, and the number of changes it requested before."""
        found: Graph | None = None
        asked_before = 0
        for process in self.processes():
            asked = 0
            for graph in process:
                own = _report(graph, culprit)
                if own is not None and own.changed:
                    found, asked_before = graph, asked
                asked += own.asked if own is not None else 0
        return found, asked_before


def _report(graph: Graph, culprit: str) -> Report | None:
    return next((stage.report for stage in graph.stages if stage.name == culprit), None)


def _bisect(check: _Check, given: argparse.Namespace) -> int:
    from fxpasses.base.overrides import GRAPHS, PASSES

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

    def fails(number: int) -> bool:
        return check.fails(f"with {', '.join(passes[:number])}", {PASSES: ",".join(passes[:number])})

    *before, culprit = passes[: _first_failing(len(passes), fails)]
    chosen = [culprit]
    if before and not check.fails(f"with {culprit} alone", {PASSES: culprit}):
        chosen = [*before, culprit]
    environment = {PASSES: ",".join(chosen)}
    limit = _smallest_limit(check, environment, max(len(graphs), 1))
    if limit is None:
        print(f"found: the pass {culprit}; no single graph could be determined")
        return 0
    environment[GRAPHS] = str(limit)
    check.fails("again, for its record", environment)
    graph, asked_before = check.last_changed(culprit)
    found = _smallest_change(check, environment, culprit, graph, asked_before) if graph is not None else None
    if found is not None:
        environment = found.environment
    _print_culprit(culprit, chosen, environment, graph, found, given)
    return 0


@dataclass
class _Change:
    """One change of a pass: the `number`-th of `of` in the graph.

    failing, passing: the graph with the change, and without. environment: limits the pass to changes up to this one.
    """

    number: int
    of: int
    environment: dict[str, str]
    failing: Graph | None
    passing: Graph | None


def _smallest_change(
    check: _Check, environment: Mapping[str, str], culprit: str, graph: Graph, before: int
) -> _Change | None:
    """The change within a graph that makes the check fail; None if the pass requests none, or not the wrong one."""
    from fxpasses.base.overrides import CHANGES

    report = _report(graph, culprit)
    asked = report.asked if report is not None else 0
    if not asked:
        return None

    def limit(number: int) -> dict[str, str]:
        return {**environment, CHANGES: f"{culprit}:{before + number}"}

    def fails(number: int) -> bool:
        return check.fails(f"with {number} of {asked} changes in that graph", limit(number))

    def tried(number: int) -> Graph | None:
        fails(number)
        same = (g for g in reversed(check.graphs()) if (g.compile_id, g.function) == (graph.compile_id, graph.function))
        return next(same, None)

    if fails(0):
        print(f"it fails without these changes as well: the cause is something else that {culprit} does")
        return None
    number = _first_failing(asked, fails)
    failing = graph if number == asked else tried(number)
    return _Change(number, asked, limit(number), failing, tried(number - 1))


def _smallest_limit(check: _Check, environment: Mapping[str, str], graphs: int) -> int | None:
    """The number of graphs that must be rewritten for the check to fail; the last of them is the culprit."""
    from fxpasses.base.overrides import GRAPHS

    def fails(limit: int) -> bool:
        what = f"with passes on the first {limit} graphs" if limit != 1 else "with passes on the first graph"
        return check.fails(what, {**environment, GRAPHS: str(limit)})

    if graphs > 1 and not fails(graphs):  # the number of graphs varies between runs
        return None
    return _first_failing(graphs, fails)


def _first_failing(high: int, fails: Callable[[int], bool]) -> int:
    """The smallest number that fails, by bisection, where 0 does not fail and `high` does."""
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if fails(middle):
            high = middle
        else:
            low = middle
    return high


def _print_culprit(
    culprit: str,
    passes: list[str],
    environment: Mapping[str, str],
    graph: Graph | None,
    found: _Change | None,
    given: argparse.Namespace,
) -> None:
    from fxpasses.base.overrides import CHANGES
    from fxpasses.inspect.text import Style, changes

    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    command = f"{variables} python {shlex.join([given.script, *given.arguments])}"
    print(f"\nfound: the pass {culprit}" + (f", after {', '.join(passes[:-1])}" if len(passes) > 1 else ""))
    print(f"again: {command}")
    if graph is None:
        return
    print(f"graph: {graph.compile_id or '?'}, {graph.function}")
    style = Style.of(sys.stdout)
    if found is not None and found.failing is not None and found.passing is not None:
        title = f"change {found.number} of {found.of} that {culprit} makes in it"
        diffed = changes(found.passing.final, found.failing.final, f"{title}: the graph without it, and with it", style)
        # A record has no graph with folded layers.
        print(diffed or "\n".join([style.bold(title), *_only_in(found.failing, found.passing, culprit)]))
    else:
        for before, after in graph.steps():
            if after.name == culprit:
                print(changes(before, after, f"what {culprit} changed in it", style))
    limits = {CHANGES: f"{culprit}:{found.number}"} if found is not None else {}
    print(Reproduction(graph, passes, limits, given.output, given.timeout, given.minimise).write())


def _only_in(failing: Graph, passing: Graph, culprit: str) -> list[str]:
    """The changes that the pass reports for the first graph alone."""
    reports = (_report(graph, culprit) for graph in (failing, passing))
    changed, unchanged = (Counter(report.changes if report is not None else []) for report in reports)
    return [f"  {change}" for change in changed - unchanged]
