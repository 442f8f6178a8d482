"""Runs many small scripts in sequence, each in a fork of one process that has already imported torch.

`python -m fxpasses.inspect.cli.trials` is that process: it reads a request per line and answers each with a line.
Without `os.fork` each script is a process of its own, which takes seconds longer.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from fxpasses.inspect.reproduction import AGREE, DISAGREE


def outcome(printed: str) -> str:
    """The outcome of a reproduction by its output: "agree", "disagree", or the type of the error that ended it."""
    if DISAGREE in printed:
        return "disagree"
    if AGREE in printed:
        return "agree"
    last = next((line for line in reversed(printed.splitlines()) if line and not line[0].isspace()), "no message")
    return last.split(":", 1)[0]


def alone(file: str, timeout: float | None, environment: dict[str, str] | None = None) -> str:
    """The output of a script run as a person would run it; "" if it takes longer than `timeout` seconds."""
    try:
        return subprocess.run(
            [sys.executable, file], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=timeout, env={**os.environ, **(environment or {})},
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""


class Trials:
    """Runs scripts within a `with` block, until `seconds` have passed."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.count = 0

    def __enter__(self) -> Trials:
        self.folder = tempfile.TemporaryDirectory(prefix="fxpasses-trials-")
        self.server: subprocess.Popen[str] | None = None
        if hasattr(os, "fork"):
            command = [sys.executable, "-m", __name__]
            self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self.server.stdout is not None
            self.server.stdout.readline()  # the server is ready, or could not start, and then no trial ends
        self.ends = time.monotonic() + self.seconds
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.communicate()
        self.folder.cleanup()

    @property
    def over(self) -> bool:
        return time.monotonic() > self.ends

    def run(self, text: str) -> str:
        """The output of a script; "" if time is up."""
        left = self.ends - time.monotonic()
        if left <= 0:
            return ""
        self.count += 1
        script = Path(self.folder.name) / "trial.py"
        printed = Path(self.folder.name) / "printed.txt"
        script.write_text(text, encoding="utf-8")
        if self.server is None or self.server.stdin is None or self.server.stdout is None:
            return alone(str(script), left)
        try:
            print(json.dumps([str(script), str(printed), left]), file=self.server.stdin, flush=True)
        except BrokenPipeError:
            return ""
        if not self.server.stdout.readline():  # the server has ended
            return ""
        return printed.read_text(encoding="utf-8", errors="replace")


def serve() -> None:
    import torch

    # The first compilation of a process imports and builds much: here once, and not in each fork.
    torch.compile(lambda x: x + 1, backend="fastpack", options={"fastpack.lowering": "eager"})(torch.ones(1))
    torch._dynamo.reset()

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        script, printed, seconds = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(script, printed)
        ends = time.monotonic() + seconds
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > ends:
                os.kill(child, 9)
                os.waitpid(child, 0)
                Path(printed).write_text("")
                break
            time.sleep(0.01)
        print("done", file=answers, flush=True)


def _become(script: str, printed: str) -> None:
    import traceback

    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = [script]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    serve()
