"""Writes the program that reproduces what `fxpasses bisect` found, and has it reduced."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxpasses.inspect.model import Graph

_GRACE = 30  # seconds in which the minimiser has to start and to end


@dataclass
class Reproduction:
    """A graph as the program `file`, with `environment` as its limits on passes.

    timeout: for one run, in seconds. minimise: how long to reduce the program, in seconds.
    """

    graph: Graph
    passes: list[str]
    environment: dict[str, str]
    file: str
    timeout: float | None
    minimise: float

    def write(self) -> str:
        """Write the program; returns a line that says whether it fails as the script does."""
        from fxpasses.inspect.reproduction import CannotReproduce, outcome, reproduction

        try:
            text = reproduction(self.graph, self.passes, Path(self.file).name, self.environment)
        except CannotReproduce as error:
            return f"no reproduction was written: it cannot hold {error}"
        Path(self.file).write_text(text, encoding="utf-8")
        printed = self._run()
        found = outcome(printed)
        if not printed:
            result = "does not end in time"
        elif found == "agree":
            result = "does not fail by itself: the failure needs more of the program"
        elif not self._passes_without():
            last = (printed.strip().splitlines() or ["no message"])[-1]
            result = f"fails without the passes as well, and so shows something else: {last}"
        else:
            smaller = self._reduce(text, found) if self.minimise > 0 else ""
            result = f"fails as well, and passes without the passes{smaller}"
        return f"wrote {self.file}, which {result}"

    def _run(self, **environment: str) -> str:
        """The output of the program, run as a person would run it; "" if it does not end in time."""
        try:
            return subprocess.run(
                [sys.executable, self.file], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", timeout=self.timeout, env={**os.environ, **environment},
            ).stdout  # fmt: skip
        except subprocess.TimeoutExpired:
            return ""

    def _passes_without(self) -> bool:
        from fxpasses.base.overrides import PASSES
        from fxpasses.inspect.reproduction import outcome

        return outcome(self._run(**{PASSES: ""})) == "agree"

    def _reduce(self, text: str, wanted: str) -> str:
        """Write a smaller program with the same failure, if there is one; returns a text that says so."""
        from fxpasses.inspect.minimise import Request
        from fxpasses.inspect.reproduction import outcome

        request = Request(self.file, wanted, self.graph.function, self.passes, self.environment, self.minimise)
        command = [sys.executable, "-m", "fxpasses.inspect.minimise", json.dumps(asdict(request))]
        ends = time.monotonic() + self.minimise
        with tempfile.TemporaryFile("w+") as progress:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the file holds the smallest program until then
                subprocess.run(command, stdout=progress, stderr=subprocess.DEVNULL, timeout=self.minimise + _GRACE)
            stopped = ", when time was up" if time.monotonic() > ends else ""
            progress.seek(0)
            taken = progress.read().splitlines()
        if not taken or outcome(self._run()) != wanted or not self._passes_without():
            Path(self.file).write_text(text, encoding="utf-8")
            return f" (all {self.graph.nodes} nodes of the graph: no smaller one fails by itself)"
        nodes, trials = taken[-1].split()
        return f" ({nodes} of the graph's {self.graph.nodes} nodes, after {trials} trials{stopped})"
