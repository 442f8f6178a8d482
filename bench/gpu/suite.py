"""The tests marked `gpu`, in the time that there is."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.outcomes import VARIABLE
from bench.peer import ROOT

MARK = "mark.gpu"
Found = dict[str, Any]


def files(root: Path = ROOT) -> list[str]:
    """Test files that use the mark, relative to `root`: collecting all the others takes most of a minute."""
    found = [file for file in (root / "tests").rglob("test_*.py") if MARK in file.read_text()]
    return sorted(str(file.relative_to(root)) for file in found)


def run(
    targets: Sequence[str], until: float, processes: int, keep: Callable[[Found], None], file: Path | None = None
) -> None:
    """Run the gpu tests of these files or of these names until the time, as `time.monotonic()` has it.

    keep: given {"tests": {name: {"outcome", "why", "seconds"}}, "ended": why the suite was cut short, or ""}, also
    where the run is interrupted. A test that was collected and did not end is "not run". file: for pytest's own output.
    """
    with tempfile.TemporaryDirectory(prefix="fxpasses-gpu-") as folder:
        lines = Path(folder) / "outcomes"
        output = file or Path(folder) / "output"
        process = start(targets, processes, lines, output)
        began, ended = time.monotonic(), "the suite was interrupted"
        try:
            code = process.wait(max(0.0, until - began))
            # 0: all passed; 1: some failed; 5: none collected.
            ended = "" if code in (0, 1, 5) else f"pytest ended with code {code}: {last_line(output)}"
        except subprocess.TimeoutExpired:
            ended = f"the suite was ended after {time.monotonic() - began:.0f} s, when its time was over"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            keep({"tests": read(lines.read_text().splitlines() if lines.exists() else []), "ended": ended})


def start(targets: Sequence[str], processes: int, lines: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "bench.gpu.outcomes", "-p", "no:cacheprovider"]
    if processes > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(processes), "--dist", "worksteal"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as log:
        return subprocess.Popen(
            [*command, *targets],
            cwd=ROOT,
            env=os.environ | {VARIABLE: str(lines), "PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all of its processes end with it
        )


def last_line(file: Path) -> str:
    return next((line for line in reversed(file.read_text(errors="replace").splitlines()) if line.strip()), "")


def read(lines: Iterable[str]) -> dict[str, Found]:
    """The outcome of each test, from what `outcomes.py` wrote; the last line may be a part of one."""
    found: dict[str, Found] = {}
    for line in lines:
        try:
            known = json.loads(line)
        except ValueError:
            continue
        for name in known.get("collected", []):
            found.setdefault(name, {"outcome": "not run", "why": "", "seconds": 0.0})
        if "test" in known:
            name = known.pop("test")
            earlier = found.get(name, {})
            # A test that passed, and failed as it was torn down, has failed.
            if earlier.get("outcome") != "failed":
                found[name] = known
    return found


def not_run(found: Mapping[str, Any]) -> list[str]:
    return [name for name, test in found["tests"].items() if test["outcome"] == "not run"]
